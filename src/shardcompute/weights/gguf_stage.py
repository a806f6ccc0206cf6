"""Stages as GGUF files of their own, for llama.cpp: some layers of a model, numbered from 0.

A `GgufHeader` is what such a file needs besides the tensors of its layers, embedding and head: the original's
key-values as they were stored, and its small tensors that belong to no layer. It travels beside the weights.
The vocabulary's texts are left out, because token ids are all that passes here. A stage without embedding and head
gets a stub of them; a last stage that has a head of its own gets an embedding that takes no room on the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.spec import Stage
from shardcompute.weights.attached import read_attachment
from shardcompute.weights.formats.gguf_file import GgufFile
from shardcompute.weights.formats.gguf_parts import GgufParts
from shardcompute.weights.formats.gguf_writer import GgufTensor, stored_text, stored_u32, write_gguf
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.sources.disk import check_room, disk_errors

HEADER = "gguf"
"""The attachment that holds an encoded header."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"

CUTTABLE = frozenset({
    "arcee", "chatglm", "command-r", "dbrx", "exaone", "falcon", "gptneox", "internlm2", "llama", "nemotron", "olmo",
    "olmoe", "orion", "phi2", "phi3", "plamo", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "refact", "seed_oss",
    "stablelm", "starcoder2", "xverse",
})  # fmt: skip
"""Architectures whose layers do the same whatever their number is, with nothing between embedding and first layer,
as the pinned llama.cpp builds them. Others (every sixth layer attends to all, the scale follows from the number of
layers, …) run in one piece."""

EXACT_ROWS = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0",
    "Q2_0",
})  # fmt: skip
"""Number types whose rows llama.cpp gives the same bits in any company, where that was tried (AVX2). Of the others (K
quants, most I quants) it refuses a model at start if that is not so on the machine."""

_NEEDS_NO_HEAD = frozenset({
    "arcee", "chatglm", "exaone", "falcon", "llama", "olmo", "phi3", "qwen2", "qwen3", "qwen3moe", "refact", "seed_oss",
    "starcoder2",
})  # fmt: skip
"""Those that llama.cpp loads without a head, which then is the embedding. The others get a hole for one."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_STUB_ROWS = 32
_SMALL_BYTES = 4 << 20
_HEADER_BYTES = 32 << 20
_COPIED_BYTES = 8 << 20
_STALE_S = 24 * 3600
_ARRAY = 9
_NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class SmallTensor(msgspec.Struct, frozen=True):
    """A tensor of no layer: its type, shape (outermost first) and bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


class GgufHeader(msgspec.Struct, frozen=True):
    """What stages of a GGUF model share. `values` are stored key-values: the type's number, then the bytes."""

    architecture: str
    layer_count: int
    values: dict[str, bytes]
    tensors: dict[str, SmallTensor]
    has_head: bool
    too_large: str = ""
    """A tensor of no layer that is too large to travel in a header."""


def header_of(tensors: TensorFile) -> GgufHeader | None:
    """The header of an original file; None if it is not GGUF."""
    if not isinstance(tensors, GgufFile | GgufParts):
        return None
    architecture = str(tensors.metadata["general.architecture"])
    others = {
        name: entry
        for name, entry in tensors.entries.items()
        if _LAYER.fullmatch(name) is None and name not in (EMBEDDING, HEAD)
    }
    small = {
        name: SmallTensor(entry.dtype, entry.shape, bytes(tensors.read_bytes(name, 0, entry.size_bytes)))
        for name, entry in others.items()
        if entry.size_bytes <= _SMALL_BYTES
    }
    return GgufHeader(
        architecture,
        int(tensors.metadata[f"{architecture}.block_count"]),
        dict(tensors.stored),
        small,
        HEAD in tensors.entries,
        next((name for name in others if name not in small), ""),
    )


def header_attachment(tensors: TensorFile) -> dict[str, bytes]:
    """What travels beside the weights of an original file; nothing if it is not GGUF."""
    header = header_of(tensors)
    return {} if header is None else {HEADER: msgspec.msgpack.encode(header)}


def served_header(tensors: TensorFile) -> GgufHeader:
    """The header that came with a model; UnsupportedModelError if it came from no GGUF file."""
    content = read_attachment(tensors, HEADER)
    if content is None:
        raise not_gguf(tensors.name)
    if len(content) > _HEADER_BYTES:
        raise CorruptModelError(f"the GGUF header of {tensors.name} takes {len(content)} bytes")
    try:
        return msgspec.msgpack.decode(content, type=GgufHeader)
    except msgspec.MsgspecError as error:
        raise CorruptModelError(
            f"the GGUF header of {tensors.name} cannot be read: {error}",
            hint="run the same release on every node",
        ) from error


