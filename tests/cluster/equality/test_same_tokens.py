"""However many machines share a model, clients get what one process would have given them, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.decoding import derive_seed
from support.models.requests import greedy, mixture, prompts, sampled, scored, stopped
from support.swarm.lab import SPREAD, Alone, LabSwarm, open_alone, swarm

ROOMS = {1: (6,), 2: (3, 3), 3: (2, 2, 2), 5: (2, 1, 1, 1, 1)}
"""Room for layers, for each number of workers: only all of them together hold the model."""
AT_ONCE = 8


@pytest.fixture(scope="module", params=ROOMS, ids=lambda count: f"{count} workers")
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Path
) -> Iterator[LabSwarm]:
    count = request.param
    with swarm(tmp_path_factory.mktemp("swarm"), tiny, layers=ROOMS[count], stages=count) as lab:
        assert set(lab.chain().nodes) == {worker.node for worker in lab.workers}
        yield lab
        assert set(lab.chain().nodes) == {worker.node for worker in lab.workers}
        lab.wait_quiet()


def assert_same(lab: LabSwarm, alone: Alone, requests: Sequence[GenerationRequest], at_once: int) -> None:
    for first in range(0, len(requests), at_once):
        batch = requests[first : first + at_once]
        talks = [lab.start(request) for request in batch]
        for request, talk in zip(batch, talks, strict=True):
            assert talk.result() == alone.answer(request)


@pytest.mark.parametrize("kind", [greedy, sampled])
@pytest.mark.parametrize("at_once", [1, AT_ONCE])
def test_every_prompt(
    lab: LabSwarm, alone: Alone, kind: Callable[[Sequence[int]], GenerationRequest], at_once: int
) -> None:
    requests = [kind(prompt) for prompt in prompts(alone.service.tokenizer)]
    assert len(requests) >= 20
    assert_same(lab, alone, requests, at_once)


def test_log_probabilities_of_answer_and_prompt(lab: LabSwarm, alone: Alone) -> None:
    requests = [scored(prompt) for prompt in prompts(alone.service.tokenizer)[:AT_ONCE]]
    assert_same(lab, alone, requests, AT_ONCE)
    answer = lab.ask(requests[0])
    assert len(answer.prompt) == len(requests[0].prompt)
    assert all(len(choice.alternatives) == 3 for choice in answer.tokens)
    assert all(choice.logprob is not None for choice in answer.prompt[1:])


def test_several_answers_to_one_prompt(lab: LabSwarm, alone: Alone) -> None:
    prompt = prompts(alone.service.tokenizer)[0]
    requests = [sampled(prompt, seed=derive_seed(7, choice)) for choice in range(4)]
    assert_same(lab, alone, requests, len(requests))
    assert len({lab.ask(request).text for request in requests}) == len(requests)


def test_stop_strings_and_stop_tokens(lab: LabSwarm, alone: Alone) -> None:
    texts = prompts(alone.service.tokenizer)[:AT_ONCE]
    requests = [stopped(prompt, alone, 40) for prompt in texts]
    assert_same(lab, alone, requests, AT_ONCE)
    assert {lab.ask(request).finish for request in requests} == {"stop"}
    ended = greedy(texts[0], 40)
    third = alone.answer(ended).tokens[2].id
    assert_same(lab, alone, [replace(ended, stop_ids=frozenset({third}))], 1)


def test_other_ways_to_sample(lab: LabSwarm, alone: Alone) -> None:
    prompt = prompts(alone.service.tokenizer)[3]
    samplings = [
        Sampling(temperature=1.3, top_k=5, seed=-1),
        Sampling(temperature=0.7, min_p=0.05, logit_bias={65: 5.0, 66: -100.0}, seed=2**63 - 1),
        Sampling(presence_penalty=2.0, frequency_penalty=-2.0, logprobs=0),
    ]
    assert_same(lab, alone, [GenerationRequest(prompt, 24, sampling) for sampling in samplings], 3)


def test_all_kinds_at_once_with_little_memory(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """Sessions that do not fit wait or make room, and nobody notices."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, kv_tokens=512) as lab:
        requests = mixture(alone, 16, 40)
        assert_same(lab, alone, requests, len(requests))
        lab.wait_quiet()


def test_the_embedded_model(tmp_path: Path, smollm2_gguf: Path) -> None:
    with (
        open_alone(smollm2_gguf) as service,
        swarm(tmp_path, smollm2_gguf, layers=(14, 14, 14), stages=3, kv_tokens=1024, placing=SPREAD) as lab,
    ):
        alone = Alone(service)
        texts = [
            tuple(service.tokenizer.encode(text)) for text in ("The capital of France is", "1, 2, 3, 4,")
        ]
        requests = [kind(prompt, 12) for prompt in texts for kind in (greedy, sampled, scored)]
        assert_same(lab, alone, requests, len(requests))
        assert "Paris" in lab.ask(requests[0]).text
