"""Measures what models in each stored form take in memory on this machine, for the table in docs/memory.md.

`python scripts/measure_memory.py [BACKEND …]` prints one row for each backend and form: what the file has, what
`backends.footprint` says is held, and what a process of its own is resident with, less what it was before. Each is
measured in a fresh process, because memory that was freed may stay with one.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.footprint import holding_of
from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix, rows_of
from shardcompute.core.batch import Segment
from shardcompute.core.process_memory import give_back_large_blocks
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import Layer, ModelSpec, Rope, whole
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.formats.quantise import convert
from shardcompute.weights.formats.tensor_file import TensorEntry
from shardcompute.weights.held import HeldSizes, held_sizes_of_entries

_FORMS = ("F32", "F16", "BF16", *BLOCK_LAYOUTS, "int8", "int4", "mixed")
_LAYERS, _HIDDEN, _INTERMEDIATE, _VOCABULARY = 8, 1024, 2816, 16384
_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "int8": 9 / 8, "int4": 6 / 8, "mixed": 9.2 / 8}
_ROOMS = {"onnx": "shardcompute.backends.ort", "torch": "shardcompute.backends.torch"}
_CONTEXT, _ROWS, _KV_TOKENS = 4096, 512, 4096


def make_spec() -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=tuple(Layer() for _ in range(_LAYERS)),
        hidden=_HIDDEN,
        heads=16,
        kv_heads=4,
        head_dim=64,
        intermediate=_INTERMEDIATE,
        vocab_size=_VOCABULARY,
        context_length=_CONTEXT,
        ropes=(Rope(tuple(10_000.0 ** (-i / 32) for i in range(32))),),
        norm_eps=1e-5,
        attention_scale=0.125,
    )


class NoiseRows:
    """A table of noise that is in no memory: few rows stand for all (see `backends.matrix.StoredRows`)."""

    def __init__(self, few: Matrix, height: int) -> None:
        self._few = few
        self.shape = (height, few.shape[1])

    def read(self, rows: Array) -> Matrix:
        return rows_of(self._few, rows % self._few.shape[0])

    def close(self) -> None:
        """There is nothing to close."""


class RandomTensors:
    """Gives a decoder tensors of noise in one form, each when it asks for it, as a file would."""

    def __init__(self, spec: ModelSpec, form: str) -> None:
        self._form = form
        self._noise = np.random.default_rng(0)
        hidden, wide = spec.hidden, spec.heads * spec.head_dim
        narrow = spec.kv_heads * spec.head_dim
        self.shapes = {
            "embedding": (spec.vocab_size, hidden),
            "head": (spec.vocab_size, hidden),
            "attention.q": (wide, hidden),
            "attention.k": (narrow, hidden),
            "attention.v": (narrow, hidden),
            "attention.out": (hidden, wide),
            "mlp.gate": (spec.intermediate, hidden),
            "mlp.up": (spec.intermediate, hidden),
            "mlp.down": (hidden, spec.intermediate),
        }

    def stored_rows(self, name: str) -> NoiseRows | None:
        """As a file would that is read in its own form."""
        height, columns = self.shapes[name]
        if self._form not in (*BLOCK_LAYOUTS, "F32", "F16", "BF16"):
            return None
        return NoiseRows(self._noisy(16, columns), height)

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        return self._noisy(*self.shapes[name])

    def _noisy(self, rows: int, columns: int) -> Matrix:
        layout = BLOCK_LAYOUTS.get(self._form)
        if layout is not None:
            shape = (rows, columns // layout.block_size)
            codes = self._noise.integers(0, 256, (*shape, layout.code_bytes), dtype=np.uint8)
            scales = np.full(shape, 1e-3, np.float32)
            shifts = np.zeros(shape, np.float32) if layout.has_shifts else None
            return BlockMatrix(layout.bits, layout.block_size, codes, scales, shifts)
        values = self._noise.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        if self._form == "F16":
            return DenseMatrix(values.astype(np.float16))
        if self._form == "BF16":
            return DenseMatrix((values.view(np.uint32) >> 16).astype(np.uint16))
        return DenseMatrix(values) if self._form == "F32" else convert(DenseMatrix(values), self._form)

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return np.ones(_HIDDEN, np.float32)


def status_bytes() -> dict[str, int]:
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def sizes_of_form(holder: str, form: str) -> tuple[int, HeldSizes]:
    """Bytes in a file, and what the footprint says of the model in this form."""
    spec = make_spec()
    shapes = RandomTensors(spec, form).shapes
    places = {name: TensorPlace(name, shape) for name, shape in shapes.items()}
    model = {
        "embedding": places.pop("embedding"),
        "head": places.pop("head"),
        "norm": TensorPlace("norm", (_HIDDEN,)),
    }
    layout = Layout(model, tuple(dict(places) for _ in range(_LAYERS)))
    dtype, wanted = (form, "native") if form in (*BLOCK_LAYOUTS, "F32", "F16", "BF16") else ("F32", form)
    entries = {
        name: TensorEntry(name, dtype, shape, 0, _file_bytes(form, shape))
        for name, shape in {**shapes, "norm": (_HIDDEN,)}.items()
    }
    held = held_sizes_of_entries(spec, layout, entries, wanted, context_length=_CONTEXT)
    counts = {name: 1 if name in ("embedding", "head", "norm") else _LAYERS for name in entries}
    file_bytes = sum(entries[name].size_bytes * count for name, count in counts.items())
    return file_bytes, next(each for each in held if each.holder == holder)


def _file_bytes(form: str, shape: tuple[int, ...]) -> int:
    weights = math.prod(shape)
    layout = BLOCK_LAYOUTS.get(form)
    if layout is not None and len(shape) > 1:
        return weights * layout.file_bytes // layout.file_block
    return int(weights * _BYTES.get(form, 4.0))


def measure(backend: str, form: str) -> dict[str, Any]:
    """What holding the model adds to the process, what a long prompt adds to that, and the peaks of both."""
    importlib.import_module(_ROOMS[backend])
    from shardcompute.runtime.shard import build_executor

    give_back_large_blocks()
    spec = make_spec()
    options = ExecutorOptions(
        kv_bytes=_KV_TOKENS * spec.kv_bytes_per_token_and_layer() * _LAYERS,
        context_length=_CONTEXT,
        threads=1,
    )
    before = status_bytes()["VmRSS"]
    executor = build_executor(spec, whole(spec), RandomTensors(spec, form), backend=backend, options=options)
    loaded = status_bytes()
    for start in range(0, _KV_TOKENS - _ROWS, _ROWS):
        executor.step([Segment(2, start, _ROWS, 1)], np.zeros(_ROWS, np.int64))
    executor.close_session(2)
    executor.step([Segment(i + 1, 0, 1, 1) for i in range(64)], np.zeros(64, np.int64))
    prompted = status_bytes()
    kv = (_KV_TOKENS - _ROWS) * spec.kv_bytes_per_token_and_layer() * _LAYERS
    return {
        "before": before,
        "held": loaded["VmRSS"] - before,
        "load_peak": loaded["VmHWM"] - before,
        "peak": prompted["VmHWM"] - before,
        "after": prompted["VmRSS"] - before,
        "kv": kv,
    }


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--one":
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
        return
    titles = (
        "file",
        "held weights",
        "held, measured",
        "peak while loading",
        "peak of a long prompt",
        "counted",
    )
    print(f"| backend | form | {' | '.join(titles)} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for backend in sys.argv[1:] or ["onnx"]:
        for form in _FORMS:
            print(_row(backend, form), flush=True)


def _row(backend: str, form: str) -> str:
    command = [sys.executable, __file__, "--one", backend, form]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    file_bytes, held = sizes_of_form(holding_of(backend, "cpu"), form)
    weights = sum(held.layer_bytes) + held.embedding_bytes + held.head_bytes
    said = weights + held.scratch_bytes + held.head_scratch_bytes + found["kv"]
    numbers = (file_bytes, weights, found["held"], found["load_peak"], found["peak"], said)
    return f"| {backend} | {form} | " + " | ".join(f"{number / 2**20:.0f}" for number in numbers) + " |"


if __name__ == "__main__":
    main()
