"""What grammars cost where the library does not count it: a small schema can take seconds, gigabytes or the stack.

The library counts the states that expressions come to, and not what it takes to write down each of them, which grows by
the square of an expression's length, nor to find that several of them agree. A number's multiples take a state for each
remainder. References are followed by calls within calls, as deep as a chain of them goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from shardcompute.core.generation import MAX_PATTERN_CHARS, Grammar

MAX_REFERENCE_DEPTH = 2400
MAX_MULTIPLE = 20_000
MAX_FIELDS = 2500
MAX_PATTERNS_AT_ONCE = 3
JSON_RULE = "%json "
_JSON = json.JSONDecoder()


def excess_of(grammar: Grammar) -> str | None:
    """What of it is too much, in words; None where all of it can be afforded."""
    if grammar.kind == "regex":
        return _excess_of_patterns([grammar.text], has_all_of=False)
    schemas = [json.loads(grammar.text)] if grammar.kind == "json_schema" else list(_schemas_in(grammar.text))
    found = _Findings()
    for schema in schemas:
        _look_through(schema, found)
    if found.references * found.depth > MAX_REFERENCE_DEPTH:
        return f"it has {found.references} references in {found.depth} levels, which is too deep to follow"
    if math.lcm(*found.multiples) > MAX_MULTIPLE or sum(found.multiples) > MAX_MULTIPLE:
        return f"the numbers of its multipleOf come to more than {MAX_MULTIPLE}"
    if math.isqrt(found.fields) > MAX_FIELDS:
        return f"its objects have more than {MAX_FIELDS} properties"
    return _excess_of_patterns(found.patterns, has_all_of=found.has_all_of)


def _excess_of_patterns(patterns: list[str], *, has_all_of: bool) -> str | None:
    length = math.isqrt(sum(len(pattern) ** 2 for pattern in patterns))
    if length > MAX_PATTERN_CHARS:
        return f"its expressions weigh as much as one of {length} characters, more than {MAX_PATTERN_CHARS}"
    if has_all_of and len(patterns) > MAX_PATTERNS_AT_ONCE:
        return f"it has more than {MAX_PATTERNS_AT_ONCE} expressions beside allOf"
    return None


@dataclass(slots=True)
class _Findings:
    patterns: list[str] = field(default_factory=list)
    multiples: list[int] = field(default_factory=list)
    fields: int = 0
    """Squares of the properties of each object: their order is free, so each may come after each."""
    references: int = 0
    depth: int = 0
    has_all_of: bool = False


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


def _look_through(schema: object, found: _Findings) -> None:
    """Whatever stands where a keyword would counts as one."""
    ahead = [(schema, 1)]
    while ahead:
        value, depth = ahead.pop()
        found.depth = max(found.depth, depth)
        if isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                found.patterns.append(pattern)
            if isinstance(by_pattern := value.get("patternProperties"), dict):
                found.patterns += by_pattern
            if isinstance(multiple := value.get("multipleOf"), int | float):
                found.multiples.append(_digits_of(multiple))
            if isinstance(properties := value.get("properties"), dict):
                found.fields += len(properties) ** 2
            found.references += "$ref" in value
            found.has_all_of |= "allOf" in value
            ahead += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            ahead += [(item, depth + 1) for item in value]


def _digits_of(number: float) -> int:
    """The number without its decimal point, as it is counted in."""
    digits = "".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))
    exponent = Decimal(str(number)).normalize().as_tuple().exponent
    return max(int(digits) * 10 ** min(max(int(exponent), 0), 9), 1) if isinstance(exponent, int) else 1
