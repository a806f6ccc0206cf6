from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs import CODECS, Codec, find_codec


def there_and_back(codec: Codec, activations: np.ndarray) -> np.ndarray:
    body = memoryview(b"".join(codec.encode(activations)))
    assert len(body) == codec.body_bytes(*activations.shape)
    return codec.decode(body, *activations.shape)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_shape_type_and_exact_values_survive(codec: Codec) -> None:
    activations = np.array([[0.0, -1.5, 2.0], [0.25, -0.0, 96.0]], np.float32)
    decoded = there_and_back(codec, activations)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, activations)
    np.testing.assert_array_equal(there_and_back(codec, activations.T), activations.T)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_wrong_length_is_refused(codec: Codec) -> None:
    body = memoryview(b"".join(codec.encode(np.ones((2, 3), np.float32))))
    with pytest.raises(LinkError, match="2 × 4 activations"):
        codec.decode(body, 2, 4)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_nan_stays_nan_whatever_its_bits(codec: Codec) -> None:
    bits = np.array([[0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000]], np.uint32)
    assert np.isnan(there_and_back(codec, bits.view(np.float32))).all()


def test_bf16_rounds_to_nearest_ties_to_even() -> None:
    # Halfway between neighbours: 1 + 2⁻⁸ goes down to the even 1, 1 + 3·2⁻⁸ up to the even 1 + 2⁻⁶.
    activations = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)]], np.float32)
    expected = np.array([[1.0, 1 + 2**-6, 1 + 2**-7, -1.0]], np.float32)
    np.testing.assert_array_equal(there_and_back(find_codec("bf16"), activations), expected)


def test_fp16_keeps_outliers_finite() -> None:
    activations = np.array([[1e9, -70000.0, np.inf, -np.inf, 65519.0]], np.float32)
    expected = np.array([[65504.0, -65504.0, 65504.0, -65504.0, 65504.0]], np.float32)
    np.testing.assert_array_equal(there_and_back(find_codec("fp16"), activations), expected)


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(LinkError, match="'int3'"):
        find_codec("int3")
