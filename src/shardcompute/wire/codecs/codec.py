"""A codec: a form of rows, and perhaps deflate over a whole body.

The mantissas of activations are noise that nothing compresses, but their exponents are few and alike. So of
floating-point numbers deflate gets the exponents only, one byte of each, and of whole numbers all there is, coded by
Huffman's method without a search for repetitions: that saves a sixth of float32, a third of bf16 and an eighth of
int8, at some ten nanoseconds a value. A deflated body is a mark, what was left out, and the deflated bytes; where
that would be longer, another mark and the rows as they are.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs.rows import Activations, PackedRows, RowCodec

_PLAIN, _DEFLATED = b"\x00", b"\x01"
_RAW_DEFLATE = -15
_MEMORY_LEVEL = 9


@dataclass(frozen=True, slots=True)
class Codec:
    """`deflated_word_bytes`: the length of the numbers whose uppermost bytes are deflated; 0 for none."""

    rows: RowCodec
    deflated_word_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.rows.name}+deflate" if self.deflated_word_bytes else self.rows.name

    def body_bytes(self, rows: int, width: int) -> int:
        """The length of an encoded body, known before anything is allocated for it; with deflate, the most."""
        return rows * self.rows.row_bytes(width) + (1 if self.deflated_word_bytes else 0)

    def can_be(self, body_bytes: int, rows: int, width: int) -> bool:
        """Whether a body of activations `[rows, width]` can have this length."""
        most = self.body_bytes(rows, width)
        return 1 <= body_bytes <= most if self.deflated_word_bytes else body_bytes == most

    def encode(self, activations: Activations) -> list[memoryview]:
        """The body of `activations` `[rows, width]`, in parts. They may share its memory: keep it unchanged
        until they are sent."""
        return self.wrap(self.rows.pack(activations))

    def wrap(self, packed: PackedRows) -> list[memoryview]:
        """The body of rows that were packed before."""
        if not self.deflated_word_bytes:
            return [_flat(packed)]
        plane, others = _split(packed, self.deflated_word_bytes)
        coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, _MEMORY_LEVEL, zlib.Z_HUFFMAN_ONLY)
        deflated = coder.compress(plane.data) + coder.flush()
        if len(deflated) >= plane.nbytes:
            return [memoryview(_PLAIN), _flat(packed)]
        return [memoryview(_DEFLATED), *(_flat(other) for other in others), memoryview(deflated)]

    def decode(self, body: memoryview, rows: int, width: int) -> Activations:
        """`[rows, width]`, perhaps sharing memory with `body` and read-only as it. `LinkError` for a wrong length
        or content."""
        if not self.can_be(body.nbytes, rows, width):
            raise LinkError(
                f"{rows} × {width} activations in {self.name} take {self.body_bytes(rows, width)} bytes, "
                f"but {body.nbytes} came",
                hint="run the same release on every node",
            )
        if self.deflated_word_bytes:
            packed = self._inflate(body, rows * self.rows.row_bytes(width))
        else:
            packed = np.frombuffer(body, dtype=np.uint8)
        return self.rows.unpack(packed.reshape(rows, -1), width)

    def _inflate(self, body: memoryview, size: int) -> PackedRows:
        mark, rest = bytes(body[:1]), body[1:]
        if mark == _PLAIN and rest.nbytes == size:
            return np.frombuffer(rest, dtype=np.uint8)
        count = size // self.deflated_word_bytes
        others_bytes = size - count
        if mark != _DEFLATED or rest.nbytes < others_bytes:
            raise LinkError(f"a body in {self.name} is neither plain nor deflated")
        coder = zlib.decompressobj(_RAW_DEFLATE)
        try:
            # No more than is expected, however much there might come out of it.
            plane = coder.decompress(rest[others_bytes:], count + 1)
        except zlib.error as error:
            raise LinkError(f"a body in {self.name} cannot be inflated: {error}") from error
        if len(plane) != count or not coder.eof or coder.unused_data:
            raise LinkError(f"a body in {self.name} inflates to something other than {count} bytes")
        exponents = np.frombuffer(plane, dtype=np.uint8)
        return _join(exponents, rest[:others_bytes], self.deflated_word_bytes)


Plane = npt.NDArray[np.unsignedinteger]


def _split(packed: PackedRows, word_bytes: int) -> tuple[Plane, list[Plane]]:
    """The exponents of all numbers, whole in a byte once the sign is moved to the other end; and what is left."""
    if word_bytes == 1:
        return packed.reshape(-1), []
    if word_bytes == 2:
        halves = packed.reshape(-1).view("<u2")
        turned = (halves << np.uint16(1)) | (halves >> np.uint16(15))
        return (turned >> np.uint16(8)).astype(np.uint8), [turned.astype(np.uint8)]
    words = packed.reshape(-1).view("<u4")
    turned4 = (words << np.uint32(1)) | (words >> np.uint32(31))
    low, middle = turned4.astype("<u2"), (turned4 >> np.uint32(16)).astype(np.uint8)
    return (turned4 >> np.uint32(24)).astype(np.uint8), [low, middle]


def _join(exponents: PackedRows, others: memoryview, word_bytes: int) -> PackedRows:
    if word_bytes == 1:
        return exponents
    if word_bytes == 2:
        halves = exponents.astype(np.uint16) << np.uint16(8)
        halves |= np.frombuffer(others, np.uint8)
        halves = (halves >> np.uint16(1)) | (halves << np.uint16(15))
        return halves.astype("<u2", copy=False).view(np.uint8)
    count = len(exponents)
    words = exponents.astype(np.uint32) << np.uint32(24)
    words |= np.frombuffer(others[2 * count :], np.uint8).astype(np.uint32) << np.uint32(16)
    words |= np.frombuffer(others[: 2 * count], "<u2")
    words = (words >> np.uint32(1)) | (words << np.uint32(31))
    return words.astype("<u4", copy=False).view(np.uint8)


def _flat(array: npt.NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
