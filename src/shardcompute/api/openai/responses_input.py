"""Input of OpenAI's Responses API: the items of a conversation, sent or kept (see `response_store`), as a chat's
messages."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request

from shardcompute.api.body import required
from shardcompute.api.context import caller_of, context_of
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.chat_prompt import refused_part, unknown_call
from shardcompute.api.images.sources import chat_part
from shardcompute.api.openai.response_store import ResponseStore
from shardcompute.api.openai.responses_schemas import InputItem, InputPart, ResponseReply

_ITEMS = TypeAdapter(list[InputItem])
_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def kept_items(request: Request, response_id: str | None) -> list[InputItem]:
    """The conversation that a kept response has ended."""
    if response_id is None:
        return []
    kept = store_of(request).find(caller_of(request).key_id, response_id)
    if kept is None:
        raise RequestError(
            f"Previous response with id {response_id[:64]!r} not found: responses are kept for an hour, by the server "
            "that made them, unless they are too large.",
            hint="send the conversation so far as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return _ITEMS.validate_json(kept.conversation)


def own_items(request: Request, given: str | list[InputItem]) -> list[InputItem]:
    """The items of this request, with those that it only refers to."""
    if isinstance(given, str):
        return [InputItem(type="message", role="user", content=given)]
    items: list[InputItem] = []
    left_bytes = context_of(request).limits.max_body_bytes
    for index, item in enumerate(given):
        if item.type != "item_reference":
            items.append(item)
            continue
        packed = _referred(request, item, f"input[{index}]")
        left_bytes -= len(packed)
        if left_bytes < 0:
            message = "The items that input refers to are longer together than a body may be."
            raise RequestError(
                message, hint="refer to fewer", param="input", code="body_too_large", status=413
            )
        items.append(InputItem.model_validate_json(packed))
    return items


def _referred(request: Request, reference: InputItem, where: str) -> bytes:
    item_id = required(reference.id, f"{where}.id")
    found = store_of(request).find_item(caller_of(request).key_id, item_id)
    if found is None:
        raise RequestError(
            f"Item with id {item_id[:64]!r} not found: items are kept for an hour, by the server that made them.",
            hint="send the item itself; clients do so with store: false",
            param=where,
            code="item_not_found",
            status=404,
        )
    return found


def keep_response(request: Request, reply: ResponseReply, items: list[InputItem]) -> bool:
    """A call that was cut short is no part of the conversation: nothing could answer it."""
    said = [item for item in reply.output if item.type == "message" or item.status == "completed"]
    before = [item.model_dump(exclude_none=True) for item in items]
    after = [InputItem.model_validate(item.model_dump()).model_dump(exclude_none=True) for item in said]
    return store_of(request).keep(caller_of(request).key_id, reply.id, reply.to_json(), before, after)


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def to_messages(
    instructions: str | None, earlier: list[InputItem], own: list[InputItem]
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    called: set[str | None] = set()
    thought = ""
    for index, item in enumerate([*earlier, *own], start=-len(earlier)):
        where = f"input[{index}]"
        kind = item.type or "message"
        if kind == "message":
            messages.append(_message(item, where, thought))
        elif kind == "function_call":
            _add_call(messages, item, where, thought)
            called.add(item.call_id)
        elif kind == "function_call_output":
            result = _content(item.output, f"{where}.output")
            call_id = required(item.call_id, f"{where}.call_id")
            if call_id not in called:
                raise unknown_call(call_id, f"{where}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind != "reasoning":
            raise unsupported(where, f"Items of type {kind!r} are not supported.")
        thought = _text(item.content or item.summary, where) if kind == "reasoning" else ""
    if not messages:
        raise RequestError("input has no message.", param="input", code="invalid_value")
    return messages


def _message(item: InputItem, where: str, thought: str) -> dict[str, Any]:
    """A message, with what the assistant `thought` before it."""
    role = required(item.role, f"{where}.role")
    message: dict[str, Any] = {"role": role, "content": _content(item.content, f"{where}.content")}
    return message | {"reasoning_content": thought} if thought else message


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str, thought: str) -> None:
    """Calls stand beside the assistant's words here and belong to them in chat; those that were `thought` of anew have
    words of their own."""
    call = {
        "id": required(item.call_id, f"{where}.call_id"),
        "type": "function",
        "function": {"name": required(item.name, f"{where}.name"), "arguments": item.arguments or "{}"},
    }
    if not messages or messages[-1]["role"] != "assistant" or thought:
        own = {"role": "assistant", "content": ""}
        messages.append(own | {"reasoning_content": thought} if thought else own)
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: str | list[InputPart] | None, where: str) -> str | list[dict[str, Any]]:
    """Text alone, or the parts of a chat's message where there are images among it."""
    if content is None or isinstance(content, str) or all(part.type != "input_image" for part in content):
        return _text(content, where)
    return [
        chat_part(_image_url(part, f"{where}[{index}]"), f"{where}[{index}]")
        if part.type == "input_image"
        else {"type": "text", "text": _text([part], where)}
        for index, part in enumerate(content)
    ]


def _image_url(part: InputPart, where: str) -> str:
    if part.file_id is not None:
        raise unsupported(f"{where}.file_id", "No files are kept here.", hint="send the image as a data: URL")
    return required(part.image_url, f"{where}.image_url")


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
            raise refused_part(part.type, f"{where}[{index}]")
    return "\n".join(texts)
