"""How activations become bytes and back: tensor codecs, chosen by the name that a frame carries.

| name  | bytes a value | what is lost, at most                                                        |
| ----- | ------------- | ---------------------------------------------------------------------------- |
| exact | 4             | nothing                                                                      |
| bf16  | 2             | 2⁻⁸ of a value, 2⁻¹³⁴ near zero: rounded to nearest, ties to even            |
| fp16  | 2             | 2⁻¹¹ of a value, 2⁻²⁵ near zero; magnitudes beyond 65504 become 65504        |

NaN stays NaN in all of them. A new codec is one class and one line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import LinkError

Activations = npt.NDArray[np.float32]
_FP16_MAX = np.float32(65504.0)


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    def body_bytes(self, rows: int, width: int) -> int:
        """The exact length of an encoded body, known before anything is allocated for it."""

    def encode(self, activations: Activations) -> list[memoryview]:
        """The body of `activations` `[rows, width]`, in parts. They may share its memory: keep it unchanged
        until they are sent."""

    def decode(self, body: memoryview, rows: int, width: int) -> Activations:
        """`[rows, width]`, perhaps sharing memory with `body` and read-only as it. `LinkError` for a wrong
        length."""


class ExactCodec:
    name = "exact"

    def body_bytes(self, rows: int, width: int) -> int:
        return 4 * rows * width

    def encode(self, activations: Activations) -> list[memoryview]:
        return [_bytes_of(np.ascontiguousarray(activations, dtype="<f4"))]

    def decode(self, body: memoryview, rows: int, width: int) -> Activations:
        check_length(self, body, rows, width)
        return np.frombuffer(body, dtype="<f4").reshape(rows, width).astype(np.float32, copy=False)


class Bf16Codec:
    name = "bf16"

    def body_bytes(self, rows: int, width: int) -> int:
        return 2 * rows * width

    def encode(self, activations: Activations) -> list[memoryview]:
        exact = np.ascontiguousarray(activations, dtype=np.float32)
        bits = exact.view(np.uint32)
        # Adding just under half of the last kept bit, plus that bit itself, rounds to nearest, ties to even.
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        halves = rounded.astype("<u2")
        # A NaN's payload could carry over into infinity or zero.
        lost = np.isnan(exact)
        if lost.any():
            halves[lost] = 0x7FC0
        return [_bytes_of(halves)]

    def decode(self, body: memoryview, rows: int, width: int) -> Activations:
        check_length(self, body, rows, width)
        bits = np.frombuffer(body, dtype="<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(rows, width)


class Fp16Codec:
    name = "fp16"

    def body_bytes(self, rows: int, width: int) -> int:
        return 2 * rows * width

    def encode(self, activations: Activations) -> list[memoryview]:
        # One outlier that became infinite would turn the whole row into NaN at the next normalisation.
        finite = np.clip(activations, -_FP16_MAX, _FP16_MAX)
        return [_bytes_of(np.ascontiguousarray(finite, dtype="<f2"))]

    def decode(self, body: memoryview, rows: int, width: int) -> Activations:
        check_length(self, body, rows, width)
        return np.frombuffer(body, dtype="<f2").reshape(rows, width).astype(np.float32)


CODECS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (ExactCodec(), Bf16Codec(), Fp16Codec())}
)


def find_codec(name: str) -> Codec:
    """The codec of that name, or `LinkError`."""
    codec = CODECS.get(name)
    if codec is None:
        raise LinkError(
            f"there is no tensor codec {name!r} here, only {', '.join(CODECS)}",
            hint="run the same release on every node",
        )
    return codec


def check_length(codec: Codec, body: memoryview, rows: int, width: int) -> None:
    expected = codec.body_bytes(rows, width)
    if body.nbytes != expected:
        raise LinkError(
            f"{rows} × {width} activations in {codec.name} take {expected} bytes, but {body.nbytes} came",
            hint="run the same release on every node",
        )


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
