"""A stage file opened by llama.cpp: rows in, hidden states or logits out, and the KV of numbered sequences.

Every sequence has cells of its own (a stream), in the order of positions. Keys are kept as float16 and values as
bfloat16: two types that differ keep llama.cpp's attention on the one path that computes each row by itself, in the
order of positions, whatever the number of rows and threads; with one type it changes the order of its sums between
one row and many, and between threads.

A stage that is not the last gives what flows between layers: an evaluation callback copies the last layer's output
and ends the computation there, so that no head is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from ctypes import POINTER, c_float, c_int8, c_int32
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.backends.llamacpp.callback_switch import CallbackSwitch
from shardcompute.backends.llamacpp.library import (
    Batch,
    ContextParams,
    EvalCallback,
    LlamaLibrary,
    ModelParams,
    open_library,
)
from shardcompute.backends.llamacpp.routers import LOGITS, RouterRows
from shardcompute.backends.matrix import Array, Float32
from shardcompute.core.errors import BackendError, CapacityError, UnsupportedModelError
from shardcompute.core.process_memory import join_pages

KV_BYTES_PER_ENTRY = 2
STREAM_MULTIPLE = 256
"""llama.cpp makes streams of whole multiples of so many tokens."""
MAX_STREAMS = 256
ROWS_AT_ONCE = 64
"""Rows of one computation. More are hardly faster on CPUs and take more scratch."""

_F16, _BF16 = 1, 30
_ONE_KV_TYPE = "does not support different K"
"""What llama.cpp says of models with latent attention."""
_FLASH_ATTENTION_ON = 1
_LOAD_MMAP = 1
_FULL = 1
_DONT_NEED = 4


def release_mapped(path: Path) -> None:
    """Let this process hold no page of a mapped file, as far as the system says where it lies: what is used comes
    back from the file. Loading maps all of it, also what was packed anew elsewhere, and holes that nobody reads."""
    if sys.platform == "linux":
        name = str(path.resolve())
        with contextlib.suppress(OSError, ValueError):
            libc = ctypes.CDLL(None)
            for line in Path("/proc/self/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5] == name:
                    start, stop = (int(part, 16) for part in fields[0].split("-"))
                    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONT_NEED)


@dataclass(frozen=True, slots=True)
class StageFile:
    """A GGUF file that holds a stage's layers, numbered from 0, and what llama.cpp has to be told about it."""

    path: Path
    layers: int
    hidden: int
    vocab_size: int
    kv_entries: int
    """Numbers that a token's keys and values take in all layers."""
    is_first: bool
    is_last: bool
    has_experts: bool = False

    @property
    def token_bytes(self) -> int:
        return self.kv_entries * KV_BYTES_PER_ENTRY


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """`count` rows of sequence `number`, from position `start` on."""

    number: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """What a computation gives: `outputs`, and beside logits the hidden states of the same rows, if they are kept."""

    outputs: Array
    normed: Array | None = None

    def of(self, rows: Array) -> ComputedRows:
        """Of these rows alone; `rows` says it of each."""
        return ComputedRows(self.outputs[rows], None if self.normed is None else self.normed[rows])


