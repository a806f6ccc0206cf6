"""Undeclared keys are not generated, and what is generated still satisfies the schema as it was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardcompute.core.generation import Grammar
from shardcompute.decoding import compiler_of
from shardcompute.decoding.grammar.json_schemas import close_objects, drop_limits
from support.models.byte_vocabulary import BYTES

INTEGER = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": INTEGER}, "required": ["x"]}


def takes(schema: Any, text: str) -> bool:
    state = compiler_of(BYTES).start(Grammar("json_schema", json.dumps(schema)))
    state.extend(list(text.encode()))
    return state.is_complete


@pytest.mark.parametrize(
    ("schema", "declared", "undeclared"),
    [
        (POINT, '{"x": 1}', '{"x": 1, "type": 2}'),
        ({"properties": {"p": POINT}}, '{"p": {"x": 1}}', '{"p": {"x": 1, "y": 2}}'),
        ({"type": "array", "items": POINT}, '[{"x": 1}]', '[{"x": 1, "y": 2}]'),
        ({"$defs": {"P": POINT}, "$ref": "#/$defs/P"}, '{"x": 1}', '{"x": 1, "y": 2}'),
        ({"anyOf": [POINT, {"type": "null"}]}, '{"x": 1}', '{"x": 1, "y": 2}'),
        ({"allOf": [POINT]}, '{"x": 1}', '{"x": 1, "y": 2}'),
        ({"type": "object", "properties": {}}, "{}", '{"x": 1}'),
        (
            {"allOf": [POINT, {"properties": {"y": INTEGER}}]},
            '{"x": 1, "y": 2}',
            '{"x": 1, "y": 2, "z": 3}',
        ),
        (
            {"$defs": {"P": POINT}, "allOf": [{"$ref": "#/$defs/P"}], "properties": {"y": INTEGER}},
            '{"x": 1, "y": 2}',
            '{"x": 1, "y": 2, "z": 3}',
        ),
        (
            {
                **POINT,
                "required": [],
                "anyOf": [{"required": ["x"]}, {"properties": {"y": INTEGER}, "required": ["y"]}],
            },
            '{"x": 1}',
            '{"x": 1, "z": 3}',
        ),
    ],
)
def test_only_declared_keys_are_generated(schema: Any, declared: str, undeclared: str) -> None:
    assert takes(schema, declared)
    assert not takes(schema, undeclared)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"a": 1}'),
        ({**POINT, "additionalProperties": True}, '{"x": 1, "y": 2}'),
        ({**POINT, "additionalProperties": INTEGER}, '{"x": 1, "y": 2}'),
        ({**POINT, "patternProperties": {"^y": INTEGER}}, '{"x": 1, "y": 2}'),
        ({"properties": {"any": {"type": "object"}}}, '{"any": {"a": 1}}'),
        ({"type": "object", "additionalProperties": POINT}, '{"a": {"x": 1}}'),
        (True, '{"a": 1}'),
    ],
)
def test_objects_that_are_meant_to_be_open_stay_open(schema: Any, text: str) -> None:
    assert takes(schema, text)


def test_what_stands_in_the_place_of_a_schema_is_left_alone() -> None:
    """A property may be called `properties`, and a constant may look like a schema."""
    schema = {
        "type": "object",
        "properties": {
            "properties": {"const": {"properties": {"x": 1}}},
            "enum": {"enum": [{"properties": {}}]},
        },
    }
    assert close_objects(schema) == {**schema, "additionalProperties": False}


def test_schemas_of_nonsense_and_of_loops_are_no_trouble() -> None:
    for nonsense in (
        None,
        3,
        {"properties": 3},
        {"allOf": 3},
        {"properties": [], "allOf": [None, 1]},
        {"$ref": "#/$defs/A", "properties": {"x": True}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"allOf": [{"$ref": "#"}], "properties": {"x": {"$ref": "#"}}},
    ):
        close_objects(nonsense)
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert close_objects(deep) is deep


def test_gaps_in_json_are_a_space_at_most_and_only_behind_separators() -> None:
    schema = {**POINT, "properties": {"x": INTEGER, "y": INTEGER}, "required": ["x", "y"]}
    assert takes(schema, '{"x":1,"y":2}')
    assert takes(schema, '{"x": 1, "y": 2}')
    for wide in (
        '{"x":  1, "y": 2}',
        '{ "x": 1, "y": 2}',
        '{"x": 1,\n"y": 2}',
        '{"x": 1 , "y": 2}',
        '{"x": 1, "y": 2 }',
    ):
        assert not takes(schema, wide), wide


def test_limits_are_dropped_and_what_is_called_like_one_is_not() -> None:
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "pattern": "^(?=x)y$", "enum": ["y"]},
            "many": {"type": "array", "items": {"type": "integer", "minimum": 3}, "maxItems": 4},
            "any": {"anyOf": [{"type": "string", "format": "uri"}, {"$ref": "#/$defs/n"}]},
        },
        "$defs": {"n": {"type": "number", "multipleOf": 0.5}},
    }
    assert drop_limits(schema) == {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "enum": ["y"]},
            "many": {"type": "array", "items": {"type": "integer"}},
            "any": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]},
        },
        "$defs": {"n": {"type": "number"}},
    }
