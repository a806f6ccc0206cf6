"""OpenAI's chat completions: messages in, an assistant's message out, whole or in chunks.

`open_chat` is the one way from a request to its generations: other dialects translate to it and from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.body import read_body
from shardcompute.api.context import context_of, request_id_of, run_codec
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.answer import answer, fingerprint, timings_of, usage_of, wants_usage
from shardcompute.api.generation.chat_prompt import encode_messages
from shardcompute.api.generation.chat_words import ChatWords
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.logprobs import chat_logprobs
from shardcompute.api.generation.parameters import Plan, choose_model, plan_generations, refuse_unsupported
from shardcompute.api.generation.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Usage,
)
from shardcompute.api.generation.schemas import ChatCompletionRequest, NamedTool, ToolDefinition
from shardcompute.api.generation.structured import check_grammar, refused_grammar, wanted_form
from shardcompute.api.tools import Tool, ToolPlan, plan_tools
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Delta, Grammar
from shardcompute.decoding import rule_of
from shardcompute.node.service import TextCodec


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A conversation ready to be answered, whichever dialect it was asked in."""

    body: ChatCompletionRequest
    plan: Plan
    dialect: ChatDialect


async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    chat = await open_chat(request, await read_body(request, ChatCompletionRequest, context.limits))
    return await answer(request, context, chat.body, chat.plan, chat.dialect)


async def open_chat(request: Request, body: ChatCompletionRequest, text: str | None = None) -> ChatPlan:
    """Everything up to the first token: checks, the prompt, and how the answer will be worded.

    `text`, where given, is the prompt as it is, in the place of the messages.
    """
    context = context_of(request)
    refuse_unsupported(body)
    _refuse_what_chat_lacks(body)
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    tools = await _offer_tools(body, codec)
    grammar = await _hold_to_form(body, codec, tools)
    if text is not None:
        prompt = await run_codec(lambda: codec.encode(text), characters=len(text))
    else:
        prompt = await encode_messages(
            codec,
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=() if tools is None else _tools(body),
        )
    plan = plan_generations(
        model,
        codec,
        body,
        [prompt],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_param="messages",
        limits=context.limits,
        grammar=grammar,
        shown_ids=frozenset() if tools is None else tools.marks.shown_ids,
    )
    dialect = ChatDialect(
        plan,
        tools,
        reply_id=f"chatcmpl-{request_id_of(request)}",
        created_s=int(context.wall_clock()),
        has_logprobs=bool(body.logprobs),
        has_usage=wants_usage(body),
    )
    return ChatPlan(body, plan, dialect)


class ChatDialect:
    """Words outcomes as chat completions."""

    def __init__(
        self,
        plan: Plan,
        tools: ToolPlan | None,
        *,
        reply_id: str,
        created_s: int,
        has_logprobs: bool,
        has_usage: bool,
    ) -> None:
        self._plan = plan
        self._words = [ChatWords(tools) for _ in plan.requests]
        self._id = reply_id
        self._created_s = created_s
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterable[ChatChunk]:
        finish = outcomes[index].finish
        logprobs = (
            chat_logprobs(self._plan.codec, delta.tokens) if self._has_logprobs and delta.tokens else None
        )
        worded = self._words[index].push(
            delta.text, is_over=finish is not None, must_speak=logprobs is not None
        )
        for left, each in zip(range(len(worded) - 1, -1, -1), worded, strict=True):
            choice = ChatChunkChoice(
                index=index, delta=each, logprobs=None if left else logprobs, finish_reason=None
            )
            yield self._frame([choice])
        if finish is not None:
            reason = _reason(self._words[index], outcomes[index])
            choice = ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=reason)
            is_last = all(outcome.finish for outcome in outcomes)
            yield self._frame([choice], outcomes=outcomes if is_last else ())

    def closing(self, outcomes: list[Outcome]) -> Iterable[ChatChunk]:
        if self._has_usage:
            yield self._frame([], usage=usage_of(self._plan, outcomes))

    def whole(self, outcomes: list[Outcome]) -> ChatCompletion:
        timings = timings_of(outcomes)
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created_s,
            model=self._plan.model.name,
            system_fingerprint=fingerprint(),
            choices=[self._choice(index, outcome) for index, outcome in enumerate(outcomes)],
            usage=usage_of(self._plan, outcomes),
            **({} if timings is None else {"timings": timings}),
        )

    def _choice(self, index: int, outcome: Outcome) -> ChatChoice:
        words = self._words[index]
        words.push(outcome.text, is_over=True)
        return ChatChoice(
            index=index,
            message=words.message(),
            logprobs=chat_logprobs(self._plan.codec, outcome.tokens) if self._has_logprobs else None,
            finish_reason=_reason(words, outcome),
        )

    def _frame(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | None = None,
        outcomes: Sequence[Outcome] = (),
    ) -> ChatChunk:
        extra: dict[str, Any] = {"usage": usage} if self._has_usage else {}
        timings = timings_of(outcomes)
        if timings is not None:
            extra["timings"] = timings
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created_s,
            model=self._plan.model.name,
            system_fingerprint=fingerprint(),
            choices=choices,
            **extra,
        )


