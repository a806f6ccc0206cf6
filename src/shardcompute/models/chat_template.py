"""A model's own chat template, rendered in a sandbox.

Templates are Jinja programs that come with the model's files, so they are treated as foreign code:
attributes of Python's internals are out of reach, loops and calls draw on a budget of steps, and what is
joined, repeated or written has a limit, so that a template cannot hang a server by going round in circles.
Templates see plain JSON values only, and what the field's templates expect to find: `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `{% generation %}`, `{% break %}`.

A template that does not compile is an UnsupportedModelError. Messages that it cannot render, by its own
words or by failing, are a UsageError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from shardcompute.core.errors import UnsupportedModelError, UsageError

MAX_SOURCE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 24
MAX_STEPS = 1_000_000


class ChatTemplate:
    """A compiled template; `variables` (bos_token, eos_token, …) are there in every rendering."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise UnsupportedModelError(
                f"the model's chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}",
                hint="send a raw prompt (/v1/completions) instead",
            )
        self._variables = dict(variables or {})
        try:
            self._template = _new_environment(now).from_string(source)
        except Exception as error:  # foreign code: besides syntax errors, nesting too deep for the compiler
            raise UnsupportedModelError(
                f"the model's chat template does not compile: {error}",
                hint="send a raw prompt (/v1/completions) instead",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`. `variables` are the caller's own (such as `enable_thinking`)."""
        previous = _BUDGET.set(_Budget())
        try:
            given = {
                "messages": plain_messages(messages),
                "tools": _plain(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            if clash := sorted(given.keys() & (variables or {}).keys()):
                raise UsageError(
                    f"the template variable {clash[0]!r} cannot be set by the request",
                    hint="leave it out of the template's variables",
                )
            return "".join(self._pieces({**self._variables, **_plain(variables or {}), **given}))
        except UsageError:
            raise
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the model's chat template refuses these messages: {error.message or type(error).__name__}",
                hint="check the roles, their order and the content of the messages",
            ) from error
        except Exception as error:  # foreign code can fail in any way
            raise UsageError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}",
                hint="check the roles, their order and the content of the messages, or send a raw prompt",
            ) from error
        finally:
            _BUDGET.reset(previous)

    def _pieces(self, variables: Mapping[str, Any]) -> Iterator[str]:
        size = 0
        for piece in self._template.generate(variables):
            size = _check_size(size + len(piece))
            yield piece


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as templates expect them: plain values, text as one string, tool arguments as objects."""
    if not messages:
        raise UsageError("there are no messages", hint="send at least one message")
    return [_plain_message(message, position) for position, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(
            f"message {position} has no role", hint='each message is an object with "role" and "content"'
        )
    plain: dict[str, Any] = _plain(message)
    plain["content"] = _join_text(plain.get("content"), position)
    for call in plain.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # OpenAI sends arguments as a JSON string; templates write it with `tojson`, so want an object.
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise UsageError(
                    f"message {position} calls a tool with arguments that are not JSON: {error}",
                    hint="send back the arguments as the model wrote them",
                ) from error
    return plain


def _join_text(content: object, position: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(
            f"the content of message {position} is neither text nor a list of parts",
            hint='send a string, or parts such as {"type": "text", "text": "…"}',
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise UsageError(
                f"message {position} has a part of type {kind!r}, and this model reads text only",
                hint='send only parts such as {"type": "text", "text": "…"}',
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(value: Any) -> Any:
    """A copy made of JSON types alone, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return str(value)


class _Budget:
    __slots__ = ("steps_left",)

    def __init__(self) -> None:
        self.steps_left = MAX_STEPS

    def charge(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise UsageError(
                f"the model's chat template takes more than {MAX_STEPS} steps for these messages",
                hint="send fewer messages, or a raw prompt (/v1/completions)",
            )


# Templates are shared by all requests, a budget belongs to one rendering.
_BUDGET: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _check_size(size: int) -> int:
    if size > MAX_RENDERED_CHARS:
        raise UsageError(
            f"the model's chat template writes more than {MAX_RENDERED_CHARS} characters for these messages",
            hint="send shorter messages, or a raw prompt (/v1/completions)",
        )
    return size


def _charge_loop(iterable: Any) -> Any:
    """What a `for` of a template runs over, paid for by the number of its items."""
    budget = _BUDGET.get()
    try:
        budget.charge(len(iterable) + 1)
    except TypeError:
        return _charge_each(iterable, budget)
    return iterable


def _charge_each(iterable: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for item in iterable:
        budget.charge(1)
        yield item


def _join_bounded(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _BUDGET.get().charge(1)
    _check_size(sum(map(len, texts)))
    return "".join(texts)


class _Bounding(NodeTransformer):
    """Routes the loops and the concatenations of a template through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_charge_loop", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's visitor name
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_join_bounded", [], [], None, None, lineno=node.lineno)


class _BoundedCode(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        super().visit_Template(_Bounding().visit(node), frame)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _BoundedCode
    # Interception also keeps Jinja from computing these while compiling.
    intercepted_binops = frozenset(["*", "**", "+"])

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().charge(1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BUDGET.get().charge(1)
        sizes = [len(side) if hasattr(side, "__len__") else None for side in (left, right)]
        if operator == "+" and None not in sizes:
            _check_size(sum(size or 0 for size in sizes))
        elif operator == "*":
            for size, factor in ((sizes[0], right), (sizes[1], left)):
                if size is not None and isinstance(factor, int):
                    _check_size(size * factor)
        elif operator == "**":
            raise jinja2.exceptions.SecurityError("chat templates cannot raise to a power")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _new_environment(now: Callable[[], datetime]) -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.filters["_charge_loop"] = _charge_loop
    environment.filters["_join_bounded"] = _join_bounded
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    # Neither is of use to a chat, and both make text of any size out of a number.
    del environment.globals["lipsum"], environment.filters["center"]
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
