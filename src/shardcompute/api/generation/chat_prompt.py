"""Chat prompts: from a conversation's messages to what the model's chat template makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardcompute.api.body import required
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.schemas import ChatMessage, ContentPart, ImageUrl, ToolCall
from shardcompute.api.images.sources import ImagePart
from shardcompute.api.offload import PIECE_COST, offload
from shardcompute.api.tools import ChatEncoder, Tool, encode_with_tools
from shardcompute.core.errors import PromptTooLongError, UsageError
from shardcompute.node.service import TextCodec

_INSTEAD = {
    "audio": "send what is said in it, as text",
    "video": "send some of its frames, as images",
    "file": "send its text",
    "document": "send its text",
    "image": "send text only; images belong into the messages of a chat",
}
"""What to send instead of content that is refused, by what its type's name has in it."""


async def encode_messages(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Tool] = (),
    context_length: int | None = None,
    is_continued: bool = False,
    variables: Mapping[str, Any] | None = None,
    encoder: ChatEncoder | None = None,
) -> list[int]:
    """The prompt for the messages, of a model that is told of `tools` (see `TextCodec.encode`); a last one that
    `is_continued` stays open. `variables` are the request's own, for the template. Without an
    `encoder` that knows them, images are refused."""
    begun = begun_text(messages) if is_continued else ""
    told = messages[:-1] if is_continued else messages

    def encode() -> list[int]:
        _check(messages)
        plain = [
            _plain(message, f"messages[{index}]", shows_images=encoder is not None)
            for index, message in enumerate(told)
        ]
        prompt = encode_with_tools(
            encoder or codec,
            plain,
            tools,
            add_generation_prompt=add_generation_prompt or is_continued,
            context_length=context_length,
            variables=variables,
        )
        return (
            [*prompt, *codec.encode(begun, add_special=False, context_length=context_length)]
            if begun
            else prompt
        )

    try:
        # Never on the event loop: a template is a stranger's program, and nobody knows what it takes.
        return await offload(encode)
    except (RequestError, PromptTooLongError):
        raise
    except UsageError as error:
        raise RequestError(error.message, hint=error.hint, param="messages", code="invalid_value") from error


def size_of(message: ChatMessage) -> int:
    """What a message costs, in characters of text: one without any has its price too."""
    size = PIECE_COST
    if isinstance(message.content, str):
        size += len(message.content)
    for part in () if isinstance(message.content, str) else message.content or ():
        size += PIECE_COST + len(part.text or "") + len(_url_of(part) or "")
    size += len(message.refusal or "") + len(message.thought or "")
    for call in message.tool_calls or ():
        size += PIECE_COST + len(call.function.arguments)
    return size


def begun_text(messages: Sequence[ChatMessage]) -> str:
    """The text of an answer that is to be gone on with."""
    last, param = messages[-1], f"messages[{len(messages) - 1}]"
    text = _text(last.content, param)
    if last.role != "assistant" or last.tool_calls or not text or len(messages) < 2:
        message = "continue_final_message wants the last of several messages to be an assistant's, with text."
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    return text


def _check(messages: Sequence[ChatMessage]) -> None:
    """Whatever must say something does, and whatever answers a call answers one that was made."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if (
            message.content is None
            and message.refusal is None
            and not (message.tool_calls or message.thought)
        ):
            raise RequestError(
                f"{where}.content is missing.",
                hint="send a text; only an assistant's message that calls tools needs none",
                param=f"{where}.content",
                code="invalid_value",
            )
        called |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool":
            call_id = required(message.tool_call_id, f"{where}.tool_call_id")
            if call_id not in called:
                raise unknown_call(call_id, f"{where}.tool_call_id")


def unknown_call(call_id: str, param: str) -> RequestError:
    """The refusal of a result of a call that nobody made."""
    message = f"{param}: no message before it calls a tool as {call_id[:64]!r}."
    hint = "send the assistant's message with the call too"
    return RequestError(message, hint=hint, param=param, code="invalid_value")


def image_parts(messages: Sequence[ChatMessage]) -> list[ImagePart]:
    """The images of a conversation, in its order."""
    found = []
    for index, message in enumerate(messages):
        for number, part in enumerate(() if isinstance(message.content, str) else message.content or ()):
            if part.is_image:
                param = f"messages[{index}].content[{number}]"
                url = required(_url_of(part), f"{param}.image_url")
                found.append(ImagePart.named(param, url, part.model_extra))
    return found


def forget_images(messages: Sequence[ChatMessage]) -> None:
    """Drop the images of messages that have been read: they are large, and a request is kept until it is answered."""
    for message in messages:
        for part in () if isinstance(message.content, str) else message.content or ():
            part.image_url = None


def _url_of(part: ContentPart) -> str | None:
    return part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url


def _plain(message: ChatMessage, where: str, *, shows_images: bool = False) -> dict[str, Any]:
    """The message as chat templates expect it: text content, or a list of parts where there are images, `system` for
    `developer`, parsed arguments."""
    given = message.refusal if message.content is None else message.content
    has_images = shows_images and isinstance(given, list) and any(part.is_image for part in given)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _shown(given, where) if has_images and isinstance(given, list) else _text(given, where),
    }
    if thought := message.thought:
        plain["reasoning_content"] = thought
        if not (plain["content"] and message.tool_calls):
            plain["thinking"] = thought  # gpt-oss wants one or the other beside calls
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments out as JSON themselves, so they want them parsed where they can be."""
    given = call.function.arguments
    parsed = parse_arguments(given)
    arguments = given if parsed is None else parsed
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _shown(content: list[ContentPart], where: str) -> list[dict[str, Any]]:
    """Images and texts as templates of models that see expect them."""
    return [
        {"type": "image"}
        if part.is_image
        else {"type": "text", "text": _part(part, f"{where}.content[{index}]")}
        for index, part in enumerate(content)
    ]


def refused_part(kind: str, param: str) -> RequestError:
    """The refusal of content that no model here takes."""
    hint = next((hint for name, hint in _INSTEAD.items() if name in kind), "send text only")
    return unsupported(param, f"Content of type {kind[:64]!r} is not supported.", hint=hint)


def _part(part: ContentPart, param: str) -> str:
    if part.type not in ("text", "refusal"):
        raise refused_part(part.type, param)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise RequestError(f"{param} has no {part.type}.", param=param, code="invalid_value")
    return text


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that a call's arguments are; None where the model wrote something else."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