def _reason(words: ChatWords, outcome: Outcome) -> Literal["stop", "length", "tool_calls"]:
    assert outcome.finish is not None
    return "tool_calls" if outcome.finish == "stop" and words.has_calls else outcome.finish


async def _hold_to_form(
    body: ChatCompletionRequest, codec: TextCodec, tools: ToolPlan | None
) -> Grammar | None:
    """The grammar that the answer must follow, proven to work."""
    form = wanted_form(body)
    if tools is not None and body.ignore_eos and tools.choice == "required":
        message = "An answer that must be a call ends where the call does."
        raise RequestError(message, hint="leave ignore_eos out", param="ignore_eos", code="invalid_value")
    if form is not None:
        await check_grammar(codec, form[1], form[0])
    if tools is None or (body.ignore_eos and form is None):
        return None if form is None else form[1]
    text_rule = None if form is None else rule_of(form[1])
    try:
        return await asyncio.to_thread(tools.grammar, codec, text_rule)
    except UsageError as error:
        raise refused_grammar(error, "tools") from error


async def _offer_tools(body: ChatCompletionRequest, codec: TextCodec) -> ToolPlan | None:
    """What the model may call; None where it may call nothing."""
    choice = body.tool_choice or "auto"
    if isinstance(choice, NamedTool) and (choice.type != "function" or choice.function is None):
        message = f"A tool choice of type {choice.type!r} is not supported."
        raise unsupported("tool_choice", message, hint='use "none", "auto", "required" or name a function')
    tools = _tools(body)
    if not tools or choice == "none":
        if choice in ("none", "auto"):
            return None
        message = "tool_choice asks for a call, but there are no tools."
        raise RequestError(message, hint="send tools", param="tool_choice", code="invalid_value")
    named = choice.function.name if isinstance(choice, NamedTool) and choice.function is not None else None
    if named is not None and named not in {tool.name for tool in tools}:
        message = f"tool_choice names {named!r}, which is none of the tools."
        raise RequestError(message, hint="name one of them", param="tool_choice", code="invalid_value")
    return await asyncio.to_thread(
        lambda: plan_tools(
            codec,
            tools,
            choice="required" if choice == "required" else "auto",
            named=named,
            is_parallel=body.parallel_tool_calls is not False,
        )
    )


def _tools(body: ChatCompletionRequest) -> list[Tool]:
    tools = [_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())]
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("Two tools have the same name.", param="tools", code="invalid_value")
    return tools


def _tool(given: ToolDefinition, where: str) -> Tool:
    if given.type != "function":
        message = f"A tool of type {given.type!r} is not supported."
        raise unsupported(f"{where}.type", message, hint="send functions of your own")
    function = given.function
    if function is None:
        raise RequestError(f"{where}.function is missing.", param=f"{where}.function", code="invalid_value")
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def _refuse_what_chat_lacks(body: ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    if None not in (lengths := {body.max_tokens, body.max_completion_tokens}) and len(lengths) > 1:
        message = "max_tokens and max_completion_tokens contradict each other."
        raise RequestError(message, hint="send one of them", param="max_completion_tokens")
