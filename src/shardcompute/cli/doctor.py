"""`shardcompute doctor`: what could keep this machine from serving, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli import swarm_options
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options import Json
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.cli.checks import Finding

_API_PORT = 8000


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

    Every finding that is not good ends with what to do. Ends with 0 if all is well, else with 1.
    """
    from shardcompute.cli.checks import check_clock

    screen, settings = open_screen(), load_settings()
    folders = [swarm_options.cluster_folder(settings, data_dir)]
    if data_dir is None:
        folders.append(swarm_options.worker_folder(settings, None))
    look_again = check_clock()
    findings = [*_findings(folders), *look_again()]
    if json:
        screen.write_json(
            [{"subject": f.subject, "text": f.text, "fix": f.fix, "is_good": f.is_good} for f in findings]
        )
    else:
        for finding in findings:
            _write(screen, finding)
    bad = sum(not finding.is_good for finding in findings)
    screen.say("all is well" if not bad else f"{bad} of {len(findings)} findings need something to be done")
    if bad:
        raise typer.Exit(1)


def _findings(folders: list[Path]) -> Iterator[Finding]:
    from shardcompute.cli import checks

    yield from checks.check_versions()
    yield from checks.check_memory()
    yield from checks.check_disk(folders[0])
    for folder in folders:
        yield from checks.check_permissions(folder)
        yield from _check_cluster(folder) if folder is folders[0] else ()
        yield from _check_member(folder)


def _check_cluster(folder: Path) -> Iterator[Finding]:
    """A cluster that runs from here answers; the ports of one that does not are free."""
    from shardcompute.api.server import port_holder
    from shardcompute.cli import checks
    from shardcompute.node.local_state import CLUSTER_FILE, read_running

    running = read_running(folder / CLUSTER_FILE)
    if running is None:
        wanted = (
            ("HTTP API", _API_PORT, "--port"),
            ("links between nodes", swarm_options.CLUSTER_PORT, "--cluster-port"),
            ("joining", swarm_options.JOIN_PORT, "--join-port"),
        )
        yield from checks.check_ports_free(wanted, port_holder)
        return
    yield checks.Finding("cluster", f"{running.name} runs here, pid {running.pid}")
    if running.api_url:
        yield from checks.check_reachable([running.api_url])
        yield from _check_date(running.api_url)


def _check_date(url: str) -> Iterator[Finding]:
    import httpx

    from shardcompute.cli import checks

    try:
        answer = httpx.get(f"{url}/health", timeout=3.0, trust_env=False)
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
    """A worker that has joined can reach its coordinator and has papers that are good."""
    from shardcompute.cli import checks
    from shardcompute.core.errors import ShardComputeError
    from shardcompute.node.membership import MEMBER_FILE, open_member

    if not (folder / MEMBER_FILE).exists():
        return
    try:
        member = open_member(folder)
    except ShardComputeError as error:
        yield checks.Finding("worker", error.message, error.hint)
        return
    days = (member.credentials.own.expires_at_s - time.time()) / 86_400
    yield checks.Finding(
        "worker", f"joined {member.credentials.own.cluster}, papers good for {days:.0f} days"
    )
    yield from checks.check_reachable(member.control_urls)


def _write(screen: Screen, finding: Finding) -> None:
    screen.write(f"{'ok ' if finding.is_good else 'BAD'} {finding.subject}: {finding.text}\n")
    if finding.fix:
        screen.write(f"    fix: {finding.fix}\n")
