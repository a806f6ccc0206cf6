"""Proof that a template is plain: made of nothing but what the engine meters, so that it may run in this process.

A list of what is allowed, not of what is forbidden: whatever is not on it (macros, arithmetic that multiplies, methods
and filters that make text longer than what they are given) is for the sandbox. Most templates of the field are plain.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError, nodes

from shardcompute.models.templates.engine import new_environment

_MOST_CHARACTERS = 1 << 15
_MOST_NODES = 4096
_MOST_DEPTH = 40
_MOST_PATTERN = 64
_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Assign),
    *(
        nodes.If,
        nodes.For,
        nodes.Break,
        nodes.Continue,
        nodes.Scope,
        nodes.CondExpr,
        nodes.Compare,
        nodes.Operand,
    ),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Sub, nodes.Mod, nodes.Concat),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword),
)
_FILTERS = frozenset(
    (
        *("trim", "length", "count", "tojson", "first", "last", "default", "d", "upper", "lower"),
        *("string", "items"),
    )
)
_TESTS = frozenset(
    (
        *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean"),
        *("true", "false", "integer", "float"),
    )
)
_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace"})
_METHODS = frozenset(
    (
        *("startswith", "endswith", "strip", "lstrip", "rstrip", "split", "upper", "lower", "items", "keys"),
        *("get",),
    )
)


def is_plain(source: str) -> bool:
    """Whether the template can be rendered here. One that cannot even be read is not."""
    if len(source) > _MOST_CHARACTERS:
        return False
    try:
        template = new_environment().parse(source)
    except (TemplateError, RecursionError):
        return False
    return _is_plain(template)


def _is_plain(template: nodes.Template) -> bool:
    ahead: list[tuple[nodes.Node, int]] = [(template, 0)]
    seen = 0
    while ahead:
        node, depth = ahead.pop()
        seen += 1
        if seen > _MOST_NODES or depth > _MOST_DEPTH or not isinstance(node, _NODES) or not _is_allowed(node):
            return False
        ahead += [(child, depth + 1) for child in node.iter_child_nodes()]
    return True


def _is_allowed(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Pair):
        return isinstance(node.key, nodes.Const) and isinstance(node.value, nodes.Const)
    if isinstance(node, nodes.For):
        return not node.recursive
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
        # One that holds others twice, again and again, is small only until it is written.
        return (isinstance(node, nodes.Tuple) and node.ctx == "store") or _is_constant(node)
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS and node.dyn_args is None and node.dyn_kwargs is None
    if isinstance(node, nodes.Test):
        return node.name in _TESTS
    if isinstance(node, nodes.Name):
        return not (node.ctx == "load" and node.name in ("range", "dict", "cycler", "joiner"))
    if isinstance(node, nodes.Call):
        return node.dyn_args is None and node.dyn_kwargs is None and _is_known_call(node.node, node.args)
    return True


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(child, nodes.Const | nodes.Pair) for child in node.iter_child_nodes())


def _is_known_call(called: nodes.Node, given: Sequence[nodes.Node]) -> bool:
    if isinstance(called, nodes.Name):
        is_short = all(
            isinstance(each, nodes.Const) and len(str(each.value)) <= _MOST_PATTERN for each in given
        )
        return called.name in _FUNCTIONS and (called.name != "strftime_now" or is_short)
    return isinstance(called, nodes.Getattr) and called.attr in _METHODS
