"""Images of a conversation: read from files, kept in its messages as a server takes them, shown to a model in this
process."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcompute.core.errors import SourceError, UsageError

if TYPE_CHECKING:
    from shardcompute.core.pictures import Picture
    from shardcompute.node.local.service import LocalService

Message = Mapping[str, Any]
_HEAD = "data:image/*;base64,"


def read_image(path: Path) -> str:
    """An image file as a data: URL; SourceError or UsageError where it cannot be one."""
    from shardcompute.models.image_files import MAX_IMAGE_BYTES, check_image_bytes

    try:
        with path.expanduser().open("rb") as opened:
            content = opened.read(MAX_IMAGE_BYTES + 1)
    except FileNotFoundError:
        raise SourceError(f"there is no file {path}", hint="give the path of an image") from None
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror}", hint="check whose file it is"
        ) from error
    try:
        check_image_bytes(len(content))
    except UsageError as error:
        raise UsageError(f"{path} cannot be shown: {error.message}", hint=error.hint) from error
    return _HEAD + base64.b64encode(content).decode()


def read_images(paths: Sequence[Path], *, is_raw: bool = False) -> tuple[str, ...]:
    """Those that a command was given."""
    if paths and is_raw:
        raise UsageError(
            "--image needs the chat template, which --raw leaves out", hint="give one of the two"
        )
    return tuple(map(read_image, paths))


def with_images(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """The content of a message: its images, then its text."""
    if not images:
        return text
    return [
        *({"type": "image_url", "image_url": {"url": image}} for image in images),
        {"type": "text", "text": text},
    ]


def has_images(messages: Iterable[Message]) -> bool:
    return any(not isinstance(message["content"], str) for message in messages)


def encode_images(
    service: LocalService, messages: Sequence[Message]
) -> tuple[list[int], tuple[Picture, ...]]:
    """The prompt of a conversation with images, for a model in this process, and its pictures."""
    from shardcompute.models.image_files import decode_image
    from shardcompute.models.vision.chat import encode_with_pictures
    from shardcompute.models.vision.prepare import prepare_picture

    vision = service.models()[0].vision
    if vision is None:
        raise UsageError(f"{service.name} does not see images", hint="ask without --image, or another model")
    urls = [part["image_url"]["url"] for part in _parts(messages) if part["type"] == "image_url"]
    try:
        prepared = [
            prepare_picture(vision, decode_image(base64.b64decode(url.partition(",")[2]))) for url in urls
        ]
    except UsageError as error:
        raise UsageError(f"an image cannot be shown: {error.message}", hint=error.hint) from error
    return encode_with_pictures(service.tokenizer, vision, [_plain(each) for each in messages], prepared)


def _parts(messages: Iterable[Message]) -> list[Mapping[str, Any]]:
    return [part for each in messages if not isinstance(each["content"], str) for part in each["content"]]


def _plain(message: Message) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return dict(message)
    shown = [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]
    return {**message, "content": shown}
