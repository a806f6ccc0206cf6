"""A draft head is taught through a swarm none of whose machines holds the model, and drafts there at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from shardcompute.cli.models import draft_head
from shardcompute.cluster_client import ClusterClient
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.models.draft_head import decode_draft_head
from shardcompute.node.weights.draft_heads import draft_head_attachments
from support.models.requests import greedy, prompts, sampled
from support.models.tiny_checkpoint import HIDDEN, LAYERS
from support.swarm.lab import Alone, LabSwarm, Talk, open_tiny

SMALL = ("--layers", "1", "--width", "64", "--device", "cpu", "--threads", "1")
TOKENS = 24
Teach = Callable[..., str]


@pytest.fixture
def teach(client: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Teach:
    """The command, with a data folder of its own."""
    monkeypatch.setenv("SHARDCOMPUTE_DATA_DIR", str(tmp_path / "home"))
    # Its tokens are bytes: in long dialogues it would hardly get to say anything itself.
    monkeypatch.setattr("shardcompute.draft_training.swarm.teach._LONGEST", 96)

    class Kept:
        def __enter__(self) -> ClusterClient:
            return client

        def __exit__(self, *_: object) -> None:
            """It is closed by those who opened it."""

    monkeypatch.setattr(draft_head.ClusterLocation, "connect", lambda self: Kept())

    def run(*options: str) -> str:
        result = CliRunner().invoke(draft_head.app, ["teach", *options, *SMALL], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    return run


def ask(lab: LabSwarm, requests: Sequence[GenerationRequest], drafter: Any) -> list[Talk]:
    wish = Speculation(drafter, 5, 1)
    return [lab.start(replace(request, speculation=wish)) for request in requests]


def test_from_nothing_to_more_than_a_token_a_round(
    lab: LabSwarm, teach: Teach, truth: Alone, made_up: Path, tmp_path: Path, bold: None
) -> None:
    assert all(len(worker.loads) == 1 for worker in lab.workers)
    assert {stop - start for worker in lab.workers for _, start, stop, _ in worker.loads} == {LAYERS // 3}
    texts = prompts(truth.service.tokenizer)[:6]
    requests = [kind(text, TOKENS) for text in texts for kind in (greedy, sampled)]
    with pytest.raises(UsageError, match="no drafter 'head'"):
        ask(lab, requests[:1], "head")[0].result()
    for request, talk in zip(requests, ask(lab, requests, "off"), strict=True):
        assert talk.result() == truth.answer(request)

    said = teach("--tokens", "2048", "--epochs", "24")
    assert "in use by 1 of its chains" in said
    assert not [*(tmp_path / "home").rglob("*.states")], "what was learned from is not kept"

    drafted = ask(lab, requests, "head")
    for request, talk in zip(requests, drafted, strict=True):
        assert talk.result() == truth.answer(request)
    greedily = [talk.timings for talk in drafted[::2] if talk.timings is not None]
    assert len(greedily) == len(texts)
    accepted = sum(timings.accepted_tokens for timings in greedily)
    rounds = sum(timings.traversals + 1 for timings in greedily)
    assert accepted > 0
    assert sum(timings.generated_tokens for timings in greedily) > 1.25 * rounds, said
    assert all(len(worker.loads) == 1 for worker in lab.workers), "nothing was loaded again"
    with open_tiny(made_up) as checkpoint:
        kept, problem = draft_head_attachments(checkpoint, lab.options.draft_heads)
    assert not problem
    assert len(decode_draft_head(next(iter(kept.values())), HIDDEN).layers) == 1

    # Another that was hardly taught anything is not taken, and what was said for it is there for the next.
    assert "not taken into use" in teach("--tokens", "1024", "--epochs", "0.1")
    with open_tiny(made_up) as checkpoint:
        assert draft_head_attachments(checkpoint, lab.options.draft_heads)[0] == kept
    assert "tokens that an earlier run has recorded" in teach("--tokens", "1024", "--epochs", "0.1")
