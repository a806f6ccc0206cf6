"""Prompts that begin alike are computed once, on every stage, and answered as if they had been computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.generation import GenerationRequest, Timings
from support.models.requests import greedy, prompts, sampled
from support.swarm.lab import Alone, LabSwarm, swarm

TOKENS = 16


def beginning(alone: Alone) -> tuple[int, ...]:
    return max(prompts(alone.service.tokenizer), key=len)[:250]


def ask(lab: LabSwarm, alone: Alone, request: GenerationRequest) -> Timings:
    """The answer must be that of one process that shares nothing with anybody."""
    talk = lab.start(request)
    assert talk.result() == alone.answer(replace(request, cache_salt=repr(request.prompt)))
    assert talk.timings is not None
    return talk.timings


def questions(alone: Alone) -> Sequence[GenerationRequest]:
    shared = beginning(alone)
    return [
        greedy((*shared, 70, 71), TOKENS),
        sampled((*shared, 80, 81, 82), TOKENS),
        greedy((*shared, 70, 71), TOKENS),
        sampled((*shared[:100], 65), TOKENS),
    ]


@pytest.mark.parametrize("stages", [1, 3])
def test_a_beginning_is_computed_once(tmp_path: Path, tiny: Path, alone: Alone, stages: int) -> None:
    layers = {1: (6,), 3: (2, 2, 2)}[stages]
    with swarm(tmp_path, tiny, layers=layers, stages=stages) as lab:
        shared = len(beginning(alone))
        cached = [ask(lab, alone, request).cached_tokens for request in questions(alone)]
        assert cached[0] == 0
        assert cached[1] == shared
        assert cached[2] == shared + 1, "all but the last, whose row picks the first token"
        assert cached[3] == 100
        lab.wait_quiet()


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
def test_what_was_shared_survives_a_machine(tmp_path: Path, tiny: Path, alone: Alone, stage: int) -> None:
    """A standby is told the shared rows too: by the log of the stage before it, or by the driver."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        shared = beginning(alone)
        ask(lab, alone, greedy((*shared, 70), TOKENS))
        request = sampled((*shared, 80), 200)
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) > 10, "some tokens")
        lab.kill(lab.stage(stage))
        assert talk.result() == alone.answer(replace(request, cache_salt="alone"))
        assert ask(lab, alone, greedy((*shared, 71), TOKENS)).generated_tokens == TOKENS
        lab.wait_quiet()


def test_a_chat_goes_on(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3), stages=2) as lab:
        history = beginning(alone)[:60]
        for turn in range(4):
            request = greedy((*history, 66 + turn), TOKENS)
            timings = ask(lab, alone, request)
            assert (timings.cached_tokens > 0) == (turn > 0)
            answer = alone.answer(replace(request, cache_salt=repr(request.prompt)))
            history = (*request.prompt, *(choice.id for choice in answer.tokens))
        assert sum(worker.sessions() for worker in lab.workers) == 2, "one session on each stage"
        lab.wait_quiet()
