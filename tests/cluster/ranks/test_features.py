"""What a last stage does besides picking tokens works where several machines compute it, too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.control.placement.parallelism import AUTO
from shardcompute.core.generation import Grammar, Speculation
from shardcompute.models.tokenizer import Tokenizer
from support.models.drafters import Oracle
from support.models.requests import greedy, prompts, sampled, scored
from support.models.schemas import held_to
from support.swarm.grids import reshape
from support.swarm.lab import Alone, LabSwarm, swarm

TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 9, "maxLength": 30}},
    "required": ["name"],
    "additionalProperties": False,
}


class Drafts:
    """Answers mixed with mistakes."""

    def __init__(self, alone: Alone) -> None:
        self.alone = alone
        self.right: dict[tuple[int, ...], list[int]] = {}

    def open_drafters(self, tokenizer: Tokenizer, vocab_size: int) -> Sequence[Oracle]:
        return [Oracle(self.answer, lambda at: at % 7 in (3, 5), vocabulary=vocab_size)]

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        return self.right.get(prompt, [])


@pytest.fixture(scope="module")
def drafts(alone: Alone) -> Drafts:
    return Drafts(alone)


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path, drafts: Drafts, heads: Path, bold: None
) -> Iterator[LabSwarm]:
    with swarm(
        tmp_path_factory.mktemp("swarm"),
        tiny,
        layers=(12, 12, 12),
        parallel=AUTO,
        open_drafters=drafts.open_drafters,
        draft_heads=heads,
    ) as lab:
        stages = reshape(lab, [[1], [2, 1]])
        yield lab
        assert lab.chain().stages == stages
        lab.wait_quiet()


@pytest.mark.parametrize("drafter", ["ngram", "model", "head"])
def test_drafts_change_no_token(lab: LabSwarm, alone: Alone, drafts: Drafts, drafter: str) -> None:
    texts = prompts(alone.service.tokenizer)[:6]
    requests = [*(greedy(text, TOKENS) for text in texts[:3]), *(sampled(text, TOKENS) for text in texts[3:])]
    for request in requests:
        drafts.right[request.prompt] = [choice.id for choice in alone.answer(request).tokens]
    wish = Speculation(drafter, 4, 2)  # type: ignore[arg-type]
    talks = [lab.start(replace(request, speculation=wish)) for request in requests]
    for request, talk in zip(requests, talks, strict=True):
        assert talk.result() == alone.answer(request)
    drafted = sum(talk.timings.drafted_tokens for talk in talks if talk.timings is not None)
    assert drafted > 0


def test_a_beginning_is_computed_once(lab: LabSwarm, alone: Alone) -> None:
    shared = max(prompts(alone.service.tokenizer), key=len)[:250]
    cached = []
    for request in (greedy((*shared, 70, 71), TOKENS), sampled((*shared, 80, 81, 82), TOKENS)):
        talk = lab.start(request)
        assert talk.result() == alone.answer(replace(request, cache_salt=repr(request.prompt)))
        assert talk.timings is not None
        cached.append(talk.timings.cached_tokens)
    assert cached == [0, len(shared)]


def test_an_answer_of_a_wanted_form(lab: LabSwarm, alone: Alone) -> None:
    tokenizer = alone.service.tokenizer
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    request = held_to(grammar, tuple(tokenizer.encode("Who?")), tokenizer.eos_ids, 4)
    answer = lab.ask(replace(request, max_tokens=80))
    assert answer == alone.answer(replace(request, max_tokens=80))
    assert answer.text.lstrip().startswith("{")


def test_log_probabilities(lab: LabSwarm, alone: Alone) -> None:
    for prompt in prompts(alone.service.tokenizer)[:2]:
        assert lab.ask(scored(prompt)) == alone.answer(scored(prompt))
