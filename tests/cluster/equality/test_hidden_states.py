"""States come from a swarm with the bits that one process gives them: hidden ones to embed, final ones to teach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import head_stage
from shardcompute.node.local.service import EngineOptions, open_model
from support.models.requests import greedy, prompts
from support.models.tiny_checkpoint import HIDDEN
from support.swarm.lab import Alone, open_tiny, swarm


def embedded(prompt: Sequence[int]) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), max_tokens=1, sampling=Sampling(wants_hidden=True))


def test_three_workers(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    texts = prompts(alone.service.tokenizer)[:6]
    with swarm(tmp_path / "swarm", tiny, layers=(2, 2, 2), stages=3) as lab:
        # Others answer meanwhile: their rows share frames, and get no hidden states.
        talks = [
            (request, lab.start(request)) for text in texts for request in (embedded(text), greedy(text))
        ]
        for request, talk in talks:
            (first, *_) = talk.result().tokens
            assert talk.result() == alone.answer(request)
            assert len(first.hidden) == (4 * HIDDEN if request.sampling.wants_hidden else 0)
        assert len({talk.result().tokens[0].hidden for _, talk in talks}) == len(texts) + 1
        lab.wait_quiet()


def shown(prompt: Sequence[int]) -> GenerationRequest:
    wanted = Sampling(wants_states=True)
    return GenerationRequest(tuple(prompt), max_tokens=1, prompt_logprobs=0, sampling=wanted)


def test_final_states_of_a_text(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    texts = prompts(alone.service.tokenizer)[:4]
    with open_tiny(tiny) as checkpoint:
        gains = checkpoint.source(head_stage(checkpoint.spec)).vector("norm")
    with swarm(tmp_path / "swarm", tiny, layers=(2, 2, 2), stages=3) as lab:
        # What is kept of one session must not stand in for rows that another wants to see.
        talks = [(text, lab.start(shown(text)), lab.start(greedy(text))) for text in [*texts, *texts]]
        for text, talk, plain in talks:
            answer = talk.result()
            assert answer == alone.answer(shown(text))
            assert plain.result() == alone.answer(greedy(text))
            rows = [choice.hidden for choice in (*answer.prompt[1:], *answer.tokens)]
            assert [len(row) for row in rows] == [2 * HIDDEN] * len(text)
            assert all(choice.logprob is None for choice in answer.prompt)
            last = np.frombuffer(rows[-1], "<f2").astype(np.float32)
            assert np.mean(last * last) == pytest.approx(1, rel=0.01)
            (hidden,) = (each.hidden for each in alone.answer(embedded(text)).tokens)
            assert np.allclose(last * gains, np.frombuffer(hidden, "<f4"), atol=0.01)
        lab.wait_quiet()


def test_three_stages_in_one_process(tiny: Path, alone: Alone) -> None:
    options = EngineOptions(threads=1, context_length=512, kv_bytes=64 << 20, stages=3)
    with open_model(str(tiny), load_settings(), options) as service:
        cut = Alone(service)
        for text in prompts(alone.service.tokenizer)[:4]:
            assert cut.answer(embedded(text)) == alone.answer(embedded(text))
