"""Executor interface: what runs a slice of a model on one device, and what it runs.

A `Network` is the slice, written against Ops; an `Executor` is a backend's way to run it step by step over
ragged batches, with the sessions' KV inside. A device that computes beside the host has steps under way: `launch`
begins one, and what it gives back is waited for when it is wanted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardcompute.backends.matrix import Array, Float32
from shardcompute.backends.ops import Handle, Ops, PatchOps, Tensor
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvShape, KvType
from shardcompute.core.pictures import PictureSpan

MAX_ROWS, MAX_LOGIT_ROWS = 512, 64
"""Of one step, unless somebody knows better."""
_GPU_ROWS, _GPU_LOGIT_ROWS = 2048, 256
"""Prompts fill a large GPU from about so many rows on; more sessions than that share steps of one graph."""


@dataclass(frozen=True, slots=True)
class PatchRows:
    """A picture on its way into a tower, a row for each patch: `numbers`; what is added to the embedded rows, or None;
    cosines and sines by which patches turn, or None; blocks of rows that see each other in windowed layers."""

    numbers: Float32
    added: Float32 | None
    turning: tuple[Float32, Float32] | None
    windows: Sequence[tuple[int, int]]
    order: Array | None
    """Where each merged row belongs in the picture; None: they are in order."""


class PictureNetwork(Protocol):
    """How a model sees. Every slice is asked what pictures do to rows; the first one also encodes them.

    `patch_width` is that of the numbers, `hidden` of rows in the tower, `turned` the pairs of entries that turn."""

    is_bidirectional: bool
    """Rows of a picture see each other in both directions."""
    has_axes: bool
    """Rows of a picture have positions on three axes, and those behind it go on from the largest."""
    merge: int
    """Patches along the edge of a row's."""
    row_scale: float
    """Embedded tokens are multiplied by it, rows of pictures are not."""
    layer_count: int
    patch_width: int
    hidden: int
    turned: int

    def check(self, span: PictureSpan, patches: bytes | None) -> None:
        """UsageError for a picture that is none of the model's."""
        ...

    def patch_rows(self, span: PictureSpan, patches: bytes) -> PatchRows: ...

    def load_front(self, ops: PatchOps) -> Any: ...

    def load_layer(self, ops: PatchOps, layer: int) -> Any: ...

    def load_back(self, ops: PatchOps) -> Any: ...

    def front(self, ops: PatchOps, weights: Any, numbers: Tensor, added: Tensor | None) -> Tensor: ...

    def layer(self, ops: PatchOps, weights: Any, layer: int, x: Tensor) -> Tensor: ...

    def back(self, ops: PatchOps, weights: Any, x: Tensor) -> Tensor:
        """Merged rows of the text's width."""
        ...