def not_gguf(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is not a GGUF file, and llama.cpp reads no other",
        hint="leave --backend away, or use its GGUF file",
    )


@contextlib.contextmanager
def stage_file(
    header: GgufHeader, tensors: TensorFile, stage: Stage, vocab_size: int, folder: Path
) -> Iterator[Path]:
    """A stage's own file in `folder`, deleted when the block is left: whoever has mapped it keeps it until then.

    Only the stage's tensors are read, one piece at a time. Raises DiskFullError before the disk is full.
    """
    written = list(_tensors_of(header, tensors, stage, vocab_size))
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
    check_room(folder, sum(each.size_bytes for each in written if not each.is_hole), "a stage's file")
    with disk_errors(folder):
        descriptor, name = tempfile.mkstemp(suffix=".gguf", prefix="stage-", dir=folder)
        path = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write_gguf(file, _values_of(header, stage, vocab_size), written)
            yield path
        finally:
            path.unlink(missing_ok=True)


def _tensors_of(
    header: GgufHeader, tensors: TensorFile, stage: Stage, vocab_size: int
) -> Iterator[GgufTensor]:
    for name, small in header.tensors.items():
        yield GgufTensor(name, small.dtype, small.shape, [small.content])
    yield _embedding(header, tensors, stage, vocab_size)
    if stage.is_last and header.has_head:
        yield _copied(tensors, HEAD, HEAD)
    elif header.has_head and header.architecture not in _NEEDS_NO_HEAD:
        yield _hole(HEAD, _vocabulary_rows(header, stage, vocab_size), tensors)
    for name in tensors.entries:
        match = _LAYER.fullmatch(name)
        if match is not None and stage.start <= int(match[1]) < stage.stop:
            yield _copied(tensors, name, f"blk.{int(match[1]) - stage.start}.{match[2]}")


def _copied(tensors: TensorFile, stored: str, name: str) -> GgufTensor:
    entry = tensors.entries[stored]

    def pieces() -> Iterator[memoryview]:
        for at in range(0, entry.size_bytes, _COPIED_BYTES):
            yield tensors.read_bytes(stored, at, min(_COPIED_BYTES, entry.size_bytes - at))

    return GgufTensor(name, entry.dtype, entry.shape, pieces())


def _embedding(header: GgufHeader, tensors: TensorFile, stage: Stage, vocab_size: int) -> GgufTensor:
    if stage.is_first or (stage.is_last and not header.has_head):
        return _copied(tensors, EMBEDDING, EMBEDDING)
    return _hole(EMBEDDING, _vocabulary_rows(header, stage, vocab_size), tensors)


def _vocabulary_rows(header: GgufHeader, stage: Stage, vocab_size: int) -> int:
    """How many tokens the stage's file knows of. Where other tensors may have an element for each, all of them."""
    has_all = stage.is_first or stage.is_last or header.architecture not in _NEEDS_NO_HEAD
    return vocab_size if has_all else _STUB_ROWS


def _hole(name: str, rows: int, tensors: TensorFile) -> GgufTensor:
    width = tensors.entries[EMBEDDING].shape[-1]
    return GgufTensor(name, "Q4_0" if width % 32 == 0 else "F16", (rows, width), None)


def _values_of(header: GgufHeader, stage: Stage, vocab_size: int) -> dict[str, bytes]:
    """The original's key-values, with those that count layers cut to the stage's."""
    prefix = f"{header.architecture}."
    values = {
        key: _cut_array(value, header.layer_count, stage) if key.startswith(prefix) else value
        for key, value in header.values.items()
        if not key.startswith(("tokenizer.", "split.")) and key != "general.alignment"
    }
    rows = _vocabulary_rows(header, stage, vocab_size)
    return values | {
        f"{prefix}block_count": stored_u32(stage.count),
        f"{prefix}vocab_size": stored_u32(rows),
        "tokenizer.ggml.model": stored_text("no_vocab"),
    }


def _cut_array(value: bytes, layers: int, stage: Stage) -> bytes:
    """An array with an element for every layer loses those of the others; anything else stays."""
    if len(value) < 16 or struct.unpack_from("<I", value)[0] != _ARRAY:
        return value
    code, count = struct.unpack_from("<IQ", value, 4)
    size = _NUMBER_BYTES.get(code)
    if count != layers or size is None:
        return value
    elements = value[16 + stage.start * size : 16 + stage.stop * size]
    return struct.pack("<IIQ", _ARRAY, code, stage.count) + elements


def _sweep(folder: Path) -> None:
    """Delete what a process that was killed while it wrote has left."""
    for path in folder.glob("stage-*.gguf"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _STALE_S:
                path.unlink()
