"""Adapters in a swarm: every stage has those of its own layers; answers are one process's, also when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.errors import UnknownModelError, UsageError
from shardcompute.core.generation import GenerationRequest
from support.models.requests import greedy, prompts, sampled
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import Alone, LabSwarm, Talk, open_alone, swarm
from support.tiny_adapter import save_adapter

CHOICES = ("", "calm", "wild")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("plain") / "tiny")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "wild": save_adapter(base, folder / "wild", seed=1, size=1.0),
        "calm": save_adapter(base, folder / "calm", seed=2, rank=3, layers=(0, 3, 5)),
    }


@pytest.fixture(scope="module")
def alone(base: Path, adapters: dict[str, Path]) -> Iterator[Alone]:
    with open_alone(base, adapters=adapters) as service:
        yield Alone(service)


def start(lab: LabSwarm, request: GenerationRequest) -> Talk:
    """A request as clients make it: the adapter is part of the model's name."""
    name = f"{lab.model}:{request.adapter}" if request.adapter else lab.model
    return lab.start(replace(request, adapter=""), name)


def questions(alone: Alone, tokens: int) -> list[GenerationRequest]:
    texts = prompts(alone.service.tokenizer)
    kinds = [kind(texts[0], tokens) for kind in (greedy, sampled)]
    return [replace(request, adapter=adapter) for adapter in CHOICES for request in kinds]


def test_adapters_change_answers(alone: Alone) -> None:
    greedy_ones = questions(alone, 12)[::2]
    assert len({alone.answer(request).text for request in greedy_ones}) == len(CHOICES)


def test_three_stages_answer_as_one_process_does(
    base: Path, adapters: dict[str, Path], alone: Alone, tmp_path: Path
) -> None:
    requests = questions(alone, 12)
    with swarm(tmp_path, base, layers=(2, 2, 2), stages=3, adapters=adapters) as lab:
        assert [each.name for each in lab.cluster.pool.models()] == ["tiny", "tiny:calm", "tiny:wild"]
        # Again, when what was computed before is kept: a prefix of another adapter must not be taken for it.
        for _ in range(2):
            talks = [start(lab, request) for request in requests]
            assert [talk.result() for talk in talks] == [alone.answer(request) for request in requests]
        with pytest.raises(UnknownModelError, match="not served here"):
            lab.ask(requests[0], "tiny:other")


def test_a_lost_stage_goes_on_with_each_session_s_adapter(
    base: Path, adapters: dict[str, Path], alone: Alone, tmp_path: Path
) -> None:
    requests = questions(alone, 60)
    for lost in (0, 1, 2):
        folder = tmp_path / str(lost)
        with swarm(folder, base, layers=(2,) * 6, stages=3, standbys=3, adapters=adapters) as lab:
            talks = [start(lab, request) for request in requests]
            lab.wait_until(lambda: all(len(each.tokens) >= 5 for each in talks), "tokens of all streams")  # noqa: B023
            lab.kill(lab.stage(lost))
            for talk, request in zip(talks, requests, strict=True):
                assert talk.result() == alone.answer(request)


def test_a_prefix_of_another_adapter_is_not_reused(
    base: Path, adapters: dict[str, Path], alone: Alone
) -> None:
    text = prompts(alone.service.tokenizer)[0] * 4
    with open_alone(base, adapters=adapters) as service:
        cached = []
        for adapter in ("wild", "calm", "wild"):
            *_, last = service.stream(replace(greedy(text, 4), adapter=adapter))
            assert last.timings is not None
            cached.append(last.timings.cached_tokens)
    assert cached[0] == cached[1] == 0 < cached[2]


def test_an_adapter_that_is_not_there_is_refused(alone: Alone) -> None:
    request = replace(greedy(prompts(alone.service.tokenizer)[0], 4), adapter="other")
    with pytest.raises(UsageError, match="no adapter 'other'"):
        list(alone.service.stream(request))
