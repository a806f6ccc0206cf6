"""Choices of a chat, whole and in deltas: what every protocol's adapter translates, in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from shardcompute.api.body import ReplyBody


class RankedToken(ReplyBody):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(ReplyBody):
    content: list[ChosenToken]


class CalledFunction(ReplyBody):
    name: str
    arguments: str


class CalledTool(ReplyBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ReplyBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(ReplyBody):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class CalledFunctionDelta(ReplyBody):
    name: str | None = None
    arguments: str | None = None


class CalledToolDelta(ReplyBody):
    """The first of a call has its id and its function's name, the others pieces of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta | None = None


class ChatDelta(ReplyBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledToolDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChunkChoice(ReplyBody):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
