"""`draft-head train`: what was trained is taken into use only where it is better than what is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shardcompute.draft_training import train
from shardcompute.draft_training.evaluation import DRAFTED, Evaluation, Examination
from shardcompute.draft_training.train import TrainedDraftHead
from support.models.draft_heads import random_draft_head
from support.models.tiny_checkpoint import save_tiny_llama

Cli = Callable[..., Any]


def examined(share: float) -> Examination:
    found = Evaluation((share,) * DRAFTED, 1.0, 100)
    return Examination(found, found, {})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli) -> Callable[..., Any]:
    """Trains nothing: what comes of it is so good, and what is in use was examined if it was given."""
    folder = save_tiny_llama(tmp_path / "tiny", layers=1)

    def run(share: float, *options: str) -> Any:
        def pretend(checkpoint: Any, plan: Any, *, in_use: Any, resumed: Path, **_: Any) -> TrainedDraftHead:
            before = None if in_use is None else examined(0.5)
            assert not resumed.exists() or "--fresh" not in options
            resumed.parent.mkdir(parents=True, exist_ok=True)
            resumed.write_bytes(b"what was learned so far")
            return TrainedDraftHead(random_draft_head(checkpoint.spec), examined(share), before, 1000, 1.0)

        monkeypatch.setattr(train, "train_draft_head", pretend)
        return cli("draft-head", "train", str(folder), *options)

    return run


def test_only_a_better_one_is_taken_into_use(run: Callable[..., Any], home: Path) -> None:
    first = run(0.4)
    assert first.exit_code == 0
    [kept] = home.rglob("head.draft")
    content = kept.read_bytes()
    assert not list(home.rglob("training.pt")), "a finished run leaves nothing to go on from"
    kept_at = kept.stat().st_mtime_ns
    worse = run(0.4, "--fresh")
    assert worse.exit_code == 0
    assert "not taken into use: 1.66 tokens per round" in " ".join(worse.stderr.split())
    assert kept.stat().st_mtime_ns == kept_at
    assert "not taken" not in run(0.6).stderr
    assert kept.read_bytes() == content
    assert kept.stat().st_mtime_ns > kept_at
