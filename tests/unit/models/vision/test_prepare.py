"""Preprocessing of pictures: what the families' own image processors make of them, and what cannot be prepared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import transformers

from shardcompute.core.errors import UsageError
from shardcompute.core.pictures import MAX_PATCHES, PictureSpan
from shardcompute.models.spec import PicturePrompt, PictureSize, VisionSpec
from shardcompute.models.vision.prepare import (
    check_picture,
    numbers_of,
    place_pictures,
    prepare_picture,
    size_of,
)
from shardcompute.models.vision.resample import resize

_gemma = transformers.models.gemma3.image_processing_pil_gemma3
_qwen = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
ROW = 9
GEMMA = VisionSpec(
    family="gemma3",
    layers=1,
    hidden=8,
    heads=2,
    intermediate=8,
    patch=14,
    merge=4,
    prompt=PicturePrompt("<start>", "<start>", "<row>", "<end>", ROW),
    size=PictureSize(edge=224),
    resampling="bilinear",
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
    positions=256,
    is_pooled=True,
    is_bidirectional=True,
)
QWEN = replace(
    GEMMA,
    family="qwen2_vl",
    merge=2,
    size=PictureSize(0, 56 * 56, 28 * 28 * 64),
    resampling="bicubic",
    mean=(0.48145466, 0.4578275, 0.40821073),
    deviation=(0.26862954, 0.26130258, 0.27577711),
    positions=0,
    frames=2,
    is_pooled=False,
    is_bidirectional=False,
)
MOST_STEPS = 2
"""Pillow may begin with columns where we begin with rows: bytes are so far apart at most."""


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _smooth(height: int, width: int) -> np.ndarray:
    down, right = np.mgrid[0:height, 0:width] / max(height, width)
    return np.stack([255 * down, 255 * right, 128 + 120 * np.sin(9 * down * right)], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("resampling", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((5, 7), (224, 224)),
        ((37, 53), (28, 28)),
        ((1, 400), (56, 28)),
        ((300, 400), (89, 89)),
        ((40, 40), (40, 90)),
    ],
)
def test_resampling_has_pillows_bytes(
    before: tuple[int, int], after: tuple[int, int], resampling: str
) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = _noise(*before)
    kind = {"bilinear": image.Resampling.BILINEAR, "bicubic": image.Resampling.BICUBIC}[resampling]
    expected = np.asarray(image.fromarray(pixels).resize(after[::-1], kind))
    np.testing.assert_array_equal(resize(pixels, *after, resampling), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(300, 500), (500, 301), (17, 1000), (224, 224), (900, 220)])
def test_gemma_patches_are_those_of_its_processor(size: tuple[int, int]) -> None:
    pixels = _smooth(*size)
    processor = _gemma.Gemma3ImageProcessorPil(size={"height": 224, "width": 224}, do_pan_and_scan=False)
    expected = np.asarray(processor(pixels, input_data_format="channels_last")["pixel_values"][0])
    made = prepare_picture(GEMMA, pixels)
    assert (made.grid, made.rows) == ((1, 16, 16), 16)
    # Back from blocks of patches to the picture.
    numbers = numbers_of(GEMMA, made.patches).reshape(4, 4, 4, 4, 3, 14, 14)
    picture = numbers.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 224, 224)
    apart = np.abs(picture - expected).max() * 255 * 0.5
    assert apart <= MOST_STEPS + 0.01
    if size[0] <= 224 or size == (300, 500):
        np.testing.assert_array_equal(picture, expected)


@pytest.mark.parametrize("size", [(75, 133), (133, 75), (20, 20), (1000, 700), (28, 1400), (29, 27)])
def test_qwen_patches_are_those_of_its_processor(size: tuple[int, int]) -> None:
    pixels = _smooth(*size)
    processor = _qwen.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 64)
    found = processor(pixels, input_data_format="channels_last")
    expected = np.asarray(found["pixel_values"]).reshape(-1, 3, 2, 14 * 14)[:, :, 0]
    made = prepare_picture(QWEN, pixels)
    assert made.grid == tuple(np.asarray(found["image_grid_thw"])[0])
    assert made.rows * 4 == len(expected)
    apart = np.abs(numbers_of(QWEN, made.patches).reshape(expected.shape) - expected).max() * 255 * 0.28
    assert apart <= MOST_STEPS + 0.01
    resized = resize(pixels, *size_of(QWEN, *size), "bicubic")
    again = np.asarray(processor(resized, input_data_format="channels_last")["pixel_values"])
    np.testing.assert_array_equal(
        numbers_of(QWEN, made.patches).reshape(expected.shape), again.reshape(-1, 3, 2, 196)[:, :, 0]
    )


def test_pictures_that_no_family_takes_are_refused() -> None:
    for pixels in (np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(UsageError, match="bytes"):
            prepare_picture(QWEN, pixels)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="as long as wide"):
        prepare_picture(QWEN, np.zeros((1, 201, 3), np.uint8))
    largest = replace(QWEN, size=PictureSize(0, 1, 1 << 40))
    edge = 14 * (int(MAX_PATCHES**0.5) + 8)
    with pytest.raises(UsageError, match="patches"):
        size_of(largest, edge, edge)


def test_pictures_go_to_the_rows_of_the_prompt_in_order() -> None:
    one, two = prepare_picture(QWEN, _smooth(56, 56)), prepare_picture(QWEN, _smooth(56, 84))
    assert (one.rows, two.rows) == (4, 6)
    prompt = [1, *[ROW] * 4, 2, 3, *[ROW] * 6, 4]
    first, second = place_pictures(QWEN, prompt, [one, two])
    assert (first.span, second.span) == (PictureSpan(1, 4, (1, 4, 4)), PictureSpan(7, 6, (1, 4, 6)))
    assert first.digest != second.digest
    assert place_pictures(QWEN, [1, *[ROW] * 4, 2], [one])[0].digest == first.digest
    for wrong in ([1, *[ROW] * 3, 2], [1, 2], [*prompt, ROW], [1, *[ROW] * 10, 1, ROW]):
        with pytest.raises(UsageError, match="rows"):
            place_pictures(QWEN, wrong, [one, two])


@pytest.mark.parametrize(
    ("vision", "span", "size"),
    [
        (QWEN, PictureSpan(0, 4, (1, 4, 4)), 16 * 588 - 1),
        (QWEN, PictureSpan(0, 5, (1, 4, 4)), 16 * 588),
        (QWEN, PictureSpan(0, 4, (2, 4, 2)), 16 * 588),
        (QWEN, PictureSpan(0, 4, (1, 16, 1)), 16 * 588),
        (GEMMA, PictureSpan(0, 4, (1, 8, 8)), 64 * 588),
    ],
)
def test_pictures_that_are_none_of_the_models_are_refused(
    vision: VisionSpec, span: PictureSpan, size: int
) -> None:
    with pytest.raises(UsageError, match="picture"):
        check_picture(vision, span, bytes(size))


def test_the_text_of_a_picture() -> None:
    assert GEMMA.prompt.text(3) == "<start><row><row><row><end>"
