"""Every codec keeps the bound that it documents, whatever it is given, and takes any bytes without harm."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs import CODECS, find_codec

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

WIDTHS = st.sampled_from([1, 3, 8, 9, 63, 64, 65, 130, 144, 160])
MOST = float(np.float32(3e38))
# Ordinary values, zeros, outliers, denormals, and anything else that float32 knows.
ELEMENTS = st.one_of(
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1e4, -1e4, 1e-40, -1e-45, 65504.0, 1e30]),
    st.floats(-MOST, MOST, width=32),
)


@st.composite
def activations(draw: st.DrawFn) -> Float32:
    shape = (draw(st.integers(1, 3)), draw(WIDTHS))
    return draw(st_numpy.arrays(np.float32, shape, elements=ELEMENTS, fill=st.just(np.float32(0.5))))


ZEROS = np.zeros((2, 65), np.float32)
OUTLIERS = np.where(np.arange(130) % 13 == 0, 1e4, np.linspace(-1, 1, 130)).astype(np.float32)[None]
DENORMALS = (np.arange(1, 131) * 1e-45).astype(np.float32)[None]


def errors(name: str, exact: Float32) -> Float64:
    codec = find_codec(name)
    body = memoryview(b"".join(codec.encode(exact)))
    return np.abs(codec.decode(body, *exact.shape).astype(np.float64) - exact.astype(np.float64))


def bf16_bound(exact: Float64) -> Float64:
    return np.maximum(2.0**-8 * np.abs(exact), 2.0**-134)


def fp16_bound(exact: Float64) -> Float64:
    clipped = np.maximum(np.abs(exact) - 65504, 0)
    return np.maximum(2.0**-11 * np.abs(exact), 2.0**-25) + clipped


def int8_bound(exact: Float64) -> Float64:
    rows, width = exact.shape
    padded = np.zeros((rows, -(-width // 64) * 64))
    padded[:, :width] = np.abs(exact)
    peaks = padded.reshape(rows, -1, 64).max(axis=2)
    return np.repeat(peaks, 64, axis=1)[:, :width] / 252 + 2.0**-133


def outlier_bound(exact: Float64) -> Float64:
    rows, width = exact.shape
    ranked = np.sort(np.abs(exact), axis=1)
    ninth = ranked[:, width - 9 : width - 8] if width > 8 else np.zeros((rows, 1))
    others = ninth / 252 + 2.0**-133
    return np.where(np.abs(exact) <= ninth, np.maximum(others, fp16_bound(exact)), fp16_bound(exact))


def fp8_bound(exact: Float64) -> Float64:
    peaks = np.abs(exact).max(axis=1, keepdims=True)
    # The middle between two numbers may be missed by fp16's own rounding.
    return np.maximum((2.0**-4 + 2.0**-10) * np.abs(exact), 2.0**-18 * peaks) + 2.0**-130


BOUNDS: dict[str, Callable[[Float64], Float64]] = {
    "exact": np.zeros_like,
    "bf16": bf16_bound,
    "fp16": fp16_bound,
    "int8": int8_bound,
    "int8-outliers": outlier_bound,
    "fp8": fp8_bound,
}


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30, deadline=None)
@given(activations())
@example(ZEROS)
@example(OUTLIERS)
@example(DENORMALS)
def test_bounds_are_kept(name: str, exact: Float32) -> None:
    bound = BOUNDS[name.removesuffix("+deflate")](exact.astype(np.float64))
    assert (errors(name, exact) <= bound).all()


@pytest.mark.parametrize("name", ["exact", "exact+deflate"])
@settings(max_examples=30, deadline=None)
@given(st_numpy.arrays(np.uint32, st.tuples(st.integers(1, 3), WIDTHS)))
def test_exact_loses_no_bit(name: str, bits: npt.NDArray[np.uint32]) -> None:
    codec, exact = find_codec(name), bits.view(np.float32)
    body = memoryview(b"".join(codec.encode(exact)))
    assert codec.decode(body, *exact.shape).tobytes() == exact.tobytes()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30, deadline=None)
@given(st_numpy.arrays(np.uint32, st.tuples(st.integers(1, 3), WIDTHS)))
def test_nan_and_infinity_are_never_hidden(name: str, bits: npt.NDArray[np.uint32]) -> None:
    codec, exact = find_codec(name), bits.view(np.float32)
    decoded = codec.decode(memoryview(b"".join(codec.encode(exact))), *exact.shape)
    assert np.isnan(decoded[np.isnan(exact)]).all()
    if name != "fp16":
        assert not np.isfinite(decoded[np.isinf(exact)]).any()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30, deadline=None)
@given(activations())
def test_rows_do_not_depend_on_each_other(name: str, exact: Float32) -> None:
    codec = find_codec(name)
    packed = codec.rows.pack(exact)
    for row in range(len(exact)):
        assert codec.rows.pack(exact[row : row + 1]).tobytes() == packed[row].tobytes()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.data(), st.integers(1, 4), st.integers(1, 70))
def test_any_body_decodes_or_is_refused(name: str, data: st.DataObject, rows: int, width: int) -> None:
    codec = find_codec(name)
    right = codec.body_bytes(rows, width)
    size = data.draw(st.one_of(st.just(right), st.integers(0, right + 8)))
    body = data.draw(st.binary(min_size=size, max_size=size))
    if not codec.can_be(size, rows, width):
        with pytest.raises(LinkError):
            codec.decode(memoryview(body), rows, width)
        return
    with contextlib.suppress(LinkError):
        assert codec.decode(memoryview(body), rows, width).shape == (rows, width)


@pytest.mark.parametrize("name", CODECS)
def test_a_body_that_is_too_short_costs_no_memory(name: str) -> None:
    codec = find_codec(name)
    tracemalloc.start()
    try:
        for body in (b"", b"\x00", b"\x01" + bytes(1000)):
            with pytest.raises(LinkError):
                codec.decode(memoryview(body), 16384, 16384)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
