"""Ollama's chat and generate: requests translated to a chat, and its choices to lines of JSON.

Answers stream as lines of JSON unless `stream` is false. Defaults are Ollama's (temperature 0.8, top_k 40, top_p
0.9), except that nothing is penalised for being repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import AnyReply, ReplyBody, json_response, read_body
from shardcompute.api.context import context_of
from shardcompute.api.errors import OLLAMA_PATH, shape_error, unsupported
from shardcompute.api.generation.answer import answer
from shardcompute.api.generation.chat import ChatPlan
from shardcompute.api.generation.conversation import (
    ChatAdapter,
    ReadCall,
    limit,
    open_conversation,
    read_calls,
)
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.parameters import choose_model
from shardcompute.api.generation.replies import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
)
from shardcompute.api.images.sources import chat_part, data_url
from shardcompute.api.ollama.models import written_time
from shardcompute.api.ollama.schemas import (
    OllamaChatReply,
    OllamaChatRequest,
    OllamaError,
    OllamaFunction,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaReplyMessage,
    OllamaRequest,
    Options,
)
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute

NDJSON = "application/x-ndjson"
_NEUTRAL = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}


async def ollama_chat(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, OllamaChatRequest, context.chat_limits, needs_json_type=False)
    created_at = written_time(context.wall_clock())
    if not body.messages:
        return _loaded(request, body, created_at, is_chat=True)
    messages = list(_chat_messages(body.messages))
    fields = _fields(body) | {"messages": messages, "tools": body.tools or None}
    chat = limit(await open_conversation(request, fields), _most_tokens(body))
    adapter = OllamaAdapter(chat, created_at, is_chat=True)
    framing = NdjsonFraming(adapter.idle_chunk())
    return await answer(request, chat.plan, adapter, framing, is_stream=body.stream is not False)


async def ollama_generate(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, OllamaGenerateRequest, context.chat_limits, needs_json_type=False)
    for name in ("suffix", "template", "context"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported.")
    if body.images and body.raw:
        message = "A raw prompt has no place for images."
        raise unsupported("images", message, hint="leave raw out: the model's template has such a place")
    created_at = written_time(context.wall_clock())
    if not body.prompt:
        return _loaded(request, body, created_at, is_chat=False)
    messages = [{"role": "user", "content": _with_images(body.prompt, body.images, "images")}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    fields = _fields(body) | {"messages": messages}
    text = body.prompt if body.raw else None
    chat = await open_conversation(request, fields, text, prompt_param="prompt")
    chat = limit(chat, _most_tokens(body))
    adapter = OllamaAdapter(chat, created_at, is_chat=False)
    framing = NdjsonFraming(adapter.idle_chunk())
    return await answer(request, chat.plan, adapter, framing, is_stream=body.stream is not False)


class NdjsonFraming:
    """One JSON object in each line; `idle` is what shows that a silent stream lives."""

    media_type = NDJSON
    ending = b""

    def __init__(self, idle: ReplyBody) -> None:
        self.ping = self.write(idle)

    def write(self, chunk: AnyReply) -> bytes:
        return chunk.to_json() + b"\n"

    def write_error(self, error: Exception, request_id: str) -> bytes:
        return json.dumps(shape_error(error, request_id=request_id, path=OLLAMA_PATH)).encode() + b"\n"


class OllamaAdapter(ChatAdapter):
    """Words a chat as messages (`/api/chat`) or as bare text (`/api/generate`)."""

    def __init__(self, chat: ChatPlan, created_at: str, *, is_chat: bool) -> None:
        super().__init__(chat)
        self._created_at = created_at
        self._is_chat = is_chat
        self._calls: list[CalledTool] = []
        """Ollama tells calls whole."""

    def idle_chunk(self) -> ReplyBody:
        """A piece that brings nothing."""
        return self._piece("", (), done=False)

    def translate(self, choice: ChatChunkChoice, outcome: Outcome) -> Iterator[ReplyBody]:
        thought = choice.delta.reasoning_content or ""
        if choice.delta.content or thought or choice.logprobs is not None:
            text = choice.delta.content or ""
            yield self._piece(text, (), done=False, thought=thought, logprobs=choice.logprobs)
        for call in choice.delta.tool_calls or ():
            function = call.function
            if function is None:
                continue
            if call.id is not None:
                begun = CalledFunction(name=function.name or "", arguments="")
                self._calls.append(CalledTool(id=call.id, type="function", function=begun))
            if function.arguments and self._calls:
                last = self._calls.pop()
                arguments = last.function.arguments + function.arguments
                grown = last.function.model_copy(update={"arguments": arguments})
                self._calls.append(last.model_copy(update={"function": grown}))
        if choice.finish_reason is not None:
            calls, others = read_calls(self._calls, is_cut=choice.finish_reason == "length")
            if calls or others:
                yield self._piece(others, calls, done=False)
            yield self._piece("", (), done=True, **_ending(self._reason(choice.finish_reason), outcome))

    def translate_whole(self, choice: ChatChoice, outcome: Outcome) -> ReplyBody:
        is_cut = choice.finish_reason == "length"
        calls, others = read_calls(choice.message.tool_calls or (), is_cut=is_cut)
        ending = _ending(self._reason(choice.finish_reason), outcome)
        text = (choice.message.content or "") + others
        thought = choice.message.reasoning_content or ""
        return self._piece(text, calls, done=True, thought=thought, logprobs=choice.logprobs, **ending)

    def _reason(self, finish: str) -> str:
        return "length" if finish == "length" else "stop"

    def _piece(
        self,
        text: str,
        calls: Sequence[ReadCall],
        *,
        done: bool,
        thought: str = "",
        logprobs: ChatLogprobs | None = None,
        **ending: Any,
    ) -> ReplyBody:
        if logprobs is not None:
            ending["logprobs"] = [token.model_dump() for token in logprobs.content]
        kept = {"model": self.plan.model.name, "created_at": self._created_at, "done": done, **ending}
        thinking: dict[str, Any] = {"thinking": thought} if thought else {}
        if not self._is_chat:
            return OllamaGenerateReply(response=text, **thinking, **kept)
        message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return OllamaChatReply(message=OllamaReplyMessage(**message), **kept)


def _ending(reason: str, outcome: Outcome) -> dict[str, Any]:
    """Why and after how long it ended, in nanoseconds."""
    ending: dict[str, Any] = {"done_reason": reason, "eval_count": len(outcome.tokens)}
    timings = outcome.timings
    if timings is not None:
        ending |= {
            "total_duration": _nanoseconds(timings.queue_s + timings.prefill_s + timings.decode_s),
            "load_duration": 0,
            "prompt_eval_count": timings.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.prefill_s),
            "eval_duration": _nanoseconds(timings.decode_s),
        }
    return ending


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _loaded(request: Request, body: OllamaRequest, created_at: str, *, is_chat: bool) -> Response:
    """An empty question asks for the model to be loaded, which it is."""
    model = choose_model(context_of(request).service, body.model)
    kept: dict[str, Any] = {"model": model.name, "created_at": created_at}
    kept |= {"done": True, "done_reason": "load"}
    if is_chat:
        message = OllamaReplyMessage(role="assistant", content="")
        return json_response(OllamaChatReply(message=message, **kept))
    return json_response(OllamaGenerateReply(response="", **kept))


def _fields(body: OllamaRequest) -> dict[str, Any]:
    """What chat and generate have in common, by the names that chat completions know."""
    options = body.options or Options.model_validate({})
    for name, neutral in _NEUTRAL.items():
        given = getattr(options, name)
        if given is not None and given != neutral:
            raise unsupported(f"options.{name}", f"The option {name} is not supported.")
    return {
        "model": body.model,
        "stream": body.stream is not False,
        "temperature": 0.8 if options.temperature is None else options.temperature,
        "top_k": 40 if options.top_k is None else options.top_k,
        "top_p": 0.9 if options.top_p is None else options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "response_format": _response_format(body.format),
        "thinks": body.think if isinstance(body.think, bool) else None,
        "reasoning_effort": body.think if isinstance(body.think, str) else None,
    }


def _most_tokens(body: OllamaRequest) -> int | None:
    asked = None if body.options is None else body.options.num_predict
    return asked if asked is not None and asked > 0 else None


def _response_format(asked: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not asked:
        return None
    if isinstance(asked, str):
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(asked), "strict": True}}


def _chat_messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Calls have no ids in Ollama's chats, or need none: a result is that of the next call, or of the next with its
    name."""
    waiting: dict[str, str] = {}
    """Names of functions by calls that have no result yet."""
    for index, message in enumerate(messages):
        plain: dict[str, Any] = {
            "role": message.role,
            "content": _with_images(message.content, message.images, f"messages[{index}].images"),
        }
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.role == "tool":
            answered = message.tool_call_id or next(
                (call for call, name in waiting.items() if message.tool_name in (None, name)), "unknown"
            )
            plain |= {"name": message.tool_name or waiting.get(answered), "tool_call_id": answered}
            waiting.pop(answered, None)
        if message.tool_calls:
            named = {
                call.id or f"call_{index}_{number}": call for number, call in enumerate(message.tool_calls)
            }
            waiting |= {call_id: call.function.name for call_id, call in named.items()}
            plain["tool_calls"] = [_chat_call(call_id, call.function) for call_id, call in named.items()]
        yield plain


