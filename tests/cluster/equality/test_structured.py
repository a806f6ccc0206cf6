"""Answers of a wanted form from a swarm: what one process gives, also when the worker that holds the grammar dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.generation import GenerationRequest, Grammar
from support.models.schemas import held_to
from support.swarm.lab import Alone, LabSwarm, swarm

SCHEMA = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "minLength": 9, "maxLength": 30},
            "minItems": 4,
        },
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def requests(alone: Alone) -> list[GenerationRequest]:
    tokenizer = alone.service.tokenizer
    prompt = tuple(tokenizer.encode("Who?"))
    made = [held_to(GRAMMAR, prompt, tokenizer.eos_ids, seed) for seed in (0, 4)]
    return [replace(request, max_tokens=160) for request in made]


@pytest.fixture
def lab(tmp_path: Path, tiny: Path) -> Iterator[LabSwarm]:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2, 2), stages=3, standbys=2) as lab:
        yield lab
        lab.wait_quiet()


def test_the_last_worker_dies_in_the_middle_of_it(
    lab: LabSwarm, alone: Alone, requests: list[GenerationRequest]
) -> None:
    expected = [alone.answer(request) for request in requests]
    for answer in expected:
        assert answer.text.lstrip().startswith("{")
    talks = [lab.start(request) for request in requests]
    lab.wait_until(lambda: all(len(talk.tokens) > 5 for talk in talks), "some tokens of both")
    lab.kill(lab.stage(-1))
    assert [talk.result() for talk in talks] == expected
