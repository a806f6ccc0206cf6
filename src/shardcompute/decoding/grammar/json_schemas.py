"""JSON schemas as answers are generated from them: without keys that nobody declares, or without limits on values.

`close_objects`: a schema that does not speak of `additionalProperties` allows any key. Models that are held to it like
to go on with words of the schema itself, which no program expects; so what is absent counts as false. What fits the
closed schema also fits the open one. An object without any `properties` stays open: it is a map. Where several
schemas describe one object (`allOf`, or alternatives beside `properties`), it is closed over the keys of all of them
together, and each by itself stays as it is.

`drop_limits` leaves of a schema that is too much for a grammar what matters most: which keys there are, and of which
type or choice their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else")
_OPENERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_SINGLES = ("items", "additionalProperties")
_LIMITS = frozenset(
    {"pattern", "format", "minLength", "maxLength", "multipleOf", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "minItems", "maxItems", "contains", "uniqueItems"}
)


def close_objects(schema: Any) -> Any:
    """The schema with its objects closed; as it is where it is none, or deeper than anybody would write one."""
    try:
        return _Closer(schema).close(schema) if isinstance(schema, dict) else schema
    except RecursionError:
        return schema


def drop_limits(schema: Any) -> Any:
    """The schema with values of the right types and choices, however long, large or strange they are."""
    try:
        return _dropped(schema)
    except RecursionError:
        return schema


def _dropped(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in _LIMITS}
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            kept[key] = {name: _dropped(each) for name, each in node[key].items()}
    for key in _SINGLES:
        if key in node:
            kept[key] = _dropped(node[key])
    for key in ("prefixItems", *_ALTERNATIVES):
        if isinstance(node.get(key), list):
            kept[key] = [_dropped(each) for each in node[key]]
    return kept


class _Closer:
    """Closes the objects of one schema, which references lead back into."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts: set[str] = set()
        """References to definitions that describe an object together with other schemas: those stay as they are."""
        found = [where for node in _nodes(root) if _is_composed(node) for where in _references_beside(node)]
        while found:
            where = found.pop()
            if where not in self._parts:
                self._parts.add(where)
                found += _references(self._target(where))

    def close(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        closed = dict(node)
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                closed[key] = {
                    name: each if f"#/{key}/{name}" in self._parts else self.close(each)
                    for name, each in node[key].items()
                }
        for key in _SINGLES:
            if key in node:
                closed[key] = self.close(node[key])
        is_composed = _is_composed(node)
        for key in ("prefixItems", *(() if is_composed else _ALTERNATIVES)):
            if isinstance(node.get(key), list):
                closed[key] = [self.close(each) for each in node[key]]
        declared = self._declared(node, frozenset()) if is_composed or "properties" in node else None
        if declared:
            own = closed.get("properties")
            others = {name: True for name in sorted(declared) if not isinstance(own, dict) or name not in own}
            closed["properties"] = {**own, **others} if isinstance(own, dict) else others
        if declared or (declared is not None and not is_composed):
            closed["additionalProperties"] = False
        return closed

    def _declared(self, node: Any, seen: frozenset[str]) -> set[str] | None:
        """The keys that a schema and those beside it declare; None where one of them leaves others open."""
        if not isinstance(node, dict):
            return set()
        if any(node.get(key, False) is not False for key in _OPENERS):
            return None
        own = node.get("properties")
        names = set(own) if isinstance(own, dict) else set()
        beside = list(_beside(node))
        where = node.get("$ref")
        if isinstance(where, str) and where not in seen:
            seen |= {where}
            target = self._target(where)
            if target is None:
                return None
            beside.append(target)
        for each in beside:
            found = self._declared(each, seen)
            if found is None:
                return None
            names |= found
        return names

    def _target(self, where: str) -> Any:
        """What a reference leads to, where that is a definition of this schema; None elsewhere."""
        _, kind, name = (*where.split("/"), "", "")[:3]
        found = self._root.get(kind) if kind in _DEFINITIONS else None
        return found.get(name) if isinstance(found, dict) else None


def _is_composed(node: dict[str, Any]) -> bool:
    """Whether several schemas describe what this one does."""
    combined = [key for key in (*_ALTERNATIVES, "$ref") if key in node]
    all_of = node.get("allOf")
    return (
        any(key in node for key in (*_CONDITIONS, "dependentSchemas"))
        or len(combined) + ("properties" in node) > 1
        or (isinstance(all_of, list) and len(all_of) > 1)
    )


def _beside(node: dict[str, Any]) -> Iterator[Any]:
    """The schemas that describe the same value as this one."""
    for key in _ALTERNATIVES:
        if isinstance(node.get(key), list):
            yield from node[key]
    for key in _CONDITIONS:
        if key in node:
            yield node[key]
    dependent = node.get("dependentSchemas")
    if isinstance(dependent, dict):
        yield from dependent.values()


def _references_beside(node: dict[str, Any]) -> Iterator[str]:
    if isinstance(node.get("$ref"), str):
        yield node["$ref"]
    for each in _beside(node):
        yield from _references(each)


def _references(value: Any) -> Iterator[str]:
    return (node["$ref"] for node in _nodes(value) if isinstance(node.get("$ref"), str))


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """All objects within a value, itself included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
