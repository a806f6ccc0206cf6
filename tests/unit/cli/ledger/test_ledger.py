"""`ledger show`, `export` and `verify`: 1 and the place for what does not fit; neither engine nor network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcompute.node.cluster.ledger.meters import MeterReadings
from shardcompute.node.cluster.ledger.opening import open_ledger
from shardcompute.trust.ledger import SeenLedger
from support.ledgers import BATCHES, COORDINATOR, LedgerLab, member

from ..cluster_lab import HERE, Lab

Cli = Callable[..., Any]


@pytest.fixture
def paper(tmp_path: Path) -> LedgerLab:
    lab = LedgerLab(tmp_path / "paper")
    lab.write()
    return lab


def trust(paper: LedgerLab) -> tuple[str, str]:
    return "--fingerprint", paper.authority.fingerprint


def test_a_ledger_that_fits(cli: Cli, paper: LedgerLab) -> None:
    authority = paper.path.parent / "authority" / "authority.pem"
    for trusted in (trust(paper), ("--authority", str(authority)), ("--data-dir", str(paper.path.parent))):
        done = cli("ledger", "verify", str(paper.path), *trusted)
        assert done.exit_code == 0, done.output
        assert "verified: 10 entries of node-coordinator in cluster home" in done.stderr
    told = json.loads(cli("ledger", "verify", str(paper.path), *trust(paper), "--json").stdout)
    assert (told["is_valid"], told["size"]) == (True, 10)
    tokens = {each["node"]: (each["tokens"], each["uncredited_tokens"]) for each in told["machines"]}
    assert tokens["a"] == (40, 0)
    assert tokens["b"] == (0, 40)


def test_the_first_thing_that_does_not_fit_is_named(cli: Cli, paper: LedgerLab, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.jsonl"
    spoilt.write_bytes(paper.path.read_bytes().replace(b'"tokens":40', b'"tokens":44', 1))
    refused = cli("ledger", "verify", str(spoilt), *trust(paper))
    assert refused.exit_code == 1
    assert "head over 6.root: entries 4 to 5 are not those that it was signed for" in refused.output
    told = cli("ledger", "verify", str(spoilt), *trust(paper), "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["place"] == "head over 6.root"


def test_a_ledger_of_another_authority_is_refused(cli: Cli, paper: LedgerLab, tmp_path: Path) -> None:
    other = LedgerLab(tmp_path / "other")
    refused = cli("ledger", "verify", str(paper.path), *trust(other))
    assert refused.exit_code == 1
    assert "header.authority: another cluster's authority" in refused.output


def test_a_copy_that_ends_before_what_a_member_saw_is_refused(
    cli: Cli, paper: LedgerLab, tmp_path: Path
) -> None:
    whole = paper.replay()
    seen = tmp_path / "ledger-seen.json"
    seen.write_bytes(msgspec.json.encode(SeenLedger(heads={COORDINATOR: whole.head})))
    assert cli("ledger", "verify", str(paper.path), "--seen", str(seen), *trust(paper)).exit_code == 0
    paper.path.unlink()
    paper.write(BATCHES[:2])
    assert cli("ledger", "verify", str(paper.path), *trust(paper)).exit_code == 0
    refused = cli("ledger", "verify", str(paper.path), "--seen", str(seen), *trust(paper))
    assert refused.exit_code == 1
    assert "rollback: it has 4 entries, and there were 10 before" in refused.output
    paper.write([(member("x"),), *BATCHES[2:]])
    refused = cli("ledger", "verify", str(paper.path), "--seen", str(seen), *trust(paper))
    assert refused.exit_code == 1
    assert "fork: its first 10 entries are others" in refused.output


def test_verifying_imports_neither_engine_nor_network(paper: LedgerLab) -> None:
    code = (
        "import sys\n"
        "from shardcompute.cli.main import build_for\n"
        f"arguments = ['ledger', 'verify', {str(paper.path)!r}, '--fingerprint', {paper.authority.fingerprint!r}]\n"
        "build_for(arguments)(arguments, standalone_mode=False)\n"
        "heavy = {'numpy', 'onnxruntime', 'torch', 'httpx', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_show_and_export_of_a_running_cluster(cli: Cli, lab: Lab, tmp_path: Path, paper: LedgerLab) -> None:
    assert "no machine is on record yet" in cli("ledger", "show", *HERE).stderr
    keeper = open_ledger(paper.path.parent, paper.authority, COORDINATOR, lambda: (), MeterReadings, b"")
    lab.cluster.ledger = keeper
    try:
        shown = cli("ledger", "show", "--cost", "a-näme=0.5", *HERE)
        assert shown.exit_code == 0, shown.output
        assert "a-näme" in shown.stdout
        assert "COST/M" in shown.stdout
        told = json.loads(cli("ledger", "show", "--cost", "a=0.5", "--json", *HERE).stdout)
        [machine] = [each for each in told["machines"] if each["node"] == "a"]
        hours, tokens = machine["uptime_s"] / 3600, machine["tokens"]
        assert told["cost_per_million_tokens"] == {"a": pytest.approx(0.5 * hours / tokens * 1e6)}
        assert cli("ledger", "show", "--cost", "nobody=1", *HERE).exit_code == 2
        out = tmp_path / "copy.jsonl"
        assert cli("ledger", "export", str(out), *HERE).exit_code == 0
        assert cli("ledger", "verify", str(out), *trust(paper)).exit_code == 0
    finally:
        keeper.close()
