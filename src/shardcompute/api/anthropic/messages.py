"""Anthropic's messages: requests translated to a chat, and its choices to content blocks and named SSE events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.anthropic.schemas import (
    ContentBlock,
    CountRequest,
    ImageSource,
    InputDelta,
    InputMessage,
    MessageEnd,
    MessageEvent,
    MessageReply,
    MessagesError,
    MessagesRequest,
    MessagesUsage,
    MessageTool,
    OutputConfig,
    ReplyBlock,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    Thinking,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolChoice,
    ToolUseBlock,
)
from shardcompute.api.body import AnyReply, ReplyBody, json_response, read_body, required
from shardcompute.api.context import context_of, request_id_of
from shardcompute.api.errors import MESSAGES_PATH, RequestError, shape_error, unsupported
from shardcompute.api.generation.answer import answer
from shardcompute.api.generation.chat import ChatPlan
from shardcompute.api.generation.chat_prompt import refused_part, unknown_call
from shardcompute.api.generation.conversation import ChatAdapter, limit, open_conversation, read_calls
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.parameters import Plan, refuse_unsupported
from shardcompute.api.generation.replies import ChatChoice, ChatChunkChoice
from shardcompute.api.generation.schemas import SAMPLING_FIELDS
from shardcompute.api.images.sources import chat_part, data_url
from shardcompute.api.openapi import BODY_ERRORS, GENERATION_ERRORS, ApiRoute
from shardcompute.api.sse import MEDIA_TYPE, event

_SWITCH = {"enabled": True, "disabled": False}
_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(request: Request) -> Response:
    body = await read_body(request, MessagesRequest, context_of(request).chat_limits)
    refuse_unsupported(body)
    chat = await open_conversation(
        request,
        _prompt_fields(body)
        | _extra_sampling(body)
        | {
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "response_format": _response_format(body.output_config),
            "reasoning_effort": None if body.output_config is None else body.output_config.effort,
        },
    )
    chat = limit(chat, body.max_tokens)
    adapter = MessagesAdapter(chat, f"msg_{request_id_of(request)}")
    return await answer(request, chat.plan, adapter, MessagesFraming(), is_stream=bool(body.stream))


async def count_message_tokens(request: Request) -> Response:
    body = await read_body(request, CountRequest, context_of(request).chat_limits)
    chat = await open_conversation(request, _prompt_fields(body))
    return json_response(TokenCount(input_tokens=chat.plan.prompt_tokens))


class MessagesFraming:
    """SSE events with names, and nothing at the end."""

    media_type = MEDIA_TYPE
    ping = event(b'{"type":"ping"}', "ping")
    ending = b""

    def write(self, chunk: AnyReply) -> bytes:
        assert isinstance(chunk, MessageEvent)
        return event(chunk.to_json(), chunk.type)

    def write_error(self, error: Exception, request_id: str) -> bytes:
        body = shape_error(error, request_id=request_id, path=MESSAGES_PATH)
        return event(json.dumps(body).encode(), "error")


class MessagesAdapter(ChatAdapter):
    """Words a chat as a message of content blocks: thinking, text, then one block for each tool call."""

    def __init__(self, chat: ChatPlan, message_id: str) -> None:
        super().__init__(chat)
        self._id = message_id
        self._blocks = 0
        self._is_in_text = False
        self._is_in_block = False
        self._thought: list[str] | None = None
        """Of the block of thinking under way."""

    def opening(self) -> Iterable[ReplyBody]:
        # How much of the prompt was still known shows later; the usage at the end, which replaces this one, has it.
        yield MessageEvent(
            type="message_start", message=self._message([], None, None, self._usage(Outcome()))
        )

    def translate(self, choice: ChatChunkChoice, outcome: Outcome) -> Iterator[ReplyBody]:
        if choice.delta.reasoning_content:
            if self._thought is None:
                yield from self._start(ThinkingBlock(type="thinking", thinking="", signature=""))
                self._thought = []
            self._thought.append(choice.delta.reasoning_content)
            yield self._delta(ThinkingDelta(type="thinking_delta", thinking=choice.delta.reasoning_content))
        if choice.delta.content:
            if not self._is_in_text:
                yield from self._start(TextBlock(type="text", text=""))
            yield self._delta(TextDelta(type="text_delta", text=choice.delta.content))
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                name = (call.function.name if call.function is not None else None) or ""
                yield from self._start(ToolUseBlock(type="tool_use", id=call.id, name=name, input={}))
            if call.function is not None and call.function.arguments:
                yield self._delta(InputDelta(type="input_json_delta", partial_json=call.function.arguments))
        if choice.finish_reason is not None:
            yield from self._stop()
            reason, stop = self._ending(choice.finish_reason, outcome)
            yield MessageEvent(
                type="message_delta",
                delta=MessageEnd(stop_reason=reason, stop_sequence=stop),
                usage=self._usage(outcome),
            )
            yield MessageEvent(type="message_stop")

    def translate_whole(self, choice: ChatChoice, outcome: Outcome) -> ReplyBody:
        finish = choice.finish_reason
        calls, others = read_calls(choice.message.tool_calls or (), is_cut=finish == "length")
        texts = [text for text in (choice.message.content, others) if text]
        thought = choice.message.reasoning_content
        content: list[ReplyBlock] = []
        if thought:
            content.append(ThinkingBlock(type="thinking", thinking=thought, signature=_signature(thought)))
        content += [TextBlock(type="text", text=text) for text in texts]
        content += [
            ToolUseBlock(type="tool_use", id=call.id, name=call.name, input=call.arguments) for call in calls
        ]
        ended_by = "stop" if finish == "tool_calls" and not calls else finish
        return self._message(content, *self._ending(ended_by, outcome), self._usage(outcome))

    def _message(
        self,
        content: list[ReplyBlock],
        reason: StopReason | None,
        stop: str | None,
        usage: MessagesUsage,
    ) -> MessageReply:
        return MessageReply(
            id=self._id,
            type="message",
            role="assistant",
            model=self.plan.model.name,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=usage,
        )

    def _usage(self, outcome: Outcome) -> MessagesUsage:
        cached = 0 if outcome.timings is None else outcome.timings.cached_tokens
        return MessagesUsage(
            input_tokens=self.plan.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=len(outcome.tokens),
        )

    def _ending(self, finish: str, outcome: Outcome) -> tuple[StopReason, str | None]:
        stop = _matched_stop(self.plan, outcome) if finish == "stop" else None
        return ("stop_sequence", stop) if stop is not None else (_REASONS[finish], None)

    def _start(self, block: ReplyBlock) -> Iterator[ReplyBody]:
        yield from self._stop()
        self._is_in_block, self._is_in_text = True, isinstance(block, TextBlock)
        yield MessageEvent(type="content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._blocks, delta=delta)

    def _stop(self) -> Iterator[ReplyBody]:
        if self._thought is not None:
            signature = _signature("".join(self._thought))
            yield self._delta(SignatureDelta(type="signature_delta", signature=signature))
            self._thought = None
        if self._is_in_block:
            yield MessageEvent(type="content_block_stop", index=self._blocks)
            self._blocks += 1
        self._is_in_block = self._is_in_text = False


def _signature(thought: str) -> str:
    return hashlib.sha256(thought.encode(errors="replace")).hexdigest()


def _extra_sampling(body: MessagesRequest) -> dict[str, Any]:
    """Parameters that Anthropic does not have and the other protocols do."""
    extra = body.model_extra or {}
    if extra.get("stop"):
        raise unsupported("stop", "Messages have no parameter stop.", hint="use stop_sequences")
    return {name: extra[name] for name in SAMPLING_FIELDS & extra.keys()}


def _prompt_fields(body: CountRequest) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    called: set[str] = set()
    for index, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{index}]", called)
    if body.messages[-1].role == "assistant":
        reason = "A conversation that ends with the assistant's words cannot be continued from there."
        raise unsupported("messages", reason, hint="end it with a message of the user")
    return {
        "model": body.model,
        "messages": messages,
        "tools": [_chat_tool(tool, index) for index, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": None if body.tool_choice is None else _chat_tool_choice(body.tool_choice),
        "parallel_tool_calls": None
        if body.tool_choice is None or body.tool_choice.disable_parallel_tool_use is None
        else not body.tool_choice.disable_parallel_tool_use,
        **_thinking_fields(body.thinking),
    }


def _thinking_fields(asked: Thinking | None) -> dict[str, Any]:
    if asked is None:
        return {}
    return {"thinks": _SWITCH.get(asked.type), "thinking_budget": asked.budget_tokens}


def _chat_messages(message: InputMessage, where: str, called: set[str]) -> list[dict[str, Any]]:
    """A message's results of tools are messages of their own in chat, and come before its text. `called` are the calls
    so far."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[ContentBlock] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        param = f"{where}.content[{index}]"
        if block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            called.add(required(block.id, f"{param}.id"))
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            result = _content(block.content or "", f"{param}.content")
            call_id = required(block.tool_use_id, f"{param}.tool_use_id")
            if call_id not in called:
                raise unknown_call(call_id, f"{param}.tool_use_id")
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(block)
    own: dict[str, Any] = {"role": message.role, "content": _content(texts, f"{where}.content")}
    if thoughts and message.role == "assistant":
        own["reasoning_content"] = "\n".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or not results else results


