"""Image files to RGB pixels, bounded by what they cost before anything of their size is allocated.

PNG, JPEG, WebP and the first frame of a GIF; turned upright as their EXIF data say and without their alpha channel, as
`transformers` loads images for the processors of all families. Raises UsageError for what is none of these, is broken
or too large. Pillow is imported when the first image comes: whoever serves text alone never pays for it.
"""

from __future__ import annotations

import io
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import UsageError

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""Rows, columns, and red, green, blue."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGE_BYTES = 20 << 20
MAX_PIXELS = 36_000_000
MAX_SIDE = 32_768
_MAX_SCANS = 100
"""Of a progressive JPEG: each goes over the whole image, however few bytes it has. Encoders write about ten."""
_SCAN_MARK = b"\xff\xda"
_CHOOSE = "send a PNG, JPEG, WebP or GIF image"


def decode_image(content: bytes) -> Pixels:
    """The pixels of an image file."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    check_image_bytes(len(content))
    if content.startswith(b"\xff\xd8") and content.count(_SCAN_MARK) > _MAX_SCANS:
        raise UsageError(
            f"it is a JPEG of more than {_MAX_SCANS} scans", hint="save it anew, as a plain JPEG"
        )
    try:
        # Pillow warns of sizes far above ours, to whoever listens; those are refused here all the same.
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            _check_size(*opened.size)
            upright = ImageOps.exif_transpose(opened)
            if upright.mode == "P" and "transparency" in upright.info:
                upright = upright.convert("RGBA")  # the same colours; Pillow warns of the straight way
            return np.asarray(upright.convert("RGB"))
    except UsageError:
        raise
    except UnidentifiedImageError:
        raise UsageError("it is no image of a kind that is read here", hint=_CHOOSE) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError):
        raise _too_large() from None
    except (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, TypeError) as error:
        # What its decoders raise for broken files is of many kinds.
        raise UsageError(
            f"it cannot be read as an image: {error}", hint="save it anew, or send another"
        ) from error


def check_image_bytes(size_bytes: int) -> None:
    """UsageError for a file that is too long to be looked at."""
    if size_bytes > MAX_IMAGE_BYTES:
        raise UsageError(f"it has more than {MAX_IMAGE_BYTES >> 20} MiB", hint="send it smaller, or as JPEG")
    if not size_bytes:
        raise UsageError("it is empty", hint=_CHOOSE)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise _too_large(width, height)


def _too_large(width: int = 0, height: int = 0) -> UsageError:
    size = f"{width} × {height} pixels, " if width else ""
    return UsageError(
        f"it has {size}more than {MAX_PIXELS // 1_000_000} million pixels, or a side of more than {MAX_SIDE}",
        hint="send it smaller: models see far fewer",
    )
