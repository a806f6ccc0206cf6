"""Image files become pixels as `transformers` loads them, and what costs too much is refused before it does."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from shardcompute.core.errors import UsageError
from shardcompute.models import image_files
from shardcompute.models.image_files import decode_image
from support.pictures import image_file


def reference(content: bytes) -> np.ndarray:
    from transformers.image_utils import load_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of palettes
        return np.asarray(load_image(Image.open(io.BytesIO(content))))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_each_kind_is_read(kind: str) -> None:
    pixels = decode_image(image_file(kind, (7, 5), (200, 10, 30)))
    assert (pixels.shape, pixels.dtype) == ((5, 7, 3), np.uint8)
    assert np.allclose(pixels.reshape(-1, 3), (200, 10, 30), atol=6)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16", "CMYK"])
def test_other_colours_are_read_as_the_reference_does(mode: str) -> None:
    random = np.random.default_rng(5)
    image = Image.fromarray(random.integers(0, 255, (6, 9, 4), dtype=np.uint8), "RGBA")
    deep = Image.fromarray(random.integers(0, 65535, (6, 9), dtype=np.uint16))
    image = deep if mode == "I;16" else image.convert(mode)
    written = io.BytesIO()
    image.save(written, "JPEG" if mode == "CMYK" else "PNG")
    assert np.array_equal(decode_image(written.getvalue()), reference(written.getvalue()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.arange(8 * 16 * 3, dtype=np.uint8).reshape(8, 16, 3))
    written = io.BytesIO()
    image.save(written, "JPEG", exif=exif)
    pixels = decode_image(written.getvalue())
    assert pixels.shape[:2] == ((8, 16) if orientation < 5 else (16, 8))
    assert np.array_equal(pixels, reference(written.getvalue()))


def test_of_a_gif_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 255, 0))]
    written = io.BytesIO()
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(decode_image(written.getvalue())[0, 0], (255, 0, 0))


def bomb(width: int, height: int) -> bytes:
    """A small file that says it is large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


@pytest.mark.parametrize("size", [(6001, 6000), (12_000, 12_000), (100_000, 100_000), (40_000, 2)])
def test_bombs_are_refused_by_what_they_say(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="pixels") as refused:
        decode_image(bomb(*size))
    assert refused.value.hint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"nothing", "no image of a kind"),
        (b"%PDF-1.7", "no image of a kind"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a kind"),
        (image_file("BMP"), "no image of a kind"),
        (image_file("TIFF"), "no image of a kind"),
        (image_file("PNG", (64, 64))[:90], "cannot be read"),
        (image_file("JPEG", (64, 64))[:400], "cannot be read"),
        (bomb(64, 64), "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        decode_image(content)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    content = image_file("JPEG", (64, 64), progressive=True)
    assert decode_image(content).shape == (64, 64, 3)
    with pytest.raises(UsageError, match="scans"):
        decode_image(content[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00" * 101 + content[-2:])


def test_files_that_are_too_long_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_IMAGE_BYTES", 50)
    with pytest.raises(UsageError, match="MiB"):
        decode_image(image_file())
