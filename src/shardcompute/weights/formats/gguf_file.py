"""The GGUF format (versions 2 and 3, little-endian), read strictly and only as far as its header goes.

Metadata values become bool, int, float, str and lists of these. Shapes are given outermost first
(`[out, in]`), the reverse of the file's order. Text is UTF-8; tokenizers of some files hold raw bytes, and
such values decode with `surrogateescape`, so that no byte is lost. Counts and lengths are compared with the
bytes left in the file before anything of their size is made; what does not add up is a `CorruptModelError`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.bytes import ByteSource
from shardcompute.weights.formats.tensor_file import SingleTensorFile, Span, TensorEntry

_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 28
_MAX_ARRAY_LENGTH = 1 << 24
_MAX_ARRAY_DEPTH = 4
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 56

_MAX_STORED_BYTES = 1 << 16
_TOKENIZER = "tokenizer."

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBER_TYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_SMALLEST_VALUE_BYTES = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {
    code: np.dtype(name).itemsize for code, name in _NUMBER_TYPES.items()
}
_SMALLEST_PAIR_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 4 + 8

# ggml's type number → name, elements in a block, bytes of a block.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 31: ("Q4_0_4_4", 32, 18),
    32: ("Q4_0_4_8", 32, 18),
    33: ("Q4_0_8_8", 32, 18), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 36: ("IQ4_NL_4_4", 32, 18),
    37: ("IQ4_NL_4_8", 32, 18), 38: ("IQ4_NL_8_8", 32, 18), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip


class GgufFile(SingleTensorFile):
    """A GGUF file, with its key-values as they are stored: each one's type and bytes, for whoever writes them again.

    Those of the tokenizer are left out: they are long, and ours is made from `metadata`.
    """

    def __init__(
        self,
        source: ByteSource,
        entries: Mapping[str, TensorEntry],
        metadata: Mapping[str, Any],
        stored: Mapping[str, bytes],
    ) -> None:
        super().__init__(source, entries, metadata)
        self.stored = stored

    def forget_metadata(self) -> None:
        """Free what only the first part of a split model is asked for."""
        self.metadata, self.stored = {}, {}


def open_gguf(source: ByteSource, *, with_tokenizer: bool = True) -> GgufFile:
    """Read and check the header of a GGUF file that is a whole model; no tensor is read. Without its tokenizer, a
    hundred thousand texts are passed over that are most of what the header has."""
    file = read_gguf(source, with_tokenizer=with_tokenizer)
    count = file.metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(
            f"{source.name} is one of {count} parts of a split model, and its name does not tell the others",
            hint=f"give all parts the names they were published with, such as model-00001-of-{count:05d}.gguf",
        )
    return file


def read_gguf(source: ByteSource, *, with_tokenizer: bool = True) -> GgufFile:
    """The same of a file that may be a part of a model (see `gguf_parts`)."""
    cursor = _Cursor(source)
    _check_version(source, cursor)
    tensor_count = cursor.take_count("tensors", _SMALLEST_TENSOR_BYTES)
    pair_count = cursor.take_count("metadata values", _SMALLEST_PAIR_BYTES)
    metadata, spans = _take_metadata(cursor, pair_count, with_tokenizer)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _corrupt(source.name, f"has general.alignment {alignment!r}, which is not a power of two")
    found = [_take_tensor(cursor, alignment) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    entries = _place_tensors(source, found, data_start)
    stored = {key: bytes(source.read(start, stop - start)) for key, (start, stop) in spans.items()}
    return GgufFile(source, entries, metadata, stored)


class _Cursor:
    """Walks over the header, fetching it from the source a chunk at a time."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._buffer = b""
        self._buffer_start = 0
        self.position = 0

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def bytes_left(self) -> int:
        return self._source.size - self.position

    def skip(self, length: int) -> None:
        self.position = self._end_of(length)

    def _end_of(self, length: int) -> int:
        end = self.position + length
        if end > min(self._source.size, _MAX_HEADER_BYTES):
            fault = (
                "is cut short inside its header" if end > self._source.size else "has an absurdly long header"
            )
            raise _corrupt(self.name, fault)
        return end

    def take(self, length: int) -> bytes:
        end = self._end_of(length)
        if end > self._buffer_start + len(self._buffer):
            wanted = min(max(length, _CHUNK_BYTES), self._source.size - self.position)
            self._buffer = bytes(self._source.read(self.position, wanted))
            self._buffer_start = self.position
        start = self.position - self._buffer_start
        self.position = end
        return self._buffer[start : start + length]

    def take_u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def take_u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def take_count(self, what: str, smallest_bytes: int) -> int:
        """A count of things that take at least `smallest_bytes` each."""
        count = self.take_u64()
        if count * smallest_bytes > self.bytes_left:
            raise _corrupt(self.name, f"claims {count} {what} with {self.bytes_left} bytes left")
        return count

    def take_name(self, what: str) -> str:
        """A key or a tensor name: short, strict UTF-8."""
        length = self.take_u64()
        if length > _MAX_NAME_BYTES:
            raise _corrupt(self.name, f"has {what} of {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _corrupt(self.name, f"has {what} that is not UTF-8") from error

    def take_text(self) -> str:
        raw = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw.decode("utf-8", errors="surrogateescape")


def _check_version(source: ByteSource, cursor: _Cursor) -> None:
    if source.size < 8 or cursor.take(4) != b"GGUF":
        raise _corrupt(source.name, "does not start like a GGUF file")
    version = cursor.take_u32()
    if version in {2, 3}:
        return
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(
            f"{source.name} is a big-endian GGUF file", hint="use the little-endian version of this model"
        )
    raise UnsupportedModelError(
        f"{source.name} has GGUF version {version}; versions 2 and 3 can be read",
        hint="convert the model again with a current llama.cpp",
    )


def _take_metadata(
    cursor: _Cursor, count: int, with_tokenizer: bool
) -> tuple[dict[str, Any], dict[str, Span]]:
    """Values by key, and where in the file those lie that are not the tokenizer's."""
    metadata: dict[str, Any] = {}
    spans: dict[str, Span] = {}
    keys: set[str] = set()
    for _ in range(count):
        key = cursor.take_name("a metadata key")
        if key in keys:
            raise _corrupt(cursor.name, f"has the metadata key {key!r} twice")
        keys.add(key)
        start = cursor.position
        if key.startswith(_TOKENIZER) and not with_tokenizer:
            _skip_value(cursor, cursor.take_u32(), depth=0)
            continue
        metadata[key] = _take_value(cursor, cursor.take_u32(), depth=0)
        if not key.startswith(_TOKENIZER) and cursor.position - start <= _MAX_STORED_BYTES:
            spans[key] = (start, cursor.position)
    return metadata, spans


def _take_value(cursor: _Cursor, code: int, depth: int) -> Any:
    if code == _STRING:
        return cursor.take_text()
    if code == _ARRAY:
        return _take_array(cursor, depth + 1)
    return _take_numbers(cursor, code, 1)[0]


def _skip_value(cursor: _Cursor, code: int, depth: int) -> None:
    """Go past a value of which nothing is wanted: nothing of its size is made."""
    if code == _STRING:
        cursor.skip(cursor.take_u64())
    elif code == _ARRAY:
        inner, count = _array_head(cursor, depth + 1)
        if inner in (_STRING, _ARRAY):
            for _ in range(count):
                _skip_value(cursor, inner, depth + 1)
        else:
            cursor.skip(count * _number_bytes(cursor, inner))
    else:
        cursor.skip(_number_bytes(cursor, code))


def _number_bytes(cursor: _Cursor, code: int) -> int:
    if code not in _SMALLEST_VALUE_BYTES:
        raise _corrupt(cursor.name, f"has a metadata value of the unknown type {code}")
    return _SMALLEST_VALUE_BYTES[code]


def _array_head(cursor: _Cursor, depth: int) -> tuple[int, int]:
    """Type and number of elements."""
    if depth > _MAX_ARRAY_DEPTH:
        raise _corrupt(cursor.name, f"nests arrays more than {_MAX_ARRAY_DEPTH} deep")
    code = cursor.take_u32()
    count = cursor.take_count("array elements", _SMALLEST_VALUE_BYTES.get(code, 1))
    if count > _MAX_ARRAY_LENGTH:
        raise _corrupt(cursor.name, f"has a metadata array of {count} elements")
    return code, count


def _take_array(cursor: _Cursor, depth: int) -> list[Any]:
    code, count = _array_head(cursor, depth)
    if code == _STRING:
        return [cursor.take_text() for _ in range(count)]
    if code == _ARRAY:
        return [_take_array(cursor, depth + 1) for _ in range(count)]
    return _take_numbers(cursor, code, count)


def _take_numbers(cursor: _Cursor, code: int, count: int) -> list[Any]:
    if code == _BOOL:
        raw = cursor.take(count)
        if raw.strip(b"\0\1"):
            raise _corrupt(cursor.name, "has a truth value that is neither 0 nor 1")
        return [value == 1 for value in raw]
    raw = cursor.take(count * _number_bytes(cursor, code))
    values: list[Any] = np.frombuffer(raw, np.dtype(_NUMBER_TYPES[code])).tolist()
    return values


def _take_tensor(cursor: _Cursor, alignment: int) -> TensorEntry:
    """One tensor's description; its offset still counts from the start of the tensor bytes."""
    name = cursor.take_name("a tensor name")
    rank = cursor.take_u32()
    if rank > _MAX_DIMENSIONS:
        raise _corrupt(cursor.name, f"gives {name!r} {rank} dimensions")
    sizes = struct.unpack(f"<{rank}Q", cursor.take(8 * rank))
    code, offset = cursor.take_u32(), cursor.take_u64()
    if code not in GGML_TYPES:
        raise UnsupportedModelError(
            f"{name!r} in {cursor.name} has the number type {code}, which is not known here",
            hint="choose a version of the model in a common type such as Q4_K_M or Q8_0",
        )
    dtype, block_size, block_bytes = GGML_TYPES[code]
    if sizes and sizes[0] % block_size:
        raise _corrupt(
            cursor.name, f"gives {name!r} rows of {sizes[0]}, not whole {dtype} blocks of {block_size}"
        )
    if rank == 0 and block_size > 1:
        raise _corrupt(cursor.name, f"gives {name!r} no dimensions but {dtype} blocks")
    size_bytes = math.prod(sizes) // block_size * block_bytes
    if math.prod(size or 1 for size in sizes) > _MAX_ELEMENTS:  # even an empty tensor must stay addressable
        raise _corrupt(cursor.name, f"gives {name!r} a shape too large for any file")
    if offset % alignment:
        raise _corrupt(cursor.name, f"places {name!r} at {offset}, which is not aligned to {alignment}")
    return TensorEntry(name, dtype, tuple(reversed(sizes)), offset, size_bytes)


def _place_tensors(
    source: ByteSource, found: list[TensorEntry], data_start: int
) -> Mapping[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for entry in found:
        if entry.name in entries:
            raise _corrupt(source.name, f"has the tensor {entry.name!r} twice")
        start = data_start + entry.offset
        stop = start + entry.size_bytes
        if stop > source.size:
            raise _corrupt(
                source.name, f"is cut short: {entry.name!r} ends at byte {stop}, the file at {source.size}"
            )
        entries[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, start, entry.size_bytes)
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.size_bytes)):
        if entry.offset < end:
            raise _corrupt(source.name, f"is damaged: {entry.name!r} overlaps another tensor")
        end = entry.offset + entry.size_bytes
    return entries


def _corrupt(file: str, fault: str) -> CorruptModelError:
    return CorruptModelError(f"{file} {fault}", hint="fetch the file again; it is damaged or not GGUF")
