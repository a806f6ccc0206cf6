"""Shows a model the images of a chat: reads and decodes them, and has them written into the prompt.

Decoding happens in few threads of its own, each image within a deadline, and what requests hold of images meanwhile is
bounded for all of them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.images.fetching import ImageFetcher
from shardcompute.api.images.sources import ImagePart, check_count, read_source, refused_image
from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.core.pictures import Picture
from shardcompute.models.image_files import decode_image
from shardcompute.models.spec import VisionSpec
from shardcompute.models.vision.chat import encode_with_pictures
from shardcompute.models.vision.prepare import PreparedPicture, prepare_picture
from shardcompute.node.service import ServedModel, Service, TextCodec

_THREADS = 2
DECODE_S = 30.0
"""For one image to be decoded and made into patches, with the wait for its turn."""
Result = TypeVar("Result")


class PictureEncoder:
    """Makes prompts of messages with images; the pictures of the last one are in `pictures`."""

    def __init__(self, codec: TextCodec, vision: VisionSpec, prepared: Sequence[PreparedPicture]) -> None:
        self.pictures: tuple[Picture, ...] = ()
        self._codec = codec
        self._vision = vision
        self._prepared = prepared

    def chat_template_source(self, *, has_tools: bool = False) -> str | None:
        return self._codec.chat_template_source(has_tools=has_tools)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, context_length: int | None = None, **options: Any
    ) -> list[int]:
        ids, self.pictures = encode_with_pictures(
            self._codec, self._vision, messages, self._prepared, context_length=context_length, **options
        )
        return ids


async def show_images(
    service: Service, model: ServedModel, parts: Sequence[ImagePart], fetcher: ImageFetcher
) -> PictureEncoder | None:
    """What makes the prompt of a chat with these images; None where there are none. RequestError names the part that
    cannot be shown."""
    if not parts:
        return None
    if model.vision is None:
        raise _blind(service, model, parts[0])
    check_count(parts)
    prepared = [await _prepared(part, model.vision, fetcher) for part in parts]
    return PictureEncoder(service.codec(model.name), model.vision, prepared)


async def _prepared(part: ImagePart, vision: VisionSpec, fetcher: ImageFetcher) -> PreparedPicture:
    content = await read_source(part, fetcher)
    try:
        return await _in_thread(lambda: prepare_picture(vision, decode_image(content)))
    except UsageError as error:
        raise refused_image(part, error) from error


async def _in_thread(work: Callable[[], Result]) -> Result:
    try:
        async with asyncio.timeout(DECODE_S):
            return await asyncio.get_running_loop().run_in_executor(_threads(), work)
    except TimeoutError:
        message = (
            f"An image was not decoded within {DECODE_S:g} s: others are being decoded, or it is too large."
        )
        raise CapacityError(message, hint="send the request again in a moment, with smaller images") from None


def _blind(service: Service, model: ServedModel, part: ImagePart) -> RequestError:
    seeing = ", ".join(each.name for each in service.models() if each.vision is not None)
    hint = f"send text only, or ask a model that sees: {seeing}" if seeing else "send text only"
    return unsupported(part.param, f"{part.param}: the model {model.name!r} does not see images.", hint=hint)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="image work")
