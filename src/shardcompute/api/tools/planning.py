"""Tool call planning: from the tools of a request to the prompt, the grammar and the parser of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardcompute.api.tools.call_format import (
    ArgumentsRule,
    CallFormat,
    Marks,
    Tool,
    any_arguments,
    lenient_arguments,
)
from shardcompute.api.tools.detection import detect_format
from shardcompute.api.tools.events import CallReader
from shardcompute.api.tools.generic import explain
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Grammar
from shardcompute.decoding import compiler_of
from shardcompute.node.service import TextCodec

Choice = Literal["auto", "required"]


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

    def grammar(self, codec: TextCodec, text_rule: str | None = None) -> Grammar | None:
        """What holds answers to the format: always where a call is required, otherwise where it can be done without
        holding free text to anything. `text_rule` is the right side of the Lark rule for an answer that is no call.

        A schema that is too much for a grammar is let go, unless its tool is strict: then UsageError.
        """
        compiler = compiler_of(codec.vocabulary())
        for arguments in (lenient_arguments, any_arguments):
            lark = self._lark(arguments, text_rule)
            if lark is None:
                return None
            grammar = Grammar("lark", lark)
            try:
                compiler.start(grammar)
            except UsageError:
                if arguments is any_arguments and (self.choice == "required" or text_rule is not None):
                    raise
                continue
            return grammar
        return None

    def _lark(self, arguments: ArgumentsRule, text_rule: str | None) -> str | None:
        most = self.format.most_calls if self.is_parallel else 1
        calls = self.format.calls(self.tools, self.marks, most, arguments)
        if self.choice == "required":
            return f"start: calls\n{calls}\n"
        if text_rule is not None:
            return f"start: calls | text\ntext: {text_rule}\n{calls}\n"
        answer = self.format.text_then_calls(self.marks, most)
        return None if answer is None else f"start: answer\n{answer}\n{calls}\n"


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


def encode_with_tools(
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The prompt for messages that may hold calls and results, of a model that is told of these tools."""
    call_format = detect_format(codec.chat_template_source(has_tools=bool(tools)))
    if call_format.has_own_template:
        described = [tool.described() for tool in tools]
        options: dict[str, Any] = {"tools": described} if tools else {}
        messages = [_with_known_ids(message, call_format) for message in messages]
        return codec.encode_chat(messages, add_generation_prompt=add_generation_prompt, **options)
    if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return codec.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    told = explain(messages, tools)
    try:
        return codec.encode_chat(told, add_generation_prompt=add_generation_prompt)
    except UsageError:
        # Some templates know no system messages.
        if messages[0]["role"] == "system" or told[0]["role"] != "system":
            raise
        told = explain(messages, tools, has_system_role=False)
        return codec.encode_chat(told, add_generation_prompt=add_generation_prompt)


def _with_known_ids(message: Mapping[str, Any], call_format: CallFormat) -> dict[str, Any]:
    renamed = dict(message)
    if "tool_call_id" in message:
        renamed["tool_call_id"] = call_format.known_id(message["tool_call_id"])
    if "tool_calls" in message:
        calls = message["tool_calls"]
        renamed["tool_calls"] = [{**call, "id": call_format.known_id(call["id"])} for call in calls]
    return renamed
