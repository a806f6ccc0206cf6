"""Regular expressions in grammars, and what they weigh: the library counts the states that they come to, and not what
it takes to write down each of them, which grows by the square of an expression's length."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from shardcompute.core.generation import Grammar

JSON_RULE = "%json "
_JSON = json.JSONDecoder()


def pattern_length(grammar: Grammar) -> int:
    """The length of the one expression that weighs as much as all of them together."""
    if grammar.kind == "regex":
        patterns = [grammar.text]
    elif grammar.kind == "json_schema":
        patterns = _patterns_in(json.loads(grammar.text))
    else:
        patterns = [each for schema in _schemas_in(grammar.text) for each in _patterns_in(schema)]
    return math.isqrt(sum(len(pattern) ** 2 for pattern in patterns))


def _schemas_in(lark: str) -> Iterator[object]:
    at = lark.find(JSON_RULE)
    while at >= 0:
        end = at + len(JSON_RULE)
        try:
            schema, end = _JSON.raw_decode(lark, end)
            yield schema
        except ValueError:  # a text that only looks like the beginning of one
            pass
        at = lark.find(JSON_RULE, end)


def _patterns_in(schema: object) -> list[str]:
    """Every regular expression in a schema, and perhaps a text that stands where one would."""
    found: list[str] = []
    ahead = [schema]
    while ahead:
        value = ahead.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                found.append(pattern)
            if isinstance(by_pattern := value.get("patternProperties"), dict):
                found += by_pattern
            ahead += value.values()
        elif isinstance(value, list):
            ahead += value
    return found
