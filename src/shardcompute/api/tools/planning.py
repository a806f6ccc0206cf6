"""Tool call planning: from the tools of a request to the prompt, the grammar and the parser of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from shardcompute.api.tools.call_format import CallFormat, Marks, Tool, check_arguments
from shardcompute.api.tools.detection import detect_format
from shardcompute.api.tools.events import CallReader
from shardcompute.api.tools.generic import explain
from shardcompute.core.errors import PromptTooLongError, UsageError
from shardcompute.core.generation import Grammar
from shardcompute.decoding import GrammarCompiler, compiler_of, drop_limits
from shardcompute.node.service import TextCodec

Choice = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What holds answers to their tools, if anything does."""

    grammar: Grammar | None
    unenforced: tuple[str, ...] = ()
    """Names of tools whose arguments may break their schema, as far as nothing but the prompt tells the model of it."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools that the model may call in its answer, or must."""

    tools: tuple[Tool, ...]
    choice: Choice
    format: CallFormat
    marks: Marks
    is_parallel: bool = True

    def reader(self) -> CallReader:
        return self.format.reader(self.tools)

    def enforce(self, codec: TextCodec, text_rule: str | None = None) -> Enforcement:
        """The grammar that holds answers to the format: always where a call is required, otherwise where it can be done
        without holding free text to anything. `text_rule` is the right side of the Lark rule for an answer that is no
        call.

        A schema that is too much for a grammar keeps its keys and types and loses the limits on its values; the tool is
        named for it. UsageError for one that cannot even be held to these, and for a strict one that loses anything.
        """
        if self._lark(self.tools, text_rule) is None:
            return Enforcement(None, tuple(tool.name for tool in self.tools))
        compiler = compiler_of(codec.vocabulary())
        try:
            return self._compiled(compiler, self.tools, text_rule)
        except UsageError:
            tools = tuple(self._simplified(tool) for tool in self.tools)
        try:
            return self._compiled(compiler, tools, text_rule)
        except UsageError:
            tools = tuple(tool if tool.is_strict else _without_limits(tool) for tool in self.tools)
        try:
            return self._compiled(compiler, tools, text_rule)
        except UsageError as error:
            for tool in tools:
                self._check_alone(compiler, tool)
            message = f"The schemas of these {len(tools)} tools together cannot be enforced: {_reason(error)}"
            raise UsageError(message, hint="send fewer tools, or simpler ones") from error

    def _compiled(
        self, compiler: GrammarCompiler, tools: Sequence[Tool], text_rule: str | None
    ) -> Enforcement:
        grammar = Grammar("lark", self._lark(tools, text_rule) or "")
        has_warnings = compiler.start(grammar).has_warnings
        loose = [
            tool.name
            for tool, own in zip(tools, self.tools, strict=True)
            if tool != own or not self.format.holds_text(own) or (has_warnings and not check_arguments(own))
        ]
        return Enforcement(grammar, tuple(loose))

    def _simplified(self, tool: Tool) -> Tool:
        """The tool as it is, where a grammar understands its schema, or without limits on its values."""
        try:
            check_arguments(tool)
            return tool
        except UsageError as error:
            if tool.is_strict:
                raise _named(tool, error) from error
        try:
            check_arguments(_without_limits(tool))
        except UsageError as error:
            raise _named(tool, error) from error
        return _without_limits(tool)

    def _check_alone(self, compiler: GrammarCompiler, tool: Tool) -> None:
        try:
            compiler.start(Grammar("lark", f"start: calls\n{self.format.calls([tool], self.marks, 1)}\n"))
        except UsageError as error:
            raise _named(tool, error) from error

    def _lark(self, tools: Sequence[Tool], text_rule: str | None) -> str | None:
        most = self.format.most_calls if self.is_parallel else 1
        calls = self.format.calls(tools, self.marks, most)
        if self.choice == "required":
            return f"start: calls\n{calls}\n"
        if text_rule is not None:
            text = self.format.text_rule(self.marks, text_rule)
            return f"start: calls | text\ntext: {text}\n{calls}\n"
        answer = self.format.text_then_calls(self.marks, most)
        return None if answer is None else f"start: answer\n{answer}\n{calls}\n"


def _without_limits(tool: Tool) -> Tool:
    return replace(tool, parameters=drop_limits(dict(tool.parameters)))


def _reason(error: UsageError) -> str:
    return error.message.removeprefix("The grammar cannot be used: ")


def _named(tool: Tool, error: UsageError) -> UsageError:
    message = f"The schema of the tool {tool.name!r} cannot be enforced: {_reason(error)}"
    return UsageError(message, hint="simplify it, or leave strict out" if tool.is_strict else "simplify it")


def plan_tools(
    codec: TextCodec,
    tools: Sequence[Tool],
    *,
    choice: Choice = "auto",
    named: str | None = None,
    is_parallel: bool = True,
) -> ToolPlan:
    """`named` is the only tool that may be called, and must be. Takes a moment when a model is asked first."""
    call_format = detect_format(codec.chat_template_source(has_tools=True))
    marks = Marks(codec.vocabulary(), call_format.marks)
    if named is not None:
        tools, choice, is_parallel = [tool for tool in tools if tool.name == named], "required", False
    return ToolPlan(tuple(tools), choice, call_format, marks, is_parallel)


class ChatEncoder(Protocol):
    """What makes prompts of messages: a `TextCodec`, or something around one."""

    def chat_template_source(self, *, has_tools: bool = False) -> str | None: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, context_length: int | None = None, **options: Any
    ) -> list[int]: ...


def encode_with_tools(
    codec: ChatEncoder,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    *,
    add_generation_prompt: bool = True,
    context_length: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt for messages that may hold calls and results, of a model that is told of these tools. `variables` are
    the request's own, for the template."""
    call_format = detect_format(codec.chat_template_source(has_tools=bool(tools)))
    options: dict[str, Any] = {"variables": variables} if variables else {}
    encode = partial(_encode, codec, add_generation_prompt, context_length, options)
    if call_format.has_own_template:
        described = [tool.described() for tool in tools]
        options |= {"tools": described} if tools else {}
        messages = _with_known_ids(messages, call_format)
        return encode(messages)
    if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return encode(messages)
    told = explain(messages, tools)
    try:
        return encode(told)
    except PromptTooLongError:
        raise
    except UsageError:
        # Some templates know no system messages.
        if messages[0]["role"] == "system" or told[0]["role"] != "system":
            raise
        told = explain(messages, tools, has_system_role=False)
        return encode(told)


def _encode(
    codec: ChatEncoder,
    add_generation_prompt: bool,
    context_length: int | None,
    options: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
) -> list[int]:
    return codec.encode_chat(
        messages, add_generation_prompt=add_generation_prompt, context_length=context_length, **options
    )


def _with_known_ids(
    messages: Sequence[Mapping[str, Any]], call_format: CallFormat
) -> list[Mapping[str, Any]]:
    """The messages, with names of calls that the template takes."""
    known: dict[str, str] = {}
    renamed: list[Mapping[str, Any]] = []
    for message in messages:
        changed: dict[str, Any] = {}
        if "tool_calls" in message:
            for call in message["tool_calls"]:
                own = call_format.call_id(call["function"]["name"], len(known))
                known[call["id"]] = own or call_format.known_id(call["id"])
            changed["tool_calls"] = [{**call, "id": known[call["id"]]} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            given = message["tool_call_id"]
            changed["tool_call_id"] = known.get(given) or call_format.known_id(given)
        renamed.append({**message, **changed})
    return renamed
