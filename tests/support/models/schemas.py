"""JSON schemas made by hypothesis, each with bounds so that an answer comes to an end."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st

from shardcompute.core.generation import GenerationRequest, Grammar, Sampling

Schema = dict[str, Any]
_NAMES = st.text(string.ascii_lowercase + '"é ', min_size=1, max_size=4)


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(-50, 50))
    return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 200))}


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 4))}


_LEAVES: st.SearchStrategy[Schema] = st.one_of(
    _integers(),
    _strings(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "string", "pattern": "^[a-f]{2}-[0-9]$"}),
    st.lists(st.one_of(st.integers(-9, 9), _NAMES, st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    _NAMES.map(lambda value: {"const": value}),
)


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(_objects(inner), _arrays(inner), st.lists(inner, min_size=1, max_size=2).map(_any_of))


def _any_of(schemas: list[Schema]) -> Schema:
    return {"anyOf": schemas}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + 1}


schemas: st.SearchStrategy[Schema] = st.recursive(_LEAVES, _nested, max_leaves=5)
object_schemas: st.SearchStrategy[Schema] = _objects(schemas)


def held_to(
    grammar: Grammar, prompt: tuple[int, ...], eos_ids: frozenset[int], seed: int
) -> GenerationRequest:
    """A request under a grammar: greedy for seed 0, else drawn. Space is made dear, as it is the longest way to say
    nothing."""
    dear = dict.fromkeys((220, 198, 197, 201), -20.0)
    sampling = Sampling(1.0 if seed else 0.0, seed=seed, grammar=grammar, logit_bias=dear)
    return GenerationRequest(prompt, 400, sampling, stop_ids=eos_ids)
