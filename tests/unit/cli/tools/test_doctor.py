"""`doctor` sees what is wrong and says what to do; what is well it leaves alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcompute.backends.devices import find_devices
from shardcompute.backends.llamacpp.library import PACKAGE, VERSION
from shardcompute.cli.tools import checks
from shardcompute.cli.tools.checks import Finding
from support.fake_devices import H200, SEEN_H200, FakeMachine, cuda_machine, pretend

from ..cluster_lab import Lab, say_running

Cli = Callable[..., Any]
NOW_S = 1_800_000_000.0


def _only(findings: Iterator[Finding]) -> Finding:
    [finding] = findings
    return finding


def test_all_is_well_or_has_a_fix(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("doctor", "--json")
    findings = json.loads(result.stdout)
    assert {"python", "onnxruntime", "memory", "disk", "clock", "port 8000"} <= {
        f["subject"] for f in findings
    }
    assert all((finding["level"] == "good") == (not finding["fix"]) for finding in findings)
    assert all(finding["is_good"] == (finding["level"] != "bad") for finding in findings)
    assert result.exit_code == (0 if all(finding["is_good"] for finding in findings) else 1)
    monkeypatch.setattr(checks, "_LEAST_MEMORY_BYTES", 1 << 60)
    result = cli("doctor")
    assert result.exit_code == 1
    assert "BAD memory" in result.stdout
    assert "    fix: close other programs" in result.stdout


def test_damaged_worker_is_found(cli: Cli, home: Path) -> None:
    folder = home / "worker"
    folder.mkdir(parents=True)
    (folder / "member.json").write_text("{}")
    result = cli("doctor")
    assert result.exit_code == 1
    assert "BAD worker: no cluster has been joined" in result.stdout or "is damaged" in result.stdout


def test_places_beside_the_first_are_looked_at_too(cli: Cli, home: Path) -> None:
    folder = home / "worker" / "places" / "cuda-1"
    folder.mkdir(parents=True)
    (folder / "member.json").write_text("{}")
    assert f"BAD worker: {folder / 'member.json'} is damaged" in cli("doctor").stdout


def test_busy_ports_name_who_holds_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = (("HTTP API", port, "--port"),)
        busy = _only(checks.check_ports_free(wanted, lambda port: "python (pid 7)"))
        unknown = _only(checks.check_ports_free(wanted, lambda port: None))
    assert busy.text == "busy, held by python (pid 7) (HTTP API)"
    assert "--port 0" in busy.fix
    assert not unknown.is_good
    assert _only(checks.check_ports_free(wanted, lambda port: None)).is_good


def test_coordinators_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert _only(checks.check_reachable([url])).is_good
    gone = _only(checks.check_reachable([url]))
    assert "does not answer" in gone.text
    assert "firewall" in gone.fix


def test_every_advertised_address_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as other:
            gone = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        found = list(checks.check_all_reachable([("node a", there), ("node b", gone)]))
    assert [(finding.subject, finding.level) for finding in found] == [("node a", "good"), ("node b", "bad")]
    assert "firewall" in found[1].fix
    assert list(checks.check_all_reachable([])) == []


def test_nodes_of_other_versions() -> None:
    assert _only(checks.check_node_versions("1.0", [("a", "1.0"), ("b", "1.0")])).is_good
    other = _only(checks.check_node_versions("1.0", [("a", "1.0"), ("b", "0.9")]))
    assert (other.subject, other.level) == ("version of b", "bad")
    assert "shardcompute==1.0" in other.fix
    assert list(checks.check_node_versions("1.0", [])) == []


def test_a_running_cluster_is_looked_at_from_outside(
    cli: Cli, home: Path, lab: Lab, recognised: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"127.0.0.1:{server.getsockname()[1]}"
        say_running(home / "cluster", api_url=f"http://{here}")
        lab.cluster.url = f"tcp://{here}"
        lab.cluster.join("far", name="far", address="tcp://127.0.0.1:1", version="0.0.1")
        server.close()
        found = {finding["subject"]: finding for finding in json.loads(cli("doctor", "--json").stdout)}
    assert found["node far"]["level"] == "bad"
    assert "0.0.1" in found["version of far"]["text"]
    assert "does not answer" in found["HTTP API"]["text"]
    assert lab.addresses == [(f"http://{here}", "sk-local-own")]


def test_open_files() -> None:
    assert _only(checks.check_open_files(65_536)).is_good
    assert "ulimit -n" in _only(checks.check_open_files(256)).fix


def test_a_system_without_bbr_gets_a_tip() -> None:
    assert _only(checks.check_congestion(lambda name: name == "bbr")).level == "good"
    tip = _only(checks.check_congestion(lambda name: False))
    assert (tip.level, tip.is_good) == ("tip", True)
    assert "tcp_bbr" in tip.fix


def test_certificates_and_the_clock() -> None:
    def check(now_s: float) -> Finding:
        return _only(checks.check_certificate("worker", "home", NOW_S, NOW_S + 86_400 * 90, now_s))

    assert check(NOW_S + 1).is_good
    assert "clock: it is behind" in check(NOW_S - 7200).fix
    assert "ran out 10 days ago" in check(NOW_S + 86_400 * 100).text
    assert "new token" in check(NOW_S + 86_400 * 100).fix


def test_clocks() -> None:
    assert _only(checks.check_clock(lambda: NOW_S, lambda: 5.0)()).is_good
    assert "1970" in _only(checks.check_clock(lambda: 1000.0, lambda: 5.0)()).text
    walls = iter([NOW_S, NOW_S + 3600])
    jumped = _only(checks.check_clock(lambda: next(walls), lambda: 5.0)())
    assert "jumped by +3600.0 s" in jumped.text
    assert jumped.fix


def test_clock_of_the_coordinator() -> None:
    date = formatdate(NOW_S, usegmt=True)
    assert _only(checks.check_skew(date, NOW_S + 30)).is_good
    assert "set the clocks" in _only(checks.check_skew(date, NOW_S - 90)).fix
    assert list(checks.check_skew("", NOW_S)) == []


def test_disk_and_memory(tmp_path: Path) -> None:
    assert _only(checks.check_disk(tmp_path / "not" / "yet", free_bytes=1 << 40)).is_good
    assert _only(checks.check_disk(tmp_path, free_bytes=1000)).fix
    assert _only(checks.check_memory(1 << 40)).is_good
    assert _only(checks.check_memory(1000)).fix


def test_every_device_and_every_gpu_that_cannot_be_used() -> None:
    [gpu, cpu] = checks.check_devices(find_devices(probes=cuda_machine().probes()))
    assert (gpu.subject, gpu.level) == ("device cuda:0", "good")
    assert gpu.text == "NVIDIA H200, 140.0 GiB, 138.0 GiB free, computed on by torch"
    assert cpu.text == "AMD Ryzen 5, 16.0 GiB, 10.0 GiB free, computed on by onnx"
    useless = FakeMachine(seen=(SEEN_H200,))
    [cpu, gpu] = checks.check_devices(find_devices(probes=useless.probes()))
    assert cpu.is_good
    # It works without that, too.
    assert (gpu.text, gpu.level) == ("NVIDIA H200, 140.0 GiB: torch is not installed", "tip")
    assert gpu.fix == "pip install 'shardcompute[torch]'"
    liar = cuda_machine(msgspec.structs.replace(H200, free_bytes=200 << 30))
    [_, remark, _] = checks.check_devices(find_devices(probes=liar.probes()))
    assert remark.text == "it says that 200.0 GiB are free, more than it has"


def test_doctor_shows_devices(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda_machine())
    shown = cli("doctor").stdout
    assert "device cuda:0: NVIDIA H200, 140.0 GiB, 138.0 GiB free, computed on by torch" in shown


def test_secrets_that_others_can_read(tmp_path: Path) -> None:
    assert list(checks.check_permissions(tmp_path)) == []
    key = tmp_path / "workers" / "worker-1" / "node.key"
    key.parent.mkdir(parents=True)
    key.touch(mode=0o600)
    assert _only(checks.check_permissions(tmp_path)).is_good
    key.chmod(0o640)
    assert _only(checks.check_permissions(tmp_path)).fix == f"chmod 600 {key}"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PACKAGES", ("numpy", "no-such-package"))
    found = {finding.subject: finding for finding in checks.check_versions()}
    assert found["numpy"].is_good
    assert found["no-such-package"].text == "missing"
    assert "install" in found["no-such-package"].fix


def test_llamacpp_of_another_release_is_told_with_the_line_that_fixes_it() -> None:
    [wrong] = checks.check_llamacpp("2026.9.11063")
    assert wrong.fix == f"pip install '{PACKAGE}=={VERSION}'"
    assert wrong.is_good  # an extra: nobody has to have it
    [right] = checks.check_llamacpp(VERSION)
    assert "tried with each model" in right.text
    assert not right.fix
