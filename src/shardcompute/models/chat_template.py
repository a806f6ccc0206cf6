"""A model's own chat template, rendered without trust.

Templates are Jinja programs that come with the model's files, so they are treated as foreign code (see `templates`): a
plain one runs here and is metered, any other in a process that is ended where it takes too much time or memory.
Templates see plain JSON values only, and what the field's templates expect to find: `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `{% generation %}`, `{% break %}`.

A template that does not compile, or uses too much, is an UnsupportedModelError. Messages that it cannot render, by its
own words or by failing, are a UsageError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.models.templates.engine import NotMeteredError, TemplateEngine, TemplateLimits
from shardcompute.models.templates.proof import is_plain
from shardcompute.models.templates.sandbox import RAW_PROMPT, SandboxLimits, TemplateSandbox

MAX_SOURCE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 24
MAX_STEPS = 1_000_000
_MOST_WORDS = 1000
IMAGE = {"type": "image"}
"""The part of a message that stands for an image, to templates of models that see."""


class ChatTemplate:
    """A compiled template; `variables` (bos_token, eos_token, …) are there in every rendering."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
        sandbox_limits: SandboxLimits | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise UnsupportedModelError(
                f"the model's chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}",
                hint=RAW_PROMPT,
            )
        self._now = now
        self._variables = dict(variables or {})
        self.is_plain = is_plain(source)
        """Whether it runs in this process, in a time that its messages' size bounds."""
        self._sandbox = TemplateSandbox(source, sandbox_limits)
        self._engine = _compile(source) if self.is_plain else None
        if self._engine is None:
            self._sandbox.open()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`. `variables` are the caller's own (such as `enable_thinking`)."""
        try:
            given = {
                "messages": plain_messages(messages),
                "tools": _plain(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            plain = _plain(variables or {})
        except RecursionError as error:
            raise _failed(f"RecursionError: {error}") from error
        if clash := sorted(given.keys() & plain.keys()):
            raise UsageError(
                f"the template variable {clash[0]!r} cannot be set by the request",
                hint="leave it out of the template's variables",
            )
        known = {**self._variables, **plain, **given}
        limits = TemplateLimits(MAX_STEPS, MAX_RENDERED_CHARS)
        if self._engine is not None:
            try:
                return self._render_here(self._engine, known, limits)
            except NotMeteredError:
                pass
        return self._render_apart(known, limits)

    def _render_here(self, engine: TemplateEngine, known: Mapping[str, Any], limits: TemplateLimits) -> str:
        try:
            return engine.render(known, limits, self._now())
        except (UsageError, NotMeteredError):
            raise
        except jinja2.TemplateError as error:
            raise _refused(error.message or type(error).__name__) from error
        except Exception as error:  # foreign code can fail in any way
            raise _failed(f"{type(error).__name__}: {error}") from error

    def _render_apart(self, known: Mapping[str, Any], limits: TemplateLimits) -> str:
        answer = self._sandbox.render(known, limits, self._now())
        if "message" in answer:
            raise UsageError(answer["message"], hint=answer["hint"])
        if "refused" in answer:
            raise _refused(answer["refused"])
        if "failed" in answer:
            raise _failed(answer["failed"])
        text: str = answer["text"]
        return text


def _compile(source: str) -> TemplateEngine:
    try:
        return TemplateEngine(source, strict=True)
    except Exception as error:  # foreign code: besides syntax errors, nesting too deep for the compiler
        raise UnsupportedModelError(
            f"the model's chat template does not compile: {error}", hint=RAW_PROMPT
        ) from error


def _refused(why: str) -> UsageError:
    return UsageError(
        f"the model's chat template refuses these messages: {why[:_MOST_WORDS]}",
        hint="check the roles, their order and the content of the messages",
    )


def _failed(why: str) -> UsageError:
    return UsageError(
        f"the model's chat template fails on these messages: {why[:_MOST_WORDS]}",
        hint="check the roles, their order and the content of the messages, or send a raw prompt",
    )


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as templates expect them: plain values, text as one string unless there are images among it, tool
    arguments as objects."""
    if not messages:
        raise UsageError("there are no messages", hint="send at least one message")
    return [_plain_message(message, position) for position, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(
            f"message {position} has no role", hint='each message is an object with "role" and "content"'
        )
    plain: dict[str, Any] = _plain(message)
    plain["content"] = _plain_content(plain.get("content"), position)
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


def _plain_content(content: object, position: int) -> object:
    """Text as one string; where there are images among it, parts as they are."""
    if isinstance(content, list) and IMAGE in content:
        _join_text([part for part in content if part != IMAGE], position)
        return content
    return _join_text(content, position)


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
