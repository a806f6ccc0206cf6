"""`receipt verify`: 0 for what fits, 1 and the field for what does not; neither engine nor network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shardcompute.security.receipts import Receipt, write_receipt
from support.paper_chain import PaperChain, interrupted_receipt

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PaperChain, Receipt]:
    return interrupted_receipt(tmp_path_factory.mktemp("paper"))


@pytest.fixture
def file(tmp_path: Path, signed: tuple[PaperChain, Receipt]) -> Path:
    path = tmp_path / "receipt.json"
    path.write_bytes(write_receipt(signed[1]))
    return path


def test_by_fingerprint_file_and_folder(cli: Cli, file: Path, signed: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = signed
    authority = chain.folder / "authority" / "authority.pem"
    for trust in (
        ("--fingerprint", chain.authority.fingerprint),
        ("--authority", str(authority)),
        ("--data-dir", str(chain.folder)),
    ):
        done = cli("receipt", "verify", str(file), *trust)
        assert done.exit_code == 0, done.output
        assert "verified: 139 rows, 100 picked tokens" in done.stdout
        lost = chain.lost[0].identity.node_id
        assert f"not signed  rows 64–89 by {lost}" in done.stdout
        assert all(node in done.stdout for node in (*chain.nodes, lost, receipt.driver))


def test_the_first_field_that_does_not_fit(
    cli: Cli, file: Path, signed: tuple[PaperChain, Receipt], tmp_path: Path
) -> None:
    chain, receipt = signed
    trust = ("--fingerprint", chain.authority.fingerprint)
    spoilt = tmp_path / "spoilt.json"
    spoilt.write_bytes(write_receipt(replace(receipt, cluster="other")))
    refused = cli("receipt", "verify", str(spoilt), *trust)
    assert refused.exit_code == 1
    assert "cluster: the certificates are of paper" in refused.output
    told = cli("receipt", "verify", str(spoilt), *trust, "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["field"] == "cluster"
    strict = cli("receipt", "verify", str(file), *trust, "--strict")
    assert strict.exit_code == 1
    assert "runs[0].nodes" in strict.output
    another = cli("receipt", "verify", str(file), "--fingerprint", "0" * 64)
    assert another.exit_code == 1
    assert "authority" in another.output


def test_as_json(cli: Cli, file: Path, signed: tuple[PaperChain, Receipt]) -> None:
    chain, receipt = signed
    done = cli("receipt", "verify", str(file), "--fingerprint", chain.authority.fingerprint, "--json")
    told = json.loads(done.stdout)
    assert (told["is_valid"], told["id"], told["picked"]) == (True, receipt.id, 100)
    assert [each["node"] for each in told["unsigned"]] == [chain.lost[0].identity.node_id]


def test_without_anybody_to_trust(cli: Cli, file: Path, tmp_path: Path) -> None:
    nobody = cli("receipt", "verify", str(file), "--data-dir", str(tmp_path / "none"))
    assert nobody.exit_code == 2
    assert "--fingerprint" in nobody.output
    missing = cli("receipt", "verify", str(tmp_path / "none.json"))
    assert missing.exit_code == 6
    file.write_text("{}")
    assert cli("receipt", "verify", str(file), "--fingerprint", "0" * 64).exit_code == 6


def test_run_needs_a_cluster_and_a_question(cli: Cli, tmp_path: Path) -> None:
    alone = cli("run", "--local", "smollm2", "hi", "--receipt", str(tmp_path / "r.json"))
    assert alone.exit_code == 2
    assert "needs a cluster" in alone.output


def test_no_engine_is_imported(file: Path, signed: tuple[PaperChain, Receipt]) -> None:
    fingerprint = signed[0].authority.fingerprint
    heavy = ("onnxruntime", "onnx", "numpy", "tokenizers", "torch", "uvicorn", "starlette", "httpx")
    code = (
        "import sys\n"
        "from shardcompute.cli.main import build_for\n"
        f"words = ['receipt', 'verify', {str(file)!r}, '--fingerprint', {fingerprint!r}]\n"
        "try:\n    build_for(words)(words)\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
