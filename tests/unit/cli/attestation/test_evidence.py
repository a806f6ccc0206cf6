"""`evidence data`, `pack` and `check`, with a made-up chip; and `up --require-attested` beside workers of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcompute.cli.attestation.files import attestation_policy
from shardcompute.core.errors import UsageError
from support.attestation import chip, good_snp, good_tdx, write_policy

Cli = Callable[..., Any]


def test_from_the_key_to_good_evidence(cli: Cli, tmp_path: Path) -> None:
    folder, policy = str(tmp_path / "worker"), str(write_policy(tmp_path))
    data = cli("evidence", "data", "--data-dir", folder).stdout.strip()
    assert cli("evidence", "data", "--data-dir", folder).stdout.strip() == data
    (tmp_path / "report.bin").write_bytes(good_snp(bytes.fromhex(data)).report)
    (tmp_path / "vcek.pem").write_text(chip().vcek.pem)
    (tmp_path / "ask.pem").write_text(chip().ask.pem)
    out = str(tmp_path / "evidence.json")
    packed = cli(
        *("evidence", "pack", str(tmp_path / "report.bin"), "--kind", "sev-snp", "--out", out),
        *("--certificates", str(tmp_path / "vcek.pem"), "--certificates", str(tmp_path / "ask.pem")),
    )
    assert packed.exit_code == 0
    good = cli("evidence", "check", out, "--policy", policy, "--data-dir", folder)
    assert good.exit_code == 0
    assert "good: sev-snp" in good.stderr
    other = cli("evidence", "check", out, "--policy", policy, "--data-dir", str(tmp_path / "other"))
    assert other.exit_code == 10
    assert "not about this node's key" in other.stderr
    assert cli("evidence", "check", out, "--policy", policy, "--any-key").exit_code == 0


def test_a_quote_needs_no_certificates(cli: Cli, tmp_path: Path) -> None:
    policy, out = str(write_policy(tmp_path)), str(tmp_path / "evidence.json")
    (tmp_path / "quote.bin").write_bytes(good_tdx().report)
    assert cli("evidence", "pack", str(tmp_path / "quote.bin"), "--kind", "tdx", "--out", out).exit_code == 0
    assert "good: tdx" in cli("evidence", "check", out, "--policy", policy, "--any-key").stderr


def test_files_that_are_none(cli: Cli, tmp_path: Path) -> None:
    policy = str(write_policy(tmp_path))
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert cli("evidence", "check", str(bad), "--policy", policy, "--any-key").exit_code == 10
    assert cli("evidence", "check", str(tmp_path / "none"), "--policy", policy, "--any-key").exit_code == 6
    assert cli("join", "sc1.x", "--evidence", str(bad)).exit_code != 0


def test_own_workers_show_nothing(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    with pytest.raises(UsageError, match="takes no workers"):
        attestation_policy(policy, has_own_workers=True)
    judged = attestation_policy(policy, has_own_workers=False)
    assert judged is not None
    assert sorted(judged.verifiers) == ["sev-snp", "tdx"]
    assert attestation_policy(None, has_own_workers=True) is None
