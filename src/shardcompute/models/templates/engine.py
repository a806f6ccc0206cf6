"""Template engine: Jinja in a sandbox, as the field's chat templates expect it, with a meter that runs.

Attributes of Python's internals are out of reach. Loops, calls, comparisons and what is joined, repeated, cut or
written draw on a budget of steps by their size, so that a template made of these alone ends soon (see `proof`). What
cannot be metered raises `NotMeteredError` where the engine is `strict`, and is done where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from shardcompute.core.errors import UsageError

_SCANNED = 256
"""Characters that a step looks through or copies."""
_WRITTEN = 64
"""Characters of JSON that a step writes."""
_MOST_CUT = 1 << 20
"""Characters of a text that is cut into words: a word takes more room than it shows."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take."""

    steps: int
    characters: int


class NotMeteredError(Exception):
    """The template does something whose cost nobody counts."""


class TemplateEngine:
    """A compiled template. `strict`: only what is metered is done."""

    def __init__(self, source: str, *, strict: bool) -> None:
        self._strict = strict
        self._template = new_environment().from_string(source)

    def render(self, variables: Mapping[str, Any], limits: TemplateLimits, now: datetime) -> str:
        """Raises whatever the template does, UsageError beyond the limits."""
        meter = _Meter(limits, now, self._strict, variables)
        previous = _METER.set(meter)
        try:
            return "".join(self._pieces(variables, meter))
        finally:
            _METER.reset(previous)

    def _pieces(self, variables: Mapping[str, Any], meter: _Meter) -> Iterator[str]:
        size = 0
        for piece in self._template.generate(variables):
            size = meter.check_size(size + len(piece))
            yield piece


