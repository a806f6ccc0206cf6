"""GGUF files cut into parts the way llama.cpp's `gguf-split` does it: all metadata in the first, tensors in turn."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf

from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.gguf_file import GgufFile, open_gguf
from shardcompute.weights.formats.gguf_writer import GgufTensor, stored_u32, write_gguf

_U16, _I32 = 2, 5


def split_keys(number: int, count: int, tensors: int) -> dict[str, bytes]:
    """Stored as `gguf-split` stores them."""
    return {
        "split.no": struct.pack("<IH", _U16, number),
        "split.count": struct.pack("<IH", _U16, count),
        "split.tensors.count": struct.pack("<Ii", _I32, tensors),
    }


def split_gguf(path: Path, count: int, folder: Path) -> list[Path]:
    """The parts of a whole file, in `folder`: tensors are dealt out one by one, so that layers lie in several parts."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open_gguf(LocalBytes(path))
    try:
        names = list(file.entries)
        dealt = [names[number::count] for number in range(count)]
        values = _stored_values(path)
        return [
            _write_part(folder, path.stem, file, part, number, count, values if number == 0 else {})
            for number, part in enumerate(dealt)
        ]
    finally:
        file.close()


def _write_part(
    folder: Path,
    stem: str,
    file: GgufFile,
    names: Sequence[str],
    number: int,
    count: int,
    values: Mapping[str, bytes],
) -> Path:
    part = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
    tensors = [
        GgufTensor(name, entry.dtype, entry.shape, [file.read_bytes(name, 0, entry.size_bytes)])
        for name, entry in ((name, file.entries[name]) for name in names)
    ]
    with part.open("wb") as written:
        write_gguf(written, {**values, **split_keys(number, count, len(file.entries))}, tensors)
    return part


def _stored_values(path: Path) -> dict[str, bytes]:
    """All key-values with their types, as the reference reads them, also the tokenizer's."""
    values = {}
    for key, field in gguf.GGUFReader(path).fields.items():
        if not key.startswith("GGUF."):
            values[key] = b"".join(part.tobytes() for part in field.parts[2:])
    return values | {"general.alignment": stored_u32(32)}
