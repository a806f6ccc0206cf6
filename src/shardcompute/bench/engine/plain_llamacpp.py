"""Plain llama.cpp as an arm of a benchmark: a whole model through its own interface, with its own defaults.

Keys and values of one type (float16), flash attention where it chooses so, 512 rows at once: what `llama-bench` would
measure, and the measure of what our backends add or lose.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int8, c_int32
from typing import Any

import numpy as np

from shardcompute.backends.llamacpp.library import Batch, ContextParams, ModelParams, open_library
from shardcompute.bench.engine.stopwatch import Spent, Stopwatch
from shardcompute.core.errors import BackendError

_ROWS = 512
_LOAD_MMAP = 1


class PlainLlamaEngine:
    """Sequences 0 to `sessions` − 1, of `context` tokens each."""

    def __init__(self, path: str, threads: int, sessions: int, context: int) -> None:
        library = open_library()
        self._c: Any = library.c
        params = ModelParams.from_buffer_copy(library.model_defaults)
        params.n_gpu_layers, params.load_mode = 0, _LOAD_MMAP
        model = self._c.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise BackendError(f"llama.cpp cannot load {path}: {library.failure()}")
        options = ContextParams.from_buffer_copy(library.context_defaults)
        options.n_ctx, options.n_seq_max = sessions * context, sessions
        options.n_batch = options.n_ubatch = _ROWS
        options.n_threads = options.n_threads_batch = threads
        options.offload_kqv = options.op_offload = False
        self._context = self._c.llama_init_from_model(model, options)
        if not self._context:
            raise BackendError(f"llama.cpp cannot make a context: {library.failure()}")
        self._memory = self._c.llama_get_memory(self._context)
        self._vocab_size = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(model))

    def prefill(self, tokens: int, *, wants_all: bool = False) -> Spent:
        ids = np.random.default_rng(7).integers(0, self._vocab_size, tokens)
        watch = Stopwatch()
        self._fill(0, ids, wants_all=wants_all)
        spent = watch.read()
        self._forget(1)
        return spent

    def decode(self, batch: int, past: int, steps: int, picks: bool = True) -> Spent:
        for sequence in range(batch):
            self._fill(sequence, np.random.default_rng(7).integers(0, self._vocab_size, past))
        ids = np.full(batch, 42)
        sequences = np.arange(batch)
        watch = Stopwatch()
        for step in range(steps):
            logits = self._compute(ids, np.full(batch, past + step), sequences, np.ones(batch))
            if picks:
                ids = logits.argmax(axis=-1)
        spent = watch.read()
        self._forget(batch)
        return spent

    def _fill(self, sequence: int, ids: Any, *, wants_all: bool = False) -> None:
        for start in range(0, len(ids), _ROWS):
            part = ids[start : start + _ROWS]
            wanted = np.full(len(part), wants_all)
            wanted[-1] = True
            self._compute(part, np.arange(start, start + len(part)), np.full(len(part), sequence), wanted)

    def _forget(self, sequences: int) -> None:
        for sequence in range(sequences):
            self._c.llama_memory_seq_rm(self._memory, sequence, 0, -1)

    def _compute(self, ids: Any, positions: Any, sequences: Any, wanted: Any) -> Any:
        rows = len(ids)
        columns = [
            np.ascontiguousarray(each, np.int32) for each in (ids, positions, np.ones(rows), sequences)
        ]
        flags = np.ascontiguousarray(wanted, np.int8)
        tokens, at, counts = (each.ctypes.data_as(POINTER(c_int32)) for each in columns[:3])
        start = columns[3].ctypes.data
        lists = (POINTER(c_int32) * rows)(
            *(ctypes.cast(start + 4 * row, POINTER(c_int32)) for row in range(rows))
        )
        batch = Batch(rows, tokens, None, at, counts, lists, flags.ctypes.data_as(POINTER(c_int8)))
        if self._c.llama_decode(self._context, batch) != 0:
            raise BackendError("llama.cpp failed to compute")
        pointer = ctypes.cast(self._c.llama_get_logits(self._context), POINTER(c_float))
        return np.ctypeslib.as_array(pointer, (int(flags.sum()), self._vocab_size))