def _with_images(text: str, images: Sequence[str] | None, where: str) -> str | list[dict[str, Any]]:
    """A message's content; its images come before its text, as Ollama has it."""
    if not images:
        return text
    shown = [chat_part(data_url(image), f"{where}[{number}]") for number, image in enumerate(images)]
    return [*shown, {"type": "text", "text": text}]


def _chat_call(call_id: str, function: OllamaFunction) -> dict[str, Any]:
    called = {"name": function.name, "arguments": json.dumps(function.arguments)}
    return {"id": call_id, "type": "function", "function": called}


def _route(path: str, run: Any, summary: str, body: type[OllamaRequest], reply: type[ReplyBody]) -> ApiRoute:
    return ApiRoute(
        "POST",
        path,
        run,
        summary,
        needs=Access.USE,
        body=body,
        reply=reply,
        chunk=reply,
        chunk_type=NDJSON,
        error=OllamaError,
        statuses=GENERATION_ERRORS,
    )


OLLAMA_CHAT_ROUTES: tuple[ApiRoute, ...] = (
    _route(
        "/api/chat",
        ollama_chat,
        "Answer a conversation (Ollama's shape).",
        OllamaChatRequest,
        OllamaChatReply,
    ),
    _route(
        "/api/generate",
        ollama_generate,
        "Answer a prompt (Ollama's shape).",
        OllamaGenerateRequest,
        OllamaGenerateReply,
    ),
)
