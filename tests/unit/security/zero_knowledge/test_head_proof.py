"""Proofs of a small head: good ones hold, and neither another output nor another state passes for one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from shardcompute.core.errors import AuthError, BackendError, UsageError
from shardcompute.security.zero_knowledge import head_proof
from shardcompute.security.zero_knowledge.head_proof import (
    AUDITOR,
    commit_state,
    prepare_audit,
    prove_head,
    verify_head,
)

CHANCE = np.random.default_rng(1)
WEIGHT = (0.1 * CHANCE.standard_normal((2, 576))).astype(np.float32)
BIAS = np.array([0.25, -0.5], np.float32)
STATE = CHANCE.standard_normal(576).astype(np.float32)
needs_ezkl = pytest.mark.skipif(
    importlib.util.find_spec("ezkl") is None, reason="ezkl is not installed: pip install 'shardcompute[zk]'"
)


@needs_ezkl
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_head_of_576_to_2_is_proved(tmp_path: Path) -> None:
    audit, proof = tmp_path / "audit", tmp_path / "proof.json"
    prepare_audit(WEIGHT, BIAS, audit)
    commitment = commit_state(audit, STATE)
    # What the auditor keeps, the prover does not have.
    kept = tmp_path / "kept"
    (audit / AUDITOR).rename(kept)
    claimed = prove_head(audit, STATE, proof)
    kept.rename(audit / AUDITOR)
    found = verify_head(audit, proof, commitment)
    assert found == claimed
    np.testing.assert_allclose(found.outputs, STATE @ WEIGHT.T + BIAS, atol=0.05)
    other = commit_state(audit, STATE + np.float32(0.01))
    with pytest.raises(AuthError, match="another state"):
        verify_head(audit, proof, other)
    _check_forged(audit, proof, commitment, other)


def _check_forged(audit: Path, proof: Path, commitment: str, other: str) -> None:
    content = json.loads(proof.read_text())
    for place, value, claimed in (
        (1, "00" * 32, commitment),
        (2, "01" + "00" * 31, commitment),
        (0, other, other),
    ):
        forged = json.loads(proof.read_text())
        forged["instances"][0][place] = value
        path = proof.with_name("forged.json")
        path.write_text(json.dumps(forged))
        with pytest.raises(AuthError, match="does not hold"):
            verify_head(audit, path, claimed)
    text = content["hex_proof"]
    content["hex_proof"] = text[:-2] + ("00" if text[-2:] != "00" else "01")
    content["proof"][-1] ^= 1
    path = proof.with_name("forged.json")
    path.write_text(json.dumps(content))
    with pytest.raises(AuthError, match="does not hold"):
        verify_head(audit, path, commitment)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"instances": [["00"]]}', '{"instances": [[1]]}', "[" * 9999]
)
def test_proofs_that_are_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read before anything is handed to the prover's library."""
    (tmp_path / AUDITOR).mkdir()
    (tmp_path / AUDITOR / "settings.json").write_text('{"model_output_scales": [20]}')
    monkeypatch.setattr(head_proof, "_ezkl", lambda: None)
    path = tmp_path / "proof.json"
    path.write_text(content)
    with pytest.raises(AuthError):
        verify_head(tmp_path, path, "00" * 32)


def test_heads_that_are_too_large_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_proof, "_ezkl", lambda: None)
    for weight, bias in (
        (np.zeros((17, 4), np.float32), np.zeros(17, np.float32)),
        (np.zeros((2, 5000), np.float32), np.zeros(2, np.float32)),
        (np.zeros((2, 4), np.float32), np.zeros(3, np.float32)),
        (np.full((2, 4), np.nan, np.float32), np.zeros(2, np.float32)),
    ):
        with pytest.raises(UsageError):
            prepare_audit(weight, bias, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ezkl") is not None, reason="ezkl is installed")
def test_without_ezkl_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="need ezkl"):
        prepare_audit(WEIGHT, BIAS, tmp_path)
