"""The GGUF format (version 3, little-endian), written: key-values as they are stored, tensors a piece at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.formats.gguf_file import GGML_TYPES

_ALIGNMENT = 32
_U32, _F32, _STRING = 4, 6, 8
_TYPES = {name: (code, elements, size) for code, (name, elements, size) in GGML_TYPES.items()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor to be written: its type, its shape (outermost first) and its bytes in pieces.

    Without bytes it becomes a hole: zeros that take no room on most disks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[bytes | memoryview] | None

    @property
    def is_hole(self) -> bool:
        return self.pieces is None

    @property
    def size_bytes(self) -> int:
        _, elements, size = _TYPES[self.dtype]
        return math.prod(self.shape) // elements * size


def stored_u32(number: int) -> bytes:
    """A number as a key-value is stored: its type, then its bytes."""
    return struct.pack("<II", _U32, number)


def stored_f32(number: float) -> bytes:
    return struct.pack("<If", _F32, number)


def stored_text(text: str) -> bytes:
    return struct.pack("<IQ", _STRING, len(text.encode())) + text.encode()


def write_gguf(file: IO[bytes], values: Mapping[str, bytes], tensors: Sequence[GgufTensor]) -> None:
    """Write a whole file. CorruptModelError where a tensor has other bytes than its shape calls for."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))]
    for key, value in values.items():
        head += [_name(key), value]
    offset = 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        head += [_name(tensor.name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        head.append(struct.pack("<IQ", _TYPES[tensor.dtype][0], offset))
        offset += _aligned(tensor.size_bytes)
    file.write(b"".join(head))
    start = _aligned(file.tell())
    for tensor in tensors:
        file.seek(start)
        written = sum(file.write(piece) for piece in tensor.pieces or ())
        if not tensor.is_hole and written != tensor.size_bytes:
            raise CorruptModelError(
                f"{tensor.name!r} has {written} bytes instead of {tensor.size_bytes}",
                hint="fetch the model again",
            )
        start += _aligned(tensor.size_bytes)
    file.truncate(start)


def _name(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
