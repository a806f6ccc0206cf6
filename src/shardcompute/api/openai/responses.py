"""OpenAI's Responses API: the request is translated to a chat here, `responses_adapter` words the answer.

A request carries its whole conversation, or goes on with one that `response_store` has kept.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import json_response, read_body, required
from shardcompute.api.context import caller_of, context_of, request_id_of
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.answer import answer
from shardcompute.api.generation.conversation import open_conversation
from shardcompute.api.generation.parameters import refuse_unsupported
from shardcompute.api.generation.schemas import SAMPLING_FIELDS
from shardcompute.api.openai.framing import ResponsesFraming
from shardcompute.api.openai.responses_adapter import ResponsesAdapter
from shardcompute.api.openai.responses_input import (
    keep_response,
    kept_items,
    own_items,
    store_of,
    to_messages,
)
from shardcompute.api.openai.responses_schemas import (
    DeletedResponse,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
    ToolSelection,
)
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute

_LOGPROBS = "message.output_text.logprobs"
_OTHER_NAMES = {
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "n": "send the request several times",
    "response_format": "use text.format",
    "logprobs": f'use include: ["{_LOGPROBS}"]',
}
_NEUTRAL = {"n": 1, "logprobs": False}


async def create_response(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, ResponsesRequest, context.chat_limits)
    _refuse_what_responses_lack(body)
    has_logprobs = _LOGPROBS in (body.include or ())
    earlier, own = kept_items(request, body.previous_response_id), own_items(request, body.input)
    chat = await open_conversation(
        request,
        {
            "model": body.model,
            "messages": to_messages(body.instructions, earlier, own),
            "max_completion_tokens": body.max_output_tokens,
            **{name: getattr(body, name) for name in SAMPLING_FIELDS},
            "stream": body.stream,
            "logprobs": has_logprobs or None,
            "top_logprobs": body.top_logprobs if has_logprobs else None,
            "response_format": _response_format(body),
            "tools": [_chat_tool(tool, index) for index, tool in enumerate(body.tools)]
            if body.tools
            else None,
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
            "thinking_budget": body.thinking_budget,
            "chat_template_kwargs": body.chat_template_kwargs,
        },
        prompt_param="input",
    )

    def keep(reply: ResponseReply) -> bool:
        return body.store is not False and keep_response(request, reply, [*earlier, *own])

    adapter = ResponsesAdapter(
        chat, body, request_id=request_id_of(request), created_s=int(context.wall_clock()), keep=keep
    )
    return await answer(request, chat.plan, adapter, ResponsesFraming(), is_stream=bool(body.stream))


def _refuse_what_responses_lack(body: ResponsesRequest) -> None:
    refuse_unsupported(body)
    for name, hint in _OTHER_NAMES.items():
        if (body.model_extra or {}).get(name) not in (None, _NEUTRAL.get(name)):
            raise unsupported(name, f"Responses have no parameter {name}.", hint=hint)
    if body.background:
        raise unsupported("background", "Responses are not made in the background.")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "Conversations are never shortened.", hint='set it to "disabled"')
    for name in ("conversation", "prompt"):
        if (body.model_extra or {}).get(name) is not None:
            message = f"{name} refers to something that this server does not keep."
            raise unsupported(
                name, message, hint="use previous_response_id, or send the conversation as input"
            )


async def get_response(request: Request) -> Response:
    kept = store_of(request).find(caller_of(request).key_id, request.path_params["response_id"])
    if kept is None:
        raise _not_found(request)
    return Response(kept.reply, media_type="application/json")


async def delete_response(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not store_of(request).forget(caller_of(request).key_id, response_id):
        raise _not_found(request)
    return json_response(DeletedResponse(id=response_id, object="response", deleted=True))


def _not_found(request: Request) -> RequestError:
    response_id: str = request.path_params["response_id"]
    message = f"Response with id {response_id[:64]!r} not found: responses are kept for an hour."
    return RequestError(message, hint="ask again", param="response_id", code="not_found", status=404)


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    asked: TextFormat | None = None if body.text is None else body.text.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        return {"type": asked.type}
    if asked.json_schema is None:
        raise RequestError("text.format.schema is missing.", param="text.format.schema", code="invalid_value")
    schema = {"name": asked.name or "answer", "schema": asked.json_schema, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": schema}


def _chat_tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        message = f"The tool {tool.type!r} would have to run on the server, and none does."
        raise unsupported(f"tools[{index}]", message, hint="send functions of your own")
    function = {
        "name": required(tool.name, f"tools[{index}].name"),
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    kept = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _tool_choice(choice: str | ToolSelection | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, ToolSelection):
        return choice
    if choice.type != "function":
        raise unsupported("tool_choice", f"The tool choice {choice.type!r} is not supported.")
    return {"type": "function", "function": {"name": required(choice.name, "tool_choice.name")}}


RESPONSES_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/v1/responses",
        create_response,
        "Answer a conversation (OpenAI's newer shape).",
        needs=Access.USE,
        body=ResponsesRequest,
        reply=ResponseReply,
        chunk=ResponseEvent,
        statuses=GENERATION_ERRORS,
    ),
    ApiRoute(
        "GET",
        "/v1/responses/{response_id}",
        get_response,
        "A response that was kept.",
        needs=Access.USE,
        reply=ResponseReply,
        statuses=(404,),
    ),
    ApiRoute(
        "DELETE",
        "/v1/responses/{response_id}",
        delete_response,
        "Forget a response.",
        needs=Access.USE,
        reply=DeletedResponse,
        statuses=(404,),
    ),
)