class StageContext:
    """Model and context of one stage. Not thread-safe."""

    def __init__(
        self, file: StageFile, *, streams: int, stream_tokens: int, threads: int, on_gpu: bool
    ) -> None:
        self._library: LlamaLibrary = open_library()
        self._c: Any = self._library.c
        self._file = file
        self._model: int | None = None
        self._context: int | None = None
        self._name_at = 0
        self._keeps_hidden = False
        self._callback = EvalCallback(self._on_tensor)
        self._rows: Float32 = np.empty((ROWS_AT_ONCE, file.hidden), np.float32)
        self._got_rows = 0
        has_routers = file.has_experts and not on_gpu
        self._routers = RouterRows(self._c, file.hidden, threads) if has_routers else None
        self._switch: CallbackSwitch | None = None
        """Where the callback is there for routers alone, which a row alone does not need."""
        hidden = () if file.is_last else (f"l_out-{file.layers - 1}".encode() + b"\0",)
        self._wanted_names = hidden if self._routers is None else (*hidden, LOGITS)
        self._name_bytes = max(map(len, self._wanted_names), default=0)
        if on_gpu and not self._c.llama_supports_gpu_offload():
            raise BackendError(
                "the installed llama.cpp was built without any GPU",
                hint="install its wheel for Vulkan, ROCm or CUDA, or use --device cpu",
            )
        try:
            self._open(streams, stream_tokens, threads, on_gpu)
        except BaseException:
            self.close()
            raise
        self._positions = np.zeros(ROWS_AT_ONCE, np.int32)
        self._counts = np.ones(ROWS_AT_ONCE, np.int32)
        self._numbers = np.zeros(ROWS_AT_ONCE, np.int32)
        self._wanted = np.ones(ROWS_AT_ONCE, np.int8)
        shape = (ROWS_AT_ONCE,) if file.is_first else (ROWS_AT_ONCE, file.hidden)
        self._inputs: Array = np.zeros(shape, np.int32 if file.is_first else np.float32)
        self._batch = self._make_batch()

    def _make_batch(self) -> Batch:
        """The record of all computations: it points at arrays that stay, and only its number of rows changes."""
        first_number = self._numbers.ctypes.data
        numbers = (ctypes.cast(first_number + 4 * row, POINTER(c_int32)) for row in range(ROWS_AT_ONCE))
        is_first, inputs = self._file.is_first, self._inputs.ctypes
        return Batch(
            0,
            inputs.data_as(POINTER(c_int32)) if is_first else None,
            None if is_first else inputs.data_as(POINTER(c_float)),
            self._positions.ctypes.data_as(POINTER(c_int32)),
            self._counts.ctypes.data_as(POINTER(c_int32)),
            (POINTER(c_int32) * ROWS_AT_ONCE)(*numbers),
            self._wanted.ctypes.data_as(POINTER(c_int8)),
        )

    def _open(self, streams: int, stream_tokens: int, threads: int, on_gpu: bool) -> None:
        model_params = ModelParams.from_buffer_copy(self._library.model_defaults)
        model_params.n_gpu_layers = -1 if on_gpu else 0
        model_params.load_mode = _LOAD_MMAP
        self._model = self._c.llama_model_load_from_file(str(self._file.path).encode(), model_params)
        if not self._model:
            raise UnsupportedModelError(
                f"llama.cpp cannot load this model: {self._library.failure()}",
                hint="use another backend, or another file of this model",
            )
        self._check_model()
        release_mapped(self._file.path)
        join_pages()
        params = ContextParams.from_buffer_copy(self._library.context_defaults)
        params.n_ctx, params.n_seq_max = streams * stream_tokens, streams
        params.n_batch = params.n_ubatch = ROWS_AT_ONCE
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k, params.type_v = _F16, _BF16
        params.offload_kqv = params.op_offload = on_gpu
        if not self._file.is_last or self._routers is not None:
            params.cb_eval = self._callback
        self._context = self._c.llama_init_from_model(self._model, params)
        if not self._context:
            failure = self._library.failure()
            if _ONE_KV_TYPE in failure:
                raise UnsupportedModelError(
                    "llama.cpp keeps keys and values of this model in one type; rows with equal bits need two",
                    hint="use another backend, such as --backend onnx",
                )
            raise CapacityError(
                f"llama.cpp cannot make room for {streams} sessions of {stream_tokens} tokens: {failure}",
                hint="give less to --kv-memory, or use a smaller --context",
            )
        self._memory = self._c.llama_get_memory(self._context)
        if self._file.is_last and self._routers is not None:
            self._switch = CallbackSwitch(self._c, self._context, self._callback)

    def _check_model(self) -> None:
        if self._c.llama_model_is_recurrent(self._model) or self._c.llama_model_is_hybrid(self._model):
            raise UnsupportedModelError(
                "this model keeps a running state that cannot go back, which sessions here must be able to",
                hint="use a model whose every layer attends to keys and values",
            )
        found = (self._c.llama_model_n_layer(self._model), self._c.llama_model_n_embd(self._model))
        if found != (self._file.layers, self._file.hidden):
            raise UnsupportedModelError(
                f"llama.cpp reads {found[0]} layers of width {found[1]} where there are "
                f"{self._file.layers} of {self._file.hidden}"
            )
        vocabulary = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        if self._file.is_last and vocabulary != self._file.vocab_size:
            raise UnsupportedModelError(
                f"llama.cpp reads a vocabulary of {vocabulary} where there is one of {self._file.vocab_size}"
            )

    def compute(
        self, wave: list[SequenceRows], inputs: Array, wanted: Array, *, keeps_hidden: bool = False
    ) -> ComputedRows:
        """One computation: the same number of rows of each of these sequences, whose numbers follow each other.

        Gives hidden states of all rows or, at the end, logits of the `wanted` ones and, if they are kept, the normed
        hidden states that those were made of; valid until the next call.
        """
        rows = 0
        for each in wave:
            part = slice(rows, rows + each.count)
            self._positions[part] = (
                each.start if each.count == 1 else range(each.start, each.start + each.count)
            )
            self._numbers[part] = each.number
            rows += each.count
        self._wanted[:rows] = wanted if self._file.is_last else 1
        self._set_keeps_hidden(keeps_hidden)
        self._inputs[:rows] = inputs
        self._batch.n_tokens = rows
        if self._switch is not None:
            self._switch.set(rows > 1)
        result = self._c.llama_decode(self._context, self._batch)
        if result == _FULL:
            raise CapacityError("llama.cpp found no room for these rows in its KV memory")
        if result != 0:
            raise BackendError(f"llama.cpp failed ({result}): {self._library.failure()}")
        if self._file.is_last and keeps_hidden:
            # Then llama.cpp makes the logits of every row.
            return ComputedRows(self._logits(rows), self._normed(rows)).of(wanted)
        if self._file.is_last:
            return ComputedRows(self._logits(int(self._wanted[:rows].sum())))
        got, self._got_rows = self._got_rows, 0
        if got != rows:
            raise BackendError(f"llama.cpp gave {got} rows of hidden states where {rows} were computed")
        return ComputedRows(self._rows[:rows])

    def truncate(self, sequence: int, length: int) -> None:
        """Forget a sequence's positions from `length` on."""
        if not self._c.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise BackendError(f"llama.cpp cannot take a session back to {length} tokens")

    def save(self, sequence: int) -> bytes:
        """A sequence's keys and values."""
        size = self._c.llama_state_seq_get_size(self._context, sequence)
        buffer = ctypes.create_string_buffer(size)
        if self._c.llama_state_seq_get_data(self._context, buffer, size, sequence) != size:
            raise BackendError(f"llama.cpp cannot give a session's memory: {self._library.failure()}")
        return buffer.raw

    def restore(self, sequence: int, saved: bytes) -> None:
        """Put what `save` gave into a sequence, which must be empty."""
        if self._c.llama_state_seq_set_data(self._context, saved, len(saved), sequence) != len(saved):
            raise BackendError(f"llama.cpp cannot take a session's memory back: {self._library.failure()}")

    def close(self) -> None:
        if self._context:
            self._c.llama_free(self._context)
        if self._model:
            self._c.llama_model_free(self._model)
        self._context = self._model = None

    def _logits(self, rows: int) -> Array:
        if rows == 0:
            return np.empty((0, self._file.vocab_size), np.float32)
        return _rows_at(self._c.llama_get_logits(self._context), rows, self._file.vocab_size)

    def _normed(self, rows: int) -> Array:
        return _rows_at(self._c.llama_get_embeddings(self._context), rows, self._file.hidden)

    def _set_keeps_hidden(self, is_wanted: bool) -> None:
        if is_wanted != self._keeps_hidden:
            self._c.llama_set_embeddings(self._context, is_wanted)
            self._keeps_hidden = is_wanted

    def _on_tensor(self, tensor: int, is_asked: bool, _: Any) -> bool:
        """llama.cpp shows every tensor before it computes: True for those that are wanted, which are then given."""
        if not self._name_at:
            self._name_at = self._c.ggml_get_name(tensor) - tensor
        name, routers = ctypes.string_at(tensor + self._name_at, self._name_bytes), self._routers
        if is_asked:
            if routers is not None and routers.seen is not None:
                routers.seen.add(tensor)
            return name.startswith(self._wanted_names)
        if routers is not None and name.startswith(LOGITS):
            routers.replace(tensor, self._name_at)
            return True
        rows, odd = divmod(self._c.ggml_nelements(tensor), self._file.hidden)
        if not odd and self._got_rows + rows <= ROWS_AT_ONCE:
            target = self._rows[self._got_rows : self._got_rows + rows]
            self._c.ggml_backend_tensor_get(tensor, target.ctypes.data, 0, target.nbytes)
            self._got_rows += rows
        return False  # nothing after it is wanted


def _rows_at(address: int, rows: int, width: int) -> Array:
    numbers = (c_float * (rows * width)).from_address(address)
    return np.frombuffer(memoryview(numbers), np.float32).reshape(rows, width)
