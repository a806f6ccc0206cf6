"""Small images, what a model of small eyes makes of them, and pictures at rows of a prompt."""

from __future__ import annotations

import base64
import io
from typing import Any

from shardcompute.core.pictures import Picture, PictureSpan, digest_of
from shardcompute.models.spec import PicturePrompt, PictureSize, VisionSpec

ROW_ID = 254
EYES = VisionSpec(
    family="small",
    layers=1,
    hidden=8,
    heads=1,
    intermediate=8,
    patch=2,
    merge=1,
    prompt=PicturePrompt(mark="<image>", before="[", row="\ue010", after="]", row_id=ROW_ID),
    size=PictureSize(edge=4),
    resampling="bilinear",
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
    is_bidirectional=True,
)
"""Every image has four rows, and 48 bytes."""


def image_file(
    kind: str = "PNG", size: tuple[int, int] = (6, 4), color: Any = (255, 0, 0), **options: Any
) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", size, color).save(written, kind, **options)
    return written.getvalue()


def data_url_of(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture(start: int, shade: int = 0, eyes: VisionSpec = EYES) -> Picture:
    """One of four rows."""
    patches = bytes([shade]) * (4 * eyes.patch_bytes)
    return Picture(PictureSpan(start, 4, (1, 2, 2)), patches, digest_of((1, 2, 2), patches))
