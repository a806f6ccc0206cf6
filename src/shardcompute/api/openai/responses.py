"""OpenAI's Responses API: the request is translated to a chat here, `responses_adapter` words the answer.

Responses are not kept: each request carries its whole conversation.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import read_body, required
from shardcompute.api.context import context_of, request_id_of
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.answer import answer
from shardcompute.api.generation.conversation import open_conversation
from shardcompute.api.openai.framing import ResponsesFraming
from shardcompute.api.openai.responses_adapter import ResponsesAdapter
from shardcompute.api.openai.responses_schemas import (
    InputItem,
    InputPart,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
    ToolSelection,
)
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = frozenset({"input_text", "output_text", "text"})


async def create_response(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, ResponsesRequest, context.limits)
    _refuse_what_responses_lack(body)
    has_logprobs = _LOGPROBS in (body.include or ())
    chat = await open_conversation(
        request,
        {
            "model": body.model,
            "messages": _messages(body),
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
            "logprobs": has_logprobs or None,
            "top_logprobs": body.top_logprobs if has_logprobs else None,
            "response_format": _response_format(body),
            "tools": [_chat_tool(tool, index) for index, tool in enumerate(body.tools)]
            if body.tools
            else None,
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
        },
    )
    adapter = ResponsesAdapter(
        chat, body, request_id=request_id_of(request), created_s=int(context.wall_clock())
    )
    return await answer(request, chat.plan, adapter, ResponsesFraming(), is_stream=bool(body.stream))


def _refuse_what_responses_lack(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None:
        message = "Responses are not kept, so none can be continued by its id."
        raise unsupported("previous_response_id", message, hint="send the conversation so far as input")
    if body.store:
        raise unsupported("store", "Responses are not kept.", hint="leave store out or set it to false")
    if body.background:
        raise unsupported("background", "Responses are not made in the background.")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "Conversations are never shortened.", hint='set it to "disabled"')
    for name in ("conversation", "prompt"):
        if (body.model_extra or {}).get(name) is not None:
            raise unsupported(name, f"{name} refers to something kept by the server, which keeps nothing.")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.type or "message"
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            text = _text(item.output, f"{where}.output")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": required(item.call_id, f"{where}.call_id"),
                    "content": text,
                }
            )
        elif kind != "reasoning":
            raise unsupported(where, f"Items of type {kind!r} are not supported.")
    if not messages:
        raise RequestError("input has no message.", param="input", code="invalid_value")
    return messages


def _message(item: InputItem, where: str) -> dict[str, Any]:
    role = required(item.role, f"{where}.role")
    return {"role": role, "content": _text(item.content, f"{where}.content")}


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Calls stand beside the assistant's words here and belong to them in chat."""
    call = {
        "id": required(item.call_id, f"{where}.call_id"),
        "type": "function",
        "function": {"name": required(item.name, f"{where}.name"), "arguments": item.arguments or "{}"},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | list[InputPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in _TEXTS:
            texts.append(required(part.text, f"{where}[{index}].text", may_be_empty=True))
        else:
            param = f"{where}[{index}]"
            raise unsupported(
                param, f"Content of type {part.type!r} is not supported.", hint="send text only"
            )
    return "\n".join(texts)


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
)