def _content(content: str | Sequence[ContentBlock], where: str) -> str | list[dict[str, Any]]:
    """Text alone, or the parts of a chat's message where there are images among it."""
    if isinstance(content, str) or all(block.type != "image" for block in content):
        return _text(content, where)
    return [
        chat_part(_image_url(block.source, where), f"{where}[{index}]")
        if block.type == "image"
        else {"type": "text", "text": _text([block], where)}
        for index, block in enumerate(content)
    ]


def _image_url(source: ImageSource | None, where: str) -> str:
    if source is None or source.type not in ("base64", "url"):
        message = f"An image of {where} has no source of type base64 or url."
        raise unsupported(where, message, hint="send it as base64")
    if source.type == "url":
        return required(source.url, f"{where}.source.url")
    return data_url(required(source.data, f"{where}.source.data"), source.media_type or "image/*")


def _text(content: str | Sequence[ContentBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise refused_part(block.type, where)
        if block.text is None:
            raise RequestError(f"A block of {where} has no text.", param=where, code="invalid_value")
    return "\n".join(block.text or "" for block in content)


def _chat_tool(tool: MessageTool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"The tool {tool.type!r} would have to run on the server, and none does."
        raise unsupported(f"tools[{index}]", message, hint="send tools of your own")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": required(choice.name, "tool_choice.name")}}
    return {"any": "required"}.get(choice.type, choice.type)


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    schema = {"name": "answer", "schema": config.format.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _matched_stop(plan: Plan, outcome: Outcome) -> str | None:
    """The stop string that ended an answer; None when it ended by itself or was cut off."""
    request = plan.requests[0]
    is_silent = bool(outcome.tokens) and outcome.tokens[-1].id in request.stop_ids
    if outcome.finish != "stop" or is_silent or not request.stop:
        return None
    written = plan.codec.decode([choice.id for choice in outcome.tokens])
    behind = written[len(outcome.text) :]
    return next(
        (stop for stop in sorted(request.stop, key=len, reverse=True) if behind.startswith(stop)),
        request.stop[0],
    )


MESSAGES_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        MESSAGES_PATH,
        create_message,
        "Answer a conversation (Anthropic's shape).",
        needs=Access.USE,
        body=MessagesRequest,
        reply=MessageReply,
        chunk=MessageEvent,
        error=MessagesError,
        statuses=GENERATION_ERRORS,
    ),
    ApiRoute(
        "POST",
        f"{MESSAGES_PATH}/count_tokens",
        count_message_tokens,
        "How many tokens a conversation takes.",
        needs=Access.USE,
        body=CountRequest,
        reply=TokenCount,
        error=MessagesError,
        statuses=BODY_ERRORS,
    ),
)