class _Meter:
    __slots__ = ("_given", "_limits", "_steps_left", "_variables", "is_strict", "now")

    def __init__(
        self, limits: TemplateLimits, now: datetime, is_strict: bool, variables: Mapping[str, Any]
    ) -> None:
        self._variables = variables
        self._given: frozenset[int] | None = None
        self._limits = limits
        self._steps_left = limits.steps
        self.now = now
        self.is_strict = is_strict

    def charge(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise UsageError(
                f"the model's chat template takes more than {self._limits.steps} steps for these messages",
                hint="send fewer messages, or a raw prompt (/v1/completions)",
            )

    def check_size(self, size: int) -> int:
        if size > self._limits.characters:
            raise UsageError(
                f"the model's chat template writes more than {self._limits.characters} characters for these messages",
                hint="send shorter messages, or a raw prompt (/v1/completions)",
            )
        return size

    def charge_scan(self, value: Any) -> Any:
        """A value that is looked through once."""
        if isinstance(value, str):
            self.charge(len(value) // _SCANNED)
        elif isinstance(value, list | tuple | dict):
            self.charge(len(value))
        elif not _is_small(value):
            self.refuse()
        return value

    def charge_equal(self, value: Any) -> Any:
        """One side of a comparison; two structures may hold anything, however deep."""
        if isinstance(value, str):
            self.charge(len(value) // _SCANNED)
        elif not _is_small(value):
            self.refuse()
        return value

    def check_own(self, owner: list[Any]) -> None:
        """SecurityError unless the template has made this list itself: what it was given stays as it is."""
        if self._given is None:
            self._given = frozenset(_lists_in(self._variables))
        if id(owner) in self._given:
            raise jinja2.exceptions.SecurityError("chat templates cannot change what they are given")

    def refuse(self) -> None:
        if self.is_strict:
            raise NotMeteredError


def _is_small(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | Undefined)


def _lists_in(value: Any) -> Iterator[int]:
    """Which lists there are in a value, whatever its depth."""
    ahead = [value]
    while ahead:
        each = ahead.pop()
        if isinstance(each, list):
            yield id(each)
        if isinstance(each, list | Mapping):
            ahead.extend(each.values() if isinstance(each, Mapping) else each)


# Templates are shared by all requests, a meter belongs to one rendering.
_METER: ContextVar[_Meter] = ContextVar("chat_template_meter")


def _charge_loop(iterable: Any) -> Any:
    """What a `for` of a template runs over, paid for by the number of its items."""
    meter = _METER.get()
    try:
        meter.charge(len(iterable) + 1)
    except TypeError:
        return _charge_each(iterable, meter)
    return iterable


def _charge_each(iterable: Iterable[Any], meter: _Meter) -> Iterator[Any]:
    for item in iterable:
        meter.charge(1)
        yield item


def _join_bounded(parts: Sequence[Any]) -> str:
    meter = _METER.get()
    texts = [str(meter.charge_equal(part)) for part in parts]
    size = meter.check_size(sum(map(len, texts)))
    meter.charge(1 + size // _SCANNED)
    return "".join(texts)


class _Metering(NodeTransformer):
    """Routes what a template does with values of any size through the meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_charge_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_join_bounded")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        has_constant = isinstance(node.expr, nodes.Const)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = _filtered(operand.expr, "_charge_scan")
            elif not has_constant and not isinstance(operand.expr, nodes.Const):
                operand.expr = _filtered(operand.expr, "_charge_equal")
        if not has_constant and any(not isinstance(operand.expr, nodes.Const) for operand in node.ops):
            node.expr = _filtered(node.expr, "_charge_equal")
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        if node.node is not None:
            node.node = _filtered(node.node, "_charge_scan")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_charge_scan")
        return node


def _filtered(expression: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(expression, nodes.Expr)
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


class _MeteredCode(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        super().visit_Template(_Metering().visit(node), frame)


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _MeteredCode
    # Interception also keeps Jinja from computing these while compiling.
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may grow, by an item for a step: templates gather messages in lists of their own."""
        return (isinstance(obj, list) and attr == "append") or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.charge(1)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, list) and getattr(obj, "__name__", "") == "append":
            meter.refuse()  # a list may come to hold itself, or another many times over
            meter.check_own(owner)
        elif isinstance(owner, str | list | dict):
            meter.charge_scan(owner)
            if len(owner) > _MOST_CUT and getattr(obj, "__name__", "") == "split":
                meter.refuse()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        meter.charge(1)
        sizes = [len(side) if hasattr(side, "__len__") else None for side in (left, right)]
        if operator == "+" and None not in sizes:
            if not isinstance(left, str):
                meter.refuse()  # the same item many times over is small only until it is written
            size = meter.check_size(sum(size or 0 for size in sizes))
            meter.charge(size // _SCANNED)
        elif operator == "*":
            for repeated, factor in ((sizes[0], right), (sizes[1], left)):
                if repeated is not None and isinstance(factor, int):
                    meter.check_size(repeated * factor)
        elif operator == "**":
            raise jinja2.exceptions.SecurityError("chat templates cannot raise to a power")
        elif operator == "%" and not _is_small(left):
            meter.refuse()
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def new_environment() -> jinja2.Environment:
    environment = _MeteredEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        finalize=_written,
    )
    environment.filters["tojson"] = _to_json
    environment.filters["_charge_loop"] = _charge_loop
    environment.filters["_join_bounded"] = _join_bounded
    environment.filters["_charge_scan"] = lambda value: _METER.get().charge_scan(value)
    environment.filters["_charge_equal"] = lambda value: _METER.get().charge_equal(value)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: _METER.get().now.strftime(pattern)
    # Neither is of use to a chat, and both make text of any size out of a number.
    del environment.globals["lipsum"], environment.filters["center"]
    return environment


def _written(value: Any) -> Any:
    """A value as it is written out: text and numbers; what else there is may be of any depth."""
    if not isinstance(value, str):
        _METER.get().charge_equal(value)
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    meter = _METER.get()
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        meter.refuse()

    def listed(each: Any) -> list[Any]:
        """What filters such as `map` and `select` give is a list to whoever wrote the template."""
        if not isinstance(each, Iterator):
            raise TypeError(f"{type(each).__name__} cannot be written as JSON")
        return list(_charge_each(each, meter))

    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=listed,
    )
    meter.charge(len(text) // _WRITTEN)
    return text
