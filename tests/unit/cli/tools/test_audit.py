"""`shardcompute audit` shows the log and says whether it is whole, also of a cluster that does not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardcompute.node.telemetry.audit import AUDIT_FILE, AuditLog

from ..cluster_lab import HERE, Lab

Cli = Callable[..., Any]


def test_the_log_of_a_running_cluster(cli: Cli, lab: Lab) -> None:
    assert "nothing was changed yet" in cli("audit", *HERE).stderr
    cli("key", "create", "bob", *HERE)
    for number in range(3):
        lab.admin.audit.append("n-1", "node.join", f"n-{number}")
    result = cli("audit", *HERE)
    assert result.exit_code == 0
    assert "4 lines checked: the log is whole" in result.stderr
    lines = result.stdout.splitlines()
    assert "local  key.create  sk-sc-" in lines[0]
    assert "label=bob" in lines[0]
    last = cli("audit", "--limit", "2", "--json", *HERE).stdout.splitlines()
    assert [json.loads(line)["target"] for line in last] == ["n-1", "n-2"]


def test_a_log_that_somebody_changed(cli: Cli, home: Path) -> None:
    folder = home / "cluster"
    folder.mkdir(mode=0o700, parents=True)
    log = AuditLog(folder)
    for target in ("a", "b", "c"):
        log.append("local", "key.create", target)
    assert cli("audit").exit_code == 0
    path = folder / AUDIT_FILE
    path.write_bytes(path.read_bytes().replace(b'"target":"b"', b'"target":"x"'))
    result = cli("audit")
    assert result.exit_code == 6
    assert "entry 2 was changed" in result.stderr
    assert "key.create" in result.stdout