class Network(Protocol):
    """A contiguous slice of a decoder. Layer numbers count from 0 within the slice."""

    is_first: bool
    is_last: bool
    layer_count: int
    hidden: int
    vocab_size: int
    kv_shape: KvShape
    context_length: int
    pictures: PictureNetwork | None
    """None: it takes text alone."""

    def load_shared(self, ops: Ops) -> Any: ...

    def load_embedding(self, ops: Ops) -> Handle: ...

    def load_layer(self, ops: Ops, layer: int) -> Any: ...

    def load_head(self, ops: Ops) -> Any: ...

    def embed(self, ops: Ops, embedding: Handle, ids: Tensor) -> Tensor: ...

    def layer(self, ops: Ops, shared: Any, weights: Any, layer: int, x: Tensor) -> Tensor: ...

    def normed(self, ops: Ops, weights: Any, x: Tensor) -> Tensor:
        """The logit rows behind the last layer, normed: what `head` makes logits of."""
        ...

    def head(self, ops: Ops, weights: Any, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """`kv_bytes` bounds the sessions' KV; `max_rows` the rows of one step and `max_logit_rows` those of them whose
    logits are wanted; `context_length` a session. `dtype` is what a backend with a choice computes in: auto,
    float32, float16 or bfloat16. `kv_type` is what keys and values are rounded to on the host; devices keep them in
    what they compute in."""

    kv_bytes: int
    max_rows: int = MAX_ROWS
    max_logit_rows: int = MAX_LOGIT_ROWS
    context_length: int = 8192
    threads: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    use_graphs: bool = True
    kv_type: KvType = DEFAULT_KV_TYPE


def rows_of_step(backend: str, device: str) -> tuple[int, int]:
    """How many rows a step is to have at most on a device, and of how many of them logits."""
    is_large = backend == "torch" and device.startswith(("cuda", "rocm"))
    return (_GPU_ROWS, _GPU_LOGIT_ROWS) if is_large else (MAX_ROWS, MAX_LOGIT_ROWS)


@dataclass(frozen=True, slots=True)
class KvUsage:
    """KV memory of one executor, in bytes, and how many tokens (over all sessions) still fit."""

    used_bytes: int
    total_bytes: int
    free_tokens: int
    sessions: int


class PendingStep(Protocol):
    """A step that was launched."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once. Cheap: it is asked again and again."""
        ...

    def wait(self) -> Array:
        """What `Executor.step` returns, valid until the next but one is launched. Raises what the step failed with."""
        ...


@dataclass(frozen=True, slots=True)
class PickRule:
    """How a token is picked from a row of plain logits (see `decoding.sampler`).

    Without a `temperature` it is the best one. Else only tokens less than `reach` below the best count, of those the
    `top_k` best (0: all), of those `top_p` of the mass, of those the ones that score `least_score`. `key` starts the
    noise of the token's position.
    """

    temperature: float = 0.0
    reach: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    least_score: float = -math.inf
    key: int = 0


class PickedRows(Protocol):
    """What a step picked, by logit row. Valid until the next but one is launched."""

    def token(self, row: int) -> int | None:
        """The token that was picked; None: it is to be picked from the logits."""
        ...

    def guess(self, row: int) -> int:
        """The token that a step which continues the row's session is computed with."""
        ...

    def logits(self, row: int) -> Array:
        """Of a row that no token was picked from."""
        ...


class PendingPicks(Protocol):
    """A step that was launched, with tokens to be picked."""

    def is_ready(self) -> bool: ...

    def wait(self) -> PickedRows: ...


class Executor(Protocol):
    """Runs steps. Not thread-safe: one caller at a time."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the step is computed. A step may then be launched while the one before is
        under way, though no third one, and both see the sessions as if the first were done."""
        ...

    def launch(
        self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False
    ) -> PendingStep:
        """Begin a step. Raises at once what `step` raises before anything changes."""
        ...

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        """Token ids `[rows]` (first slice) or hidden `[rows, hidden]` in; hidden `[rows, hidden]` or, from the last
        slice, logits `[logit rows, vocabulary]` out, float32, valid until the next step.

        A segment truncates its session at `start`, opens it if it is new, and extends it. Raises CapacityError,
        before anything changes, when KV memory does not suffice; RowGapError for a gap, UsageError past the context.
        """
        ...

    def hidden_rows(self) -> Array:
        """The normed hidden states `[logit rows, hidden]`, float32, that the logits of the last step were made of.
        Only from the last slice, after a step with `keeps_hidden`, and valid until the next step."""
        ...

    def final_rows(self) -> Array:
        """The states `[rows, hidden]`, float32, behind the last layer and before the norm, of all rows of the last
        step. Where and when there are `hidden_rows`; UnsupportedModelError from a backend that cannot give them."""
        ...

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        """Begin session `target` with the first `length` tokens of `source`, which ends if it is moved.

        CapacityError, before anything changes, where `source` does not hold so many or KV memory does not suffice.
        """
        ...

    def open_pictures(
        self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> None:
        """Take the pictures of a session, before their rows and instead of those it had; they are forgotten with it.

        The first slice is given the `patches` of each, empty ones where no rows of it will be computed; others none.
        UnsupportedModelError where the model, or this executor, does not see; UsageError for pictures that are none of
        the model's.
        """
        ...

    def close_session(self, session: int) -> None:
        """Free a session's KV; unknown sessions are ignored."""
        ...

    def session_length(self, session: int) -> int: ...

    def sessions(self) -> list[int]:
        """Those that hold KV."""
        ...

    def kv_usage(self) -> KvUsage: ...

    def close(self) -> None: ...


@runtime_checkable
class PickingExecutor(Protocol):
    """What an `Executor` that can pick tokens has besides: where logits lie on a device, few bytes come from there."""

    @property
    def can_pick(self) -> bool:
        """Whether this one can: it has the last slice, on such a device."""
        ...

    def launch_picks(
        self,
        segments: Sequence[Segment],
        inputs: Array,
        rules: Sequence[PickRule | None],
        *,
        keeps_hidden: bool = False,
    ) -> PendingPicks:
        """`launch` with a rule for each logit row; None: its logits are wanted. A segment's first id may be `PICKED`
        where `can_continue` says so."""
        ...

    def can_continue(self, session: int, position: int) -> bool:
        """Whether the token of a session at `position` was picked, or is being picked, by the step launched last."""
        ...


@runtime_checkable
class RestingExecutor(Protocol):
    """What an `Executor` has besides that keeps memory between steps which the next one could take anew."""

    def rest(self) -> None:
        """Nobody has asked for a while: give back what is not needed to hold the slice and its sessions."""
        ...


@runtime_checkable
class EncodingExecutor(Protocol):
    """What an `Executor` has besides whose tower runs beside its steps. Both may be called from any thread."""

    def needs_encoding(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> bool:
        """Whether `open_pictures` would take as long as a tower does."""
        ...

    def encode_pictures(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> None:
        """Have `open_pictures` find them encoded. Raises what that would raise."""
        ...


@runtime_checkable
class MovableKv(Protocol):
    """What an `Executor` has besides whose sessions can go on elsewhere, with the KV that they have here. Layers are
    counted from the slice's first."""

    @property
    def kv_format(self) -> str:
        """How keys and values of a token lie in a layer. Rows go only where this is the same."""
        ...

    @property
    def kv_layers(self) -> int:
        """Layers of the slice."""
        ...

    def kv_bytes(self, layers: int, rows: int) -> int:
        """The size of so many rows of so many layers."""
        ...

    def read_kv(self, session: int, layers: range, rows: range) -> memoryview:
        """A copy of these rows as they are kept."""
        ...

    def write_kv(self, session: int, layers: range, rows: range, content: memoryview) -> None:
        """Put rows back that were read elsewhere; the session is opened, or grows, to hold them, and is never cut.
        CapacityError, before anything changes, when KV memory does not suffice; UsageError for content of another size,
        for layers that are not here and rows past the context."""
        ...

    def cut_session(self, session: int, length: int) -> None:
        """Keep the first `length` rows of a session, at least one; RowGapError where there are fewer."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A `PendingStep` that pends no more."""

    output: Array

    def is_ready(self) -> bool:
        return True

    def wait(self) -> Array:
        return self.output


def refuse_final_rows(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} gives no states that a draft head could draft from",
        hint="compute the last layers with --backend onnx, torch or mlx, or draft from the text with `ngram`",
    )


def refuse_pictures(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} takes no pictures",
        hint="serve Gemma 3, Qwen2-VL or Qwen2.5-VL from safetensors, with --backend onnx, torch or mlx",
    )


class SynchronousSteps(ABC):
    """`launch` of an `Executor` that computes when it is asked to."""

    @property
    def is_asynchronous(self) -> bool:
        return False

    def launch(
        self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False
    ) -> PendingStep:
        return ComputedStep(self.step(segments, inputs, keeps_hidden=keeps_hidden))

    @abstractmethod
    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array: ...
