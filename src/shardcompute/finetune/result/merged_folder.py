"""A merged model: the base's checkpoint folder once more, with an adapter in its weights.

Tensors keep their names and number types, so that whatever opens the base opens this. Weights are written a piece at a
time, in files of a bounded size, into a folder beside the wanted one that takes its name when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardcompute.core.errors import UsageError
from shardcompute.finetune.peft_folder import AdapterCard, describe_card
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.sources.disk import check_room, disk_errors

SHARD_BYTES = 2 << 30
_PIECE_BYTES = 16 << 20
_KEPT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_KEPT_BYTES = 64 << 20
_INDEX = "model.safetensors.index.json"


def check_merge(checkpoint: Checkpoint, kind: str, out: Path) -> None:
    """Whether what a run learns can be merged into a folder that is still to be made; said before its first step."""
    if kind == "bottleneck":
        raise UsageError(
            "a bottleneck is no change of weights, and cannot be merged into them",
            hint="leave out --bottleneck or --merge",
        )
    checkpoint.check_mergeable()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already", hint="choose another folder for --merge")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out.parent, _weight_bytes(checkpoint.tensors), "a merged model")


def write_merged_folder(
    out: Path, checkpoint: Checkpoint, adapter: Path, card: AdapterCard, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """The checkpoint with the adapter of a folder in it."""
    merged = checkpoint.with_merged(adapter)
    making = out.with_name(f"{out.name}.{os.getpid()}")
    with disk_errors(out, lambda: _weight_bytes(checkpoint.tensors)):
        making.mkdir(parents=True)
        try:
            _copy_small_files(checkpoint, making)
            (making / "README.md").write_text(describe_card(card, is_merged=True), encoding="utf-8")
            _write_weights(merged.tensors, making, shard_bytes)
            if out.exists():
                out.rmdir()
            making.rename(out)
        finally:
            shutil.rmtree(making, ignore_errors=True)


def _weight_bytes(tensors: TensorFile) -> int:
    return sum(entry.size_bytes for entry in tensors.entries.values())


def _copy_small_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Config, tokenizer and the like, and the base's licence; never code."""
    for name in checkpoint.files.files:
        is_kept = name.endswith(_KEPT_SUFFIXES) or name.upper().startswith("LICENSE")
        if not is_kept or name == _INDEX or Path(name).name != name:
            continue
        with contextlib.closing(checkpoint.files.open(name)) as source:
            if source.size <= _KEPT_BYTES:
                (folder / name).write_bytes(source.read(0, source.size))


def _write_weights(tensors: TensorFile, folder: Path, shard_bytes: int) -> None:
    shards = _cut_shards(tensors, shard_bytes)
    if len(shards) == 1:
        _write_shard(tensors, shards[0], folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(tensors, names, folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": _weight_bytes(tensors)}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _cut_shards(tensors: TensorFile, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors.entries):
        more = tensors.entries[name].size_bytes
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _write_shard(tensors: TensorFile, names: Sequence[str], file: Path) -> None:
    with file.open("wb") as out:
        header = json.dumps(_header(tensors, names), separators=(",", ":")).encode()
        padded = header + b" " * (-len(header) % 8)
        out.write(len(padded).to_bytes(8, "little") + padded)
        for name in names:
            size = tensors.entries[name].size_bytes
            for start in range(0, size, _PIECE_BYTES):
                out.write(tensors.read_bytes(name, start, min(_PIECE_BYTES, size - start)))
        out.flush()
        os.fsync(out.fileno())


def _header(tensors: TensorFile, names: Sequence[str]) -> Mapping[str, Any]:
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        entry = tensors.entries[name]
        stop = start + entry.size_bytes
        found[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    return found
