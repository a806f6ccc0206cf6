"""Random weights, random schemas: whatever the model wants to say, it says it in valid JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcompute.core.generation import Grammar, Speculation
from shardcompute.node.local.service import LocalService
from support.models.schemas import Schema, held_to, schemas
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import answer_of, open_alone


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with open_alone(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=3)) as service:
        yield service


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas, prompt=st.text(min_size=1, max_size=12), seed=st.integers(0, 5))
def test_answers_follow_their_schema(service: LocalService, schema: Schema, prompt: str, seed: int) -> None:
    tokenizer = service.tokenizer
    grammar = Grammar("json_schema", json.dumps(schema))
    request = held_to(grammar, tuple(tokenizer.encode(prompt)), tokenizer.eos_ids, seed)
    answer = answer_of(list(service.stream(request)))
    assert answer.finish == "stop", answer.text
    jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_under_a_grammar_change_nothing_and_save_rounds(service: LocalService, seed: int) -> None:
    item: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"enum": ["alpha", "beta"]}},
        "required": ["name"],
    }
    item["additionalProperties"] = False
    schema = {"type": "array", "items": item, "minItems": 6, "maxItems": 8}
    tokenizer = service.tokenizer
    prompt = tuple(tokenizer.encode('[{"name":"alpha"}]'))
    request = held_to(Grammar("json_schema", json.dumps(schema)), prompt, tokenizer.eos_ids, seed)
    plain, drafted = (
        list(service.stream(replace(request, speculation=Speculation(drafter, 6))))
        for drafter in ("off", "ngram")
    )
    assert answer_of(drafted) == answer_of(plain)
    assert drafted[-1].timings is not None
    assert drafted[-1].timings.accepted_tokens > 0
    jsonschema.validate(json.loads(answer_of(plain).text), schema)
