"""Preprocessing of pictures, as the image processors of the families do it: from pixels to patches, and into a prompt.

Patches are bytes, since pixels are: what numbers a tower makes of them follows from its spec (`numbers_of`). Those that
become one row lie one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardcompute.core.errors import UsageError
from shardcompute.core.pictures import (
    MAX_PATCHES,
    Picture,
    PictureSpan,
    check_spans,
    digest_of,
)
from shardcompute.models.spec import VisionSpec
from shardcompute.models.vision.resample import Pixels, resize

_MOST_ASPECT = 200


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture as the tower takes it, not yet in a prompt, where it has `rows` rows."""

    grid: tuple[int, int, int]
    rows: int
    patches: bytes = field(repr=False)


def prepare_picture(vision: VisionSpec, pixels: Pixels) -> PreparedPicture:
    """From RGB pixels `[height, width, 3]` of any size. UsageError for a picture that the family does not take."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UsageError(f"a picture must be bytes [height, width, 3], not {pixels.dtype} {pixels.shape}")
    height, width = size_of(vision, pixels.shape[0], pixels.shape[1])
    resized = resize(pixels, height, width, vision.resampling)
    rows, columns = height // vision.patch, width // vision.patch
    patches = _patches(vision, resized[: rows * vision.patch, : columns * vision.patch])
    return PreparedPicture((1, rows, columns), rows * columns // vision.merge**2, patches)


def size_of(vision: VisionSpec, height: int, width: int) -> tuple[int, int]:
    """Height and width that a picture of this size is resized to."""
    size = vision.size
    if size.edge:
        return size.edge, size.edge
    if max(height, width) > _MOST_ASPECT * min(height, width):
        raise UsageError(
            f"a picture of {width}×{height} pixels is more than {_MOST_ASPECT} times as long as wide",
            hint="cut it, or send it in parts",
        )
    unit = vision.patch * vision.merge
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if tall * wide > size.most_pixels:
        shrink = math.sqrt(height * width / size.most_pixels)
        tall = max(unit, math.floor(height / shrink / unit) * unit)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
    elif tall * wide < size.least_pixels:
        grow = math.sqrt(size.least_pixels / (height * width))
        tall, wide = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    if tall * wide > MAX_PATCHES * vision.patch**2:
        raise UsageError(
            f"a picture of {width}×{height} pixels would have more than {MAX_PATCHES} patches",
            hint="send a smaller picture",
        )
    return tall, wide


def place_pictures(
    vision: VisionSpec, prompt: Sequence[int], prepared: Sequence[PreparedPicture]
) -> tuple[Picture, ...]:
    """Pictures at the rows that a prompt has for them, in order. UsageError where it has more or fewer."""
    row_id, placed, end = vision.prompt.row_id, list[Picture](), 0
    for number, each in enumerate(prepared, start=1):
        start = next((at for at in range(end, len(prompt)) if prompt[at] == row_id), len(prompt))
        end = start + each.rows
        if end > len(prompt) or any(token != row_id for token in prompt[start:end]):
            raise UsageError(f"the prompt has no {each.rows} rows for picture {number} of {len(prepared)}")
        span = PictureSpan(start, each.rows, each.grid)
        placed.append(Picture(span, each.patches, digest_of(each.grid, each.patches)))
    if row_id in prompt[end:]:
        raise UsageError(f"the prompt has rows for more than its {len(prepared)} pictures")
    check_spans([picture.span for picture in placed], len(prompt))
    return tuple(placed)


def check_picture(vision: VisionSpec, span: PictureSpan, patches: bytes | None = None) -> None:
    """UsageError unless a picture has the rows, and the bytes, that one of its grid has."""
    frames, rows, columns = span.grid
    fits = frames == 1 and not rows % vision.merge and not columns % vision.merge
    if vision.size.edge:
        fits = fits and rows == columns == vision.size.edge // vision.patch
    if not fits or span.patch_count != span.count * vision.merge**2:
        raise UsageError(
            f"a picture of {'×'.join(map(str, span.grid))} patches in {span.count} rows is none of this model's"
        )
    if patches is not None and len(patches) != span.patch_count * vision.patch_bytes:
        raise UsageError(
            f"a picture of {span.patch_count} patches has {span.patch_count * vision.patch_bytes} bytes, "
            f"not {len(patches)}"
        )


def numbers_of(vision: VisionSpec, patches: bytes) -> NDArray[np.float32]:
    """What the tower computes with, `[patches, 3 · patch · patch]`: bytes divided by 255, normed by channel."""
    levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, deviation = (np.asarray(each, dtype=np.float32) for each in (vision.mean, vision.deviation))
    table = (levels[None, :] - mean[:, None]) / deviation[:, None]
    codes = np.frombuffer(patches, dtype=np.uint8).reshape(-1, 3, vision.patch**2)
    numbers = np.empty(codes.shape, dtype=np.float32)
    for channel in range(3):
        numbers[:, channel] = table[channel][codes[:, channel]]
    return numbers.reshape(len(codes), -1)


def _patches(vision: VisionSpec, pixels: Pixels) -> bytes:
    patch, merge = vision.patch, vision.merge
    height, width, _ = pixels.shape
    split = pixels.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).tobytes()
