"""Where the images of a request come from: data URLs hold them, other URLs are fetched if that is allowed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcompute.api.errors import RequestError
from shardcompute.api.images.fetching import ImageFetcher
from shardcompute.api.offload import run_sized
from shardcompute.core.errors import UsageError
from shardcompute.models.image_files import MAX_IMAGE_BYTES, check_image_bytes

NAMED = "shardcompute_param"
_MAX_NAME = 200
MAX_IMAGES = 16
"""Of one request: each is decoded, and seen, at a price of its own."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a request: what the request calls it, and its URL."""

    param: str
    url: str

    @classmethod
    def named(cls, param: str, url: str, extra: Mapping[str, Any] | None) -> ImagePart:
        """Called by the name that another protocol has for it (`chat_part`), else by its own."""
        told = (extra or {}).get(NAMED)
        return cls(told[:_MAX_NAME] if isinstance(told, str) else param, url)


def check_count(parts: Sequence[ImagePart]) -> None:
    if len(parts) > MAX_IMAGES:
        raise RequestError(
            f"The request has {len(parts)} images, more than {MAX_IMAGES}.",
            hint="send fewer",
            param=parts[MAX_IMAGES].param,
            code="invalid_value",
        )


async def read_source(part: ImagePart, fetcher: ImageFetcher) -> bytes:
    """The file behind an image's URL; RequestError, which names the part, where there is none."""
    try:
        if part.url[:5].lower() == "data:":
            return await run_sized(lambda: _unpack(part.url), characters=len(part.url))
        if part.url[:8].lower().startswith(("http://", "https://")):
            return await fetcher.fetch(part.url)
        raise UsageError(
            "its URL is none of data:, http: or https:", hint="send data:image/png;base64,… or the like"
        )
    except UsageError as error:
        raise refused_image(part, error) from error


def refused_image(part: ImagePart, error: UsageError) -> RequestError:
    """The refusal of an image, by the name that the request has for it."""
    message = f"{part.param}: the image cannot be used: {error.message}."
    return RequestError(message, hint=error.hint, param=part.param, code="invalid_image")


def chat_part(url: str, param: str) -> dict[str, Any]:
    """The part of a chat's message that an image of another protocol becomes, with what that calls it."""
    return {"type": "image_url", "image_url": url, NAMED: param}


def data_url(encoded: str, media_type: str = "image/*") -> str:
    """The URL of an image that a protocol sends as base64 alone."""
    return encoded if encoded[:5].lower() == "data:" else f"data:{media_type};base64,{encoded}"


def _unpack(url: str) -> bytes:
    head, comma, encoded = url.partition(",")
    kind, *parameters = head[5:].lower().split(";")
    if not comma or "base64" not in parameters:
        raise UsageError("its data: URL is not base64", hint="write it as data:image/png;base64,…")
    if kind and not kind.startswith("image/"):
        raise UsageError(
            f"it is of type {kind[:64]!r}", hint="images are seen; audio, video and documents are not"
        )
    if len(encoded) > 2 * MAX_IMAGE_BYTES:
        check_image_bytes(len(encoded))
    try:
        content = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"its base64 is broken: {error}", hint="encode the file's bytes") from error
    check_image_bytes(len(content))
    return content
