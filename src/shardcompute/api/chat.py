"""OpenAI's chat completions: messages in, an assistant's message out, whole or in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.answer import answer, fingerprint, timings_of, usage_of, wants_usage
from shardcompute.api.context import context_of, request_id_of, run_codec
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generations import Outcome
from shardcompute.api.limits import read_body
from shardcompute.api.logprobs import chat_logprobs
from shardcompute.api.parameters import Plan, choose_model, plan_generations, refuse_unsupported
from shardcompute.api.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ReplyBody,
    Usage,
)
from shardcompute.api.schemas import ChatCompletionRequest, ChatMessage, ContentPart
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Delta
from shardcompute.node.service import TextCodec


async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest, context.limits)
    refuse_unsupported(body)
    _refuse_what_chat_lacks(body)
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    prompt = await encode_messages(
        codec, body.messages, add_generation_prompt=body.add_generation_prompt is not False
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
    )
    dialect = ChatDialect(
        plan,
        reply_id=f"chatcmpl-{request_id_of(request)}",
        created_s=int(context.wall_clock()),
        has_logprobs=bool(body.logprobs),
        has_usage=wants_usage(body),
    )
    return await answer(request, context, body, plan, dialect)


async def encode_messages(
    codec: TextCodec, messages: Sequence[ChatMessage], *, add_generation_prompt: bool
) -> list[int]:
    """The prompt that the model's chat template makes of the messages."""
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    characters = sum(len(message["content"]) for message in plain)
    try:
        return await run_codec(
            lambda: codec.encode_chat(plain, add_generation_prompt=add_generation_prompt),
            characters=characters,
        )
    except UsageError as error:
        raise RequestError(error.message, hint=error.hint, param="messages", code="invalid_value") from error


class ChatDialect:
    """Words outcomes as chat completions."""

    def __init__(
        self, plan: Plan, *, reply_id: str, created_s: int, has_logprobs: bool, has_usage: bool
    ) -> None:
        self._plan = plan
        self._id = reply_id
        self._created_s = created_s
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage
        self._opened: set[int] = set()

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterable[ReplyBody]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._chunk(index, ChatDelta(role="assistant", content=""))
        logprobs = (
            chat_logprobs(self._plan.codec, delta.tokens) if self._has_logprobs and delta.tokens else None
        )
        if delta.text or logprobs is not None:
            choice = ChatChunkChoice(
                index=index, delta=ChatDelta(content=delta.text), logprobs=logprobs, finish_reason=None
            )
            yield self._frame([choice])
        finish = outcomes[index].finish
        if finish is not None:
            choice = ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=finish)
            is_last = all(outcome.finish for outcome in outcomes)
            yield self._frame([choice], outcomes=outcomes if is_last else ())

    def closing(self, outcomes: list[Outcome]) -> Iterable[ReplyBody]:
        if self._has_usage:
            yield self._frame([], usage=usage_of(self._plan, outcomes))

    def whole(self, outcomes: list[Outcome]) -> ReplyBody:
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
        assert outcome.finish is not None
        return ChatChoice(
            index=index,
            message=AssistantMessage(role="assistant", content=outcome.text, refusal=None),
            logprobs=chat_logprobs(self._plan.codec, outcome.tokens) if self._has_logprobs else None,
            finish_reason=outcome.finish,
        )

    def _chunk(self, index: int, delta: ChatDelta) -> ChatChunk:
        return self._frame([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

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


def _refuse_what_chat_lacks(body: ChatCompletionRequest) -> None:
    if body.tools and body.tool_choice != "none":
        raise unsupported(
            "tools", "Tool calls are not supported.", hint='leave tools out or set tool_choice "none"'
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported(
            "tool_choice", "Tool calls are not supported.", hint='leave it out or set it to "none"'
        )
    if body.response_format is not None and body.response_format.type != "text":
        message = f"The response format {body.response_format.type!r} is not supported."
        raise unsupported("response_format", message, hint='only {"type": "text"} is')
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    if None not in (lengths := {body.max_tokens, body.max_completion_tokens}) and len(lengths) > 1:
        message = "max_tokens and max_completion_tokens contradict each other."
        raise RequestError(message, hint="send one of them", param="max_completion_tokens")


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """The message as chat templates expect it: text content, `system` for `developer`, parsed arguments."""
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, where),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        param = f"{where}.content[{index}]"
        if part.type != "text":
            raise unsupported(
                param, f"Content of type {part.type!r} is not supported.", hint="send text only"
            )
        if part.text is None:
            raise RequestError(f"{param} has no text.", param=param, code="invalid_value")
    return "\n".join(part.text or "" for part in content)


def _arguments(text: str) -> Any:
    """Templates write arguments out as JSON themselves, so they want them parsed where they can be."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
