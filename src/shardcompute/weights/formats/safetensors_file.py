"""The safetensors format, read strictly: one file, or shards behind `model.safetensors.index.json`.

Everything the header says is checked before it is believed: sizes against shapes, ranges against the file, no
overlaps, no holes, nothing left over. Whatever is wrong is a `CorruptModelError` that names the file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.formats.bytes import ByteSource
from shardcompute.weights.formats.tensor_file import SingleTensorFile, Strand, TensorEntry, find_entry

_MAX_HEADER_BYTES = 100_000_000
_MAX_ELEMENTS = 1 << 56

_BITS_PER_ELEMENT = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def open_safetensors(source: ByteSource) -> SingleTensorFile:
    """Read and check the header of one safetensors file; no tensor is read."""
    if source.size < 8:
        raise _corrupt(source.name, f"is {source.size} bytes long, too short for a header")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > min(_MAX_HEADER_BYTES, source.size - 8):
        raise _corrupt(source.name, f"claims a header of {length} bytes in a file of {source.size}")
    header = _parse_object(source.name, bytes(source.read(8, length)))
    metadata = _checked_metadata(source.name, header.pop("__metadata__", {}))
    data_start = 8 + length
    entries = {name: _checked_entry(source.name, name, value, data_start) for name, value in header.items()}
    _check_coverage(source, entries, data_start)
    return SingleTensorFile(source, entries, metadata)


def open_sharded(open_source: Callable[[str], ByteSource], index_json: bytes) -> ShardedTensorFile:
    """The tensors of an index; `open_source` gives a shard by its file name when it is first needed."""
    name = "model.safetensors.index.json"
    index = _parse_object(name, index_json)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise _corrupt(name, "has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise _corrupt(name, f"places {tensor!r} in {shard!r}, which is not a plain file name")
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _corrupt(name, "has metadata that is not an object")
    return ShardedTensorFile(name, open_source, weight_map, metadata)


class ShardedTensorFile:
    """A `TensorFile` over several safetensors files, each opened when a tensor of it is first asked for."""

    def __init__(
        self,
        name: str,
        open_source: Callable[[str], ByteSource],
        weight_map: Mapping[str, str],
        metadata: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.metadata = metadata
        self.entries: Mapping[str, TensorEntry] = _ShardEntries(self)
        self.weight_map = weight_map
        self._open_source = open_source
        self._shards: dict[str, SingleTensorFile] = {}
        self._lock = threading.Lock()

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        return self._shard_with(name).read_bytes(name, offset, length)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        return self._shard_with(name).read_rows(name, start, stop)

    def locate(self, name: str) -> tuple[Strand, ...]:
        return self._shard_with(name).locate(name)

    def lasting(self, name: str) -> ByteSource | None:
        return self._shard_with(name).lasting(name)

    def find_in_shard(self, name: str) -> TensorEntry:
        """The entry of `name` (KeyError if the index lacks it), whose offset counts within its shard."""
        return find_entry(self._open_shard(self.weight_map[name]), name)

    def close(self) -> None:
        with self._lock:
            for shard in self._shards.values():
                shard.close()
            self._shards.clear()

    def _shard_with(self, name: str) -> SingleTensorFile:
        find_entry(self, name)
        return self._open_shard(self.weight_map[name])

    def _open_shard(self, shard: str) -> SingleTensorFile:
        with self._lock:
            if shard not in self._shards:
                source = self._open_source(shard)
                try:
                    self._shards[shard] = open_safetensors(source)
                except BaseException:
                    source.close()
                    raise
            return self._shards[shard]


class _ShardEntries(Mapping[str, TensorEntry]):
    """Names come from the index; an entry itself opens its shard."""

    def __init__(self, file: ShardedTensorFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> TensorEntry:
        return self._file.find_in_shard(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file.weight_map

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.weight_map)

    def __len__(self) -> int:
        return len(self._file.weight_map)


def _parse_object(name: str, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(name, f"holds JSON that cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _corrupt(name, "holds JSON that is not an object")
    return value


def _checked_metadata(file: str, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(file, "has __metadata__ that is not text by name")
    return metadata


def _checked_entry(file: str, name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(file, f"describes {name!r} by something other than dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS_PER_ELEMENT:
        raise _corrupt(file, f"gives {name!r} the unknown number type {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(file, f"gives {name!r} an impossible shape or data_offsets")
    elements = 1
    for size in shape:
        elements *= size or 1  # even an empty tensor must stay addressable
        if elements > _MAX_ELEMENTS:
            raise _corrupt(file, f"gives {name!r} a shape too large for any file")
    bits = 0 if 0 in shape else elements * _BITS_PER_ELEMENT[dtype]
    start, stop = offsets
    if (stop - start) * 8 != bits:
        raise _corrupt(file, f"gives {name!r} {stop - start} bytes where {dtype} {shape} needs {bits / 8:g}")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, stop - start)


def _check_coverage(source: ByteSource, entries: Mapping[str, TensorEntry], data_start: int) -> None:
    """The tensors must fill the file from the header to its end, without a hole or an overlap."""
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.size_bytes)):
        if entry.offset != end:
            fault = "overlaps another tensor" if entry.offset < end else "has a hole before it"
            raise _corrupt(source.name, f"is damaged: {entry.name!r} {fault}")
        end += entry.size_bytes
    if end != source.size:
        fault = "is cut short" if end > source.size else "has bytes left over at its end"
        raise _corrupt(source.name, f"{fault}: its header describes {end} bytes, it has {source.size}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in {".", ".."} and not set(name) & set("/\\:\0")


def _corrupt(file: str, fault: str) -> CorruptModelError:
    return CorruptModelError(f"{file} {fault}", hint="fetch the file again; it is damaged or not safetensors")
