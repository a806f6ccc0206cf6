"""Stages that llama.cpp runs: however many share a model, and whoever of them is lost, the tokens are one process's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.core.generation import GenerationRequest, Sampling, Speculation
from shardcompute.core.settings import load_settings
from shardcompute.node.weights import draft_heads
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.draft_heads import random_draft_head
from support.models.requests import greedy, mixture, prompts, sampled
from support.models.tiny import save_tiny_talker
from support.models.tiny_gguf import save_tiny_text_gguf
from support.swarm.lab import SPREAD, Alone, open_alone, swarm

pytestmark = pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def answers(model: Path) -> Iterator[Alone]:
    with open_alone(model, "llamacpp") as service:
        yield Alone(service)


def test_two_stages_answer_as_one_process_does(tmp_path: Path, model: Path, answers: Alone) -> None:
    texts = prompts(answers.service.tokenizer)
    requests = [kind(text) for kind in (greedy, sampled) for text in texts[:6]]
    with swarm(tmp_path, model, layers=(3, 3), stages=2, backend="llamacpp") as lab:
        talks = [lab.start(request) for request in requests]
        assert [talk.result() for talk in talks] == [answers.answer(request) for request in requests]
        lab.wait_quiet()


def test_its_last_stage_gives_hidden_states_to_embeddings_and_says_that_it_cannot_draft(
    tmp_path: Path, model: Path, answers: Alone
) -> None:
    texts = prompts(answers.service.tokenizer)[:6]
    with open_checkpoint(resolve(parse_reference(str(model)), load_settings())) as checkpoint:
        draft_heads.save_draft_head(tmp_path / "heads", checkpoint, random_draft_head(checkpoint.spec))
    embedded = [GenerationRequest(tuple(text), 1, sampling=Sampling(wants_hidden=True)) for text in texts]
    drafted = [replace(greedy(text), speculation=Speculation("head", 3, 1)) for text in texts]
    with swarm(
        tmp_path,
        model,
        layers=(12, 12),
        stages=2,
        placing=SPREAD,
        backend="llamacpp",
        draft_heads=tmp_path / "heads",
    ) as lab:
        talks = [lab.start(request) for request in (*embedded, *drafted)]
        plain = [replace(request, speculation=Speculation("off")) for request in (*embedded, *drafted)]
        assert [talk.result() for talk in talks] == [answers.answer(request) for request in plain]
        assert all(talk.result().tokens[0].hidden for talk in talks[: len(texts)])

        def is_told() -> bool:
            heads = [each for node in lab.state.nodes.values() for each in node.draft_heads]
            return any("llamacpp gives no states" in each.problem for each in heads)

        lab.wait_until(is_told, "the reason why nothing is drafted")
        lab.wait_quiet()


@pytest.mark.parametrize("stage", [0, 1], ids=["first", "last"])
def test_a_lost_stage_goes_on_at_its_standby(tmp_path: Path, model: Path, answers: Alone, stage: int) -> None:
    with swarm(tmp_path, model, layers=(3, 3, 3, 3), stages=2, standbys=2, backend="llamacpp") as lab:
        talks = [lab.start(request) for request in mixture(answers, 4, 100)]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(stage))
        assert not any(talk.is_over for talk in talks)
        for talk in talks:
            assert talk.result() == answers.answer(talk.request)
        lab.wait_quiet()


def test_stages_of_a_sparse_model_answer_as_one_process_does(tmp_path: Path, tiny: Path) -> None:
    """Rows alone and in company, in two stages and after one is lost, with the routers in float32."""
    checkpoint = save_tiny_talker("mixtral", tmp_path / "mixtral", tiny)
    sparse = save_tiny_text_gguf(tmp_path, "mixtral", checkpoint)
    with (
        open_alone(sparse, "llamacpp") as service,
        swarm(tmp_path, sparse, layers=(3, 3, 3), stages=2, standbys=1, backend="llamacpp") as lab,
    ):
        alone = Alone(service)
        requests = [kind(text) for kind in (greedy, sampled) for text in prompts(service.tokenizer)[:3]]
        assert lab.ask(requests[0]) == alone.answer(requests[0])
        talks = [lab.start(request) for request in requests]
        lab.wait_until(lambda: all(len(talk.tokens) >= 3 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(0))
        assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]
