"""The array primitives that a decoder is written against, once, for every backend.

An `Ops` either computes at once (numpy, torch) or records a program that is run later (ONNX Runtime); a decoder
cannot tell. Activations are `[rows, width]` float tensors of the backend's own kind, here just `Any`: rows are
the flattened rows of a ragged batch, whose segments the backend knows while a step runs.

Loading comes first: `matrix`, `vector`, `table` and `rotation` turn arrays into handles that the computing
functions take. None of the functions changes its inputs; `attend` alone has an effect, on the KV of its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.matrix import Array, Float32, Matrix
from shardcompute.core.expert_routing import PLAIN_ROUTING, Routing
from shardcompute.core.kv_types import KvShape, latent_kv

Tensor = Any
Handle = Any
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu2"]


RotationTables = Callable[[int], tuple[Float32, Float32]]
Axes = Sequence[int]
"""By which axis of a picture each pair of entries turns inside it; empty: all by the row's position."""


@dataclass(frozen=True, slots=True)
class Attention:
    """How one layer attends. `scale` multiplies scores; `softcap` squashes them; `sinks` [heads] join the softmax.

    A position sees `window` positions up to itself, or those of its own `chunk` of so many; with neither, all. With a
    `value_dim`, values are not kept: they are the first so many entries of the keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Handle | None = None
    chunk: int | None = None
    value_dim: int | None = None

    @property
    def width_out(self) -> int:
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def kept(self) -> KvShape:
        if self.value_dim is None:
            return KvShape(self.kv_heads, self.head_dim)
        return latent_kv(self.value_dim, self.head_dim - self.value_dim)


@dataclass(frozen=True, slots=True)
class PatchAttention:
    """How patches of a picture attend: all of a block to all of it. Blocks are the picture, or its windows."""

    heads: int
    head_dim: int
    is_windowed: bool = False

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Gate:
    """How a gated feed-forward joins its halves: activation(gate) · up, or gpt-oss's clamped variant."""

    activation: Activation
    limit: float | None = None


class RankGroup(Protocol):
    """The ranks that share a stage's tensors. Every rank calls the same functions in the same order with arrays of
    equal shapes, which may differ in `all_gather` along the last axis, and all get the same bits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, array: Array, out: Array | None = None, /) -> Array:
        """The sum over all ranks, made in an order that does not depend on timing or on what else is summed; in `out`
        where that is given."""
        ...

    def all_gather(self, array: Array, /) -> Sequence[Array]:
        """What each rank gave, in the order of their numbers."""
        ...

    def gather_columns(self, array: Array, widths: Sequence[int], out: Array | None = None, /) -> Array:
        """The same, side by side along the last axis, of which each rank has as much as `widths` say; in `out` where
        that is given."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """Handles of a sparse feed-forward block; `gate_up` and `down` hold one linear handle per expert, `choice_bias`
    is a vector of `routing`'s biases or None.

    A tensor rank may have some of the experts only, `owned` from the first number up to the second: its answer is what
    these add. With a `group` it is the whole answer, put together by ranks that each have some.
    """

    router: Handle
    gate_up: Sequence[Handle]
    down: Sequence[Handle]
    per_token: int
    gate: Gate
    routing: Routing = PLAIN_ROUTING
    choice_bias: Handle | None = None
    owned: tuple[int, int] | None = None
    group: RankGroup | None = None


class Ops(Protocol):
    """See the module's contract. A handle may only be given to the Ops that made it."""

    # Loading
    def matrix(
        self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None
    ) -> Handle:
        """One linear map from matrices stacked along their outputs (q, k, v), which may differ in form; with a
        `low_rank` part, rows of its adapters get more (see `backends.host.low_rank`)."""
        ...

    def vector(self, values: Float32) -> Handle: ...

    def table(self, matrix: Matrix, first: int | None = None) -> Handle:
        """An embedding table. Where it has only the ids from `first` on, other ids are rows of zeros."""
        ...

    def head_maps(self, weights: Float32) -> Handle:
        """Linear maps `[heads, out, in]`, one for each head, for `per_head`."""
        ...

    def rotation(self, tables: RotationTables, axes: Axes = ()) -> Handle:
        """The cosines and sines that `tables` makes for so many positions as the context has."""
        ...

    # Computing
    def embed(self, table: Handle, ids: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, matrix: Handle) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Handle, eps: float) -> Tensor:
        """Root-mean-square norm over groups of `len(weight)` neighbours: the whole row, or each head."""
        ...

    def layer_norm(self, x: Tensor, weight: Handle, bias: Handle | None, eps: float) -> Tensor:
        """Each row less its mean, divided by its deviation."""
        ...

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]: ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap · tanh(x / cap)"""
        ...

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """The two halves of each row joined."""
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    def weigh(self, x: Tensor, score: Tensor) -> Tensor:
        """Each row of x times the sigmoid of its score `[rows, 1]`."""
        ...

    def rotate(self, x: Tensor, head_dim: int, rotation: Handle) -> Tensor:
        """Rotary embedding of every head in `x` at its row's position."""
        ...

    def per_head(self, x: Tensor, maps: Handle) -> Tensor:
        """Each head of x through the map of its own."""
        ...

    def join_heads(self, parts: Sequence[Tensor], heads: int) -> Tensor:
        """Tensors of `heads` heads joined head by head: the first of each, then the second of each, …"""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int, attention: Attention) -> Tensor:
        """Append k and v to the layer's KV at their rows' positions; causal attention of each session over its own.
        There is no v where the attention has a `value_dim`."""
        ...

    def experts(self, x: Tensor, block: ExpertBlock) -> Tensor: ...

    def logit_rows(self, x: Tensor) -> Tensor:
        """Only the rows whose logits are wanted."""
        ...

    def all_reduce(self, x: Tensor, group: RankGroup) -> Tensor:
        """The sum of what all ranks have of x."""
        ...

    def all_gather(self, x: Tensor, group: RankGroup, widths: Sequence[int]) -> Tensor:
        """What all ranks have of x, of these widths, side by side."""
        ...


class PatchOps(Ops, Protocol):
    """What a tower is written against besides: rows are the patches of one picture, then what they are merged to. Which
    picture it is, the backend knows while it is encoded; rows are turned by `rotate` with `turning()`."""

    def turning(self) -> Handle:
        """Cosines and sines that each patch has of its own."""
        ...

    def attend_patches(self, q: Tensor, k: Tensor, v: Tensor, attention: PatchAttention) -> Tensor: ...

    def merge_rows(self, x: Tensor, count: int) -> Tensor:
        """`count` neighbouring rows side by side as one."""
        ...

    def mean_rows(self, x: Tensor, count: int) -> Tensor:
        """The mean of `count` neighbouring rows."""
        ...
