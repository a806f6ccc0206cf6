from __future__ import annotations

import zlib

import numpy as np
import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs import CODECS, Codec, find_codec

LENGTHS_VARY = {name for name in CODECS if name.endswith("+deflate")}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def body_of(codec: Codec, activations: np.ndarray) -> memoryview:
    body = memoryview(b"".join(codec.encode(activations)))
    assert codec.can_be(len(body), *activations.shape)
    if codec.name not in LENGTHS_VARY:
        assert len(body) == codec.body_bytes(*activations.shape)
    return body


def there_and_back(codec: Codec, activations: np.ndarray) -> np.ndarray:
    return codec.decode(body_of(codec, activations), *activations.shape)


def real_like(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Values of many sizes, and a few columns that are far larger."""
    draw = np.random.default_rng(seed)
    activations = draw.standard_normal((rows, width)) * np.exp(draw.standard_normal((rows, width)))
    activations[:, :: max(width // 3, 1)] *= 200
    return activations.astype(np.float32)


@every_codec
def test_shape_and_type_survive(codec: Codec) -> None:
    activations = np.array([[0.0, -1.5, 2.0], [0.25, -0.0, 96.0]], np.float32)
    for given in (activations, activations.T):
        decoded = there_and_back(codec, given)
        assert (decoded.dtype, decoded.shape) == (np.dtype(np.float32), given.shape)
        np.testing.assert_allclose(decoded, given, atol=0.5)


@every_codec
@pytest.mark.parametrize("width", [5, 64, 576, 1000, 1088])
def test_a_row_is_the_same_in_any_company(codec: Codec, width: int) -> None:
    activations = real_like(7, width)
    together = there_and_back(codec, activations)
    for row in range(7):
        alone = there_and_back(codec, activations[row : row + 1])
        assert alone.tobytes() == together[row : row + 1].tobytes()


@every_codec
def test_a_wrong_length_is_refused(codec: Codec) -> None:
    body = body_of(codec, np.ones((2, 3), np.float32))
    too_long = memoryview(bytes(body) + bytes(100))
    with pytest.raises(LinkError, match="2 × 3 activations"):
        codec.decode(too_long, 2, 3)
    for length in range(len(body)):
        with pytest.raises(LinkError):
            codec.decode(body[:length], 2, 3)


@every_codec
def test_nan_stays_nan_whatever_its_bits(codec: Codec) -> None:
    bits = np.array([[0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000]], np.uint32)
    assert np.isnan(there_and_back(codec, bits.view(np.float32))).all()


@pytest.mark.parametrize("name", ["int8", "int8-outliers", "fp8"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 3.2e38])
def test_what_cannot_be_scaled_breaks_its_row_and_no_other(name: str, broken: float) -> None:
    activations = np.ones((3, 200), np.float32)
    activations[1, 70] = broken
    decoded = there_and_back(find_codec(name), activations)
    spoiled = np.zeros((3, 200), bool)
    spoiled[1, slice(64, 128) if name == "int8" else slice(None)] = True
    np.testing.assert_array_equal(np.isnan(decoded), spoiled)
    np.testing.assert_allclose(decoded[~spoiled], 1.0, rtol=0.01)


def test_bf16_rounds_to_nearest_ties_to_even() -> None:
    # Halfway between neighbours: 1 + 2⁻⁸ goes down to the even 1, 1 + 3·2⁻⁸ up to the even 1 + 2⁻⁶.
    activations = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)]], np.float32)
    expected = np.array([[1.0, 1 + 2**-6, 1 + 2**-7, -1.0]], np.float32)
    np.testing.assert_array_equal(there_and_back(find_codec("bf16"), activations), expected)


def test_fp16_keeps_outliers_finite() -> None:
    activations = np.array([[1e9, -70000.0, np.inf, -np.inf, 65519.0]], np.float32)
    expected = np.array([[65504.0, -65504.0, 65504.0, -65504.0, 65504.0]], np.float32)
    np.testing.assert_array_equal(there_and_back(find_codec("fp16"), activations), expected)


def test_fp8_knows_the_numbers_of_e4m3() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = numbers[np.isfinite(numbers)][None]
    # The largest is 448, so that the scale is 1.
    np.testing.assert_array_equal(there_and_back(find_codec("fp8"), finite), finite)
    values = np.random.default_rng(0).uniform(-448, 448, (1, 5000)).astype(np.float32)
    values[0, 0] = 448
    rounded = values.astype(np.float16).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(find_codec("fp8"), values), rounded)


def test_outliers_cost_the_others_nothing() -> None:
    activations = np.random.default_rng(0).uniform(-1, 1, (4, 576)).astype(np.float32)
    activations[:, [3, 64, 65, 100, 200, 300, 400, 575]] = 1e4
    decoded = there_and_back(find_codec("int8-outliers"), activations)
    assert np.abs(decoded - activations).max() <= 1 / 252
    assert np.abs(there_and_back(find_codec("int8"), activations) - activations).max() > 1 / 252


@pytest.mark.parametrize("width", [8, 100, 144, 160, 576, 4096])
def test_the_largest_eight_are_found(width: int) -> None:
    activations = np.random.default_rng(width).standard_normal((20, width)).astype(np.float32)
    packed = find_codec("int8-outliers").rows.pack(activations)
    columns = packed[:, 2:18].copy().view("<u2")
    expected = np.sort(np.argsort(np.abs(activations), axis=1)[:, -8:], axis=1)
    np.testing.assert_array_equal(columns, expected)


@pytest.mark.parametrize(("name", "most"), [("exact", 0.88), ("bf16", 0.75), ("int8", 0.95)])
def test_deflate_saves_and_loses_nothing(name: str, most: float) -> None:
    activations = real_like(64, 576)
    plain, deflated = find_codec(name), find_codec(f"{name}+deflate")
    body = body_of(deflated, activations)
    assert len(body) < most * plain.body_bytes(64, 576)
    assert deflated.decode(body, 64, 576).tobytes() == there_and_back(plain, activations).tobytes()


@pytest.mark.parametrize("name", ["exact", "bf16", "int8"])
def test_what_cannot_be_deflated_goes_as_it_is(name: str) -> None:
    codec = find_codec(f"{name}+deflate")
    noise = np.random.default_rng(0).integers(0, 256, (4, 4 * 64), dtype=np.uint8)
    activations = np.nan_to_num(noise.view(np.float32), posinf=1, neginf=1)
    body = body_of(codec, activations)
    assert len(body) <= codec.body_bytes(*activations.shape)
    expected = there_and_back(find_codec(name), activations)
    np.testing.assert_array_equal(codec.decode(body, *activations.shape), expected)


def test_a_bomb_is_not_inflated() -> None:
    rows, width = 2, 8
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    exponents = bomb.compress(bytes(10 << 20)) + bomb.flush()
    codec = find_codec("exact+deflate")
    with pytest.raises(LinkError):
        codec.decode(memoryview(b"\x01" + bytes(3 * rows * width) + exponents), rows, width)
    # Short enough to be let through by its length, and yet it holds more than it may.
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    short = coder.compress(bytes(1000)) + coder.flush()
    assert len(short) <= rows * width
    with pytest.raises(LinkError, match="inflates to something other"):
        codec.decode(memoryview(b"\x01" + bytes(3 * rows * width) + short), rows, width)


@pytest.mark.parametrize(
    ("name", "at", "value", "match"),
    [
        ("int8", 1, 0x80, "scale"),
        ("int8-outliers", 1, 0xFF, "scale"),
        ("int8-outliers", 3, 0x01, "column"),
        ("fp8", 3, 0x80, "scale"),
        ("fp8", 4, 0x7F, "no numbers"),
        ("fp8", 4, 0xFF, "no numbers"),
    ],
)
def test_content_that_no_encoder_makes_is_refused(name: str, at: int, value: int, match: str) -> None:
    codec = find_codec(name)
    body = bytearray(body_of(codec, np.ones((1, 64), np.float32)))
    body[at] = value
    with pytest.raises(LinkError, match=match):
        codec.decode(memoryview(body), 1, 64)


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(LinkError, match="'int3'"):
        find_codec("int3")


def test_a_scale_that_signals_is_no_cause_for_a_warning() -> None:
    codec = find_codec("fp8")
    body = bytearray(body_of(codec, np.ones((1, 8), np.float32)))
    body[:4] = (0x7F800001).to_bytes(4, "little")
    assert np.isnan(codec.decode(memoryview(body), 1, 8)).all()
