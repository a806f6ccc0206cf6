"""`shardcompute doctor`: what could keep this machine from serving, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options.cluster import CLUSTER_PORT, JOIN_PORT, RELAY_PORT, cluster_folder
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.worker import driver_folder, worker_folder
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.cli.tools.checks import Finding

_API_PORT = 8000
_TIMEOUT_S = 3.0


def doctor(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", metavar="FOLDER", help="Folder of a cluster or worker, by default the usual ones."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Look for what could keep this machine from serving or joining.

    Of a cluster that runs here, every address that its nodes were given is tried, and their versions are compared.
    Every finding that is not good, and every tip, ends with what to do. Ends with 0 if all is well, else with 1.
    """
    from shardcompute.cli.tools.checks import check_clock

    screen, settings = open_screen(), load_settings()
    folders = [cluster_folder(settings, data_dir)]
    if data_dir is None:
        folders += [worker_folder(settings, None), driver_folder(settings, None)]
    look_again = check_clock()
    findings = [*_findings(folders, settings.data_dir), *look_again()]
    if json:
        screen.write_json([_as_json(finding) for finding in findings])
    else:
        for finding in findings:
            _write(screen, finding)
    bad = sum(not finding.is_good for finding in findings)
    screen.say("all is well" if not bad else f"{bad} of {len(findings)} findings need something to be done")
    if bad:
        raise typer.Exit(1)


def _findings(folders: list[Path], home: Path) -> Iterator[Finding]:
    from shardcompute.backends.processor import default_threads
    from shardcompute.cli.tools import checks
    from shardcompute.node.process.local_workers import place_folders

    yield from checks.check_versions()
    yield from checks.check_memory()
    yield from checks.check_devices()
    threads = load_settings().threads or default_threads()
    yield from checks.check_llamacpp(home=home, threads=threads)
    yield from checks.check_disk(folders[0])
    yield from checks.check_disk(
        home / "models", subject="disk for models", elsewhere="set SHARDCOMPUTE_HOME to another folder"
    )
    yield from checks.check_open_files()
    yield from checks.check_congestion()
    yield from checks.check_permissions(home / "services")
    for folder in folders:
        yield from checks.check_permissions(folder)
        yield from _check_cluster(folder) if folder is folders[0] else ()
        for place in (folder, *place_folders(folder)):
            yield from _check_member(place)


def _check_cluster(folder: Path) -> Iterator[Finding]:
    """A cluster that runs from here answers; the ports of one that does not are free."""
    from shardcompute.api.server import port_holder
    from shardcompute.cli.tools import checks
    from shardcompute.node.process.pidfile import CLUSTER_FILE, read_running

    running = read_running(folder / CLUSTER_FILE)
    if running is None:
        wanted = (
            ("HTTP API", _API_PORT, "--port"),
            ("links between nodes", CLUSTER_PORT, "--cluster-port"),
            ("joining", JOIN_PORT, "--join-port"),
            ("the relay", RELAY_PORT, "--relay-port"),
        )
        yield from checks.check_ports_free(wanted, port_holder)
        return
    yield checks.Finding("cluster", f"{running.name} runs here, pid {running.pid}")
    if running.api_url:
        yield from checks.check_reachable([running.api_url])
        certificate = running.api_certificate or None
        yield from _check_api(running.api_url, certificate)
        yield from _check_nodes(running.api_url, certificate, folder)


def _check_nodes(url: str, certificate: str | None, folder: Path) -> Iterator[Finding]:
    """Every address that the cluster gives to its nodes, from this machine, and the nodes' versions."""
    from shardcompute.cli.tools import checks
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.core.errors import ShardComputeError
    from shardcompute.security.local_secret import read_local_secret

    try:
        secret = read_local_secret(folder)
        with ClusterClient(url, api_key=secret, timeout_s=_TIMEOUT_S, tls_certificate=certificate) as client:
            view = client.state()
    except ShardComputeError as error:
        yield checks.Finding("nodes", error.message, error.hint or "see shardcompute logs coordinator")
        return
    there = [node for node in view.nodes if node.status not in ("gone", "lost")]
    addresses = [("links to the coordinator", view.url)]
    addresses += [(f"node {node.name}", node.address) for node in there if node.address]
    addresses += [(f"API of {node.name}", node.api_url) for node in there if node.api_url]
    yield from checks.check_all_reachable(addresses)
    yield from checks.check_node_versions(view.version, [(node.name, node.version) for node in there])


def _check_api(url: str, certificate: str | None) -> Iterator[Finding]:
    import httpx

    from shardcompute.cli.tools import checks
    from shardcompute.security.https.clients import trusting

    trust = True if certificate is None else trusting(certificate)
    try:
        answer = httpx.get(f"{url}/health", timeout=_TIMEOUT_S, trust_env=False, verify=trust)
    except httpx.HTTPError as error:
        yield checks.Finding(
            "HTTP API", f"{url} does not answer: {error}", "see shardcompute logs coordinator"
        )
        return
    is_ready = answer.status_code == 200
    fix = "" if is_ready else "wait until the model is loaded; shardcompute logs shows how far it is"
    yield checks.Finding("HTTP API", f"{url} is {'ready' if is_ready else 'not ready yet'}", fix)
    yield from checks.check_skew(answer.headers.get("date", ""), time.time())


def _check_member(folder: Path) -> Iterator[Finding]:
    """A worker or driver that has joined can reach its coordinator, and its certificate is good."""
    from shardcompute.cli.tools import checks
    from shardcompute.core.errors import ShardComputeError
    from shardcompute.node.enrolment.stored import MEMBER_FILE, open_enrolled
    from shardcompute.node.process.pidfile import DRIVER_FILE
    from shardcompute.security.certificates import parse_certificate
    from shardcompute.security.names import Role

    if not (folder / MEMBER_FILE).exists():
        return
    is_driver = (folder / DRIVER_FILE).exists() or folder.name == "driver"
    role = Role.DRIVER if is_driver else Role.WORKER
    try:
        member = open_enrolled(folder, role)
    except ShardComputeError as error:
        yield checks.Finding(role.value, error.message, error.hint)
        return
    own = member.credentials.own
    starts_at_s = parse_certificate(member.credentials.certificate_pem).not_valid_before_utc.timestamp()
    yield from checks.check_certificate(role.value, own.cluster, starts_at_s, own.expires_at_s, time.time())
    yield from checks.check_reachable(member.control_urls)


def _as_json(finding: Finding) -> dict[str, str | bool]:
    return {
        "subject": finding.subject,
        "text": finding.text,
        "fix": finding.fix,
        "level": finding.level,
        "is_good": finding.is_good,
    }


def _write(screen: Screen, finding: Finding) -> None:
    mark = {"good": "ok ", "tip": "tip", "bad": "BAD"}[finding.level]
    screen.write(f"{mark} {finding.subject}: {finding.text}\n")
    if finding.fix:
        screen.write(f"    fix: {finding.fix}\n")
