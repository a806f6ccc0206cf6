"""Model spec: everything about a model that changes its maths, complete and frozen.

A spec is all that a machine needs, besides weights, to run any slice of the model. Families (see
`families`) produce specs from checkpoints; the decoder (see `decoder`) runs them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from shardcompute.core.expert_routing import PLAIN_ROUTING, Routing
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvShape, KvType, kv_token_bytes, latent_kv

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu2"]
NormType = Literal["rms", "layer"]
"""Divided by the root of the mean square, or centred first (LayerNorm)."""
NormPlacement = Literal["before", "after", "around"]
"""Where a block's norms sit: before it (Llama), after it (OLMo-2), or both (Gemma)."""
QkNorm = Literal["none", "head", "width", "unit"]
"""How queries and keys are normed: not, each head, all heads together, or each head without weights."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A factor that grows with position: 1 + slope · log(1 + ⌊(position + offset) / step⌋)."""

    slope: float
    step: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding with every scaling already worked into its frequencies.

    The first `2 · len(inverse_frequencies)` entries of a head turn, in halves (entry i with entry i + n);
    `amplitude` multiplies sine and cosine (YaRN, LongRoPE).
    """

    inverse_frequencies: tuple[float, ...]
    amplitude: float = 1.0
    growth: Growth | None = None
    """What multiplies the amplitude besides."""
    long_frequencies: tuple[float, ...] | None = None
    """What turns instead, at every position, in a served context of more than `long_beyond` (LongRoPE)."""
    long_beyond: int = 0
    axes: tuple[int, ...] = ()
    """By which of a picture's axes (0: frame, 1: row, 2: column) each frequency turns inside it (M-RoPE); empty: as
    text does."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from layer to layer."""

    rope: int | None = 0
    """Index into `ModelSpec.ropes`; None: this layer does not rotate."""
    window: int | None = None
    """A position sees itself and `window − 1` before it; None: all before it."""
    is_sparse: bool = False
    """Experts instead of one feed-forward block."""
    chunk: int | None = None
    """A position sees those of its own chunk of so many, up to itself; None: its window decides."""
    query_rope: int | None = None
    """The rotation of queries where it is not that of keys."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse feed-forward block: each row goes to `per_token` of `count` experts."""

    count: int
    per_token: int
    intermediate: int
    routing: Routing = PLAIN_ROUTING
    has_bias: bool = False
    swiglu_limit: float | None = None
    """gpt-oss: clamp gate and up, gate · sigmoid(1.702 · gate) · (up + 1)."""
    shared_intermediate: int = 0
    """The width of a feed-forward block that every row goes through besides (all shared experts side by side), or 0."""
    has_shared_gate: bool = False
    """The shared block's answer is multiplied by the sigmoid of one more score of the row (Qwen2-MoE)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values of all heads as maps of one latent vector per token (MLA), see `latent_attention`.

    A head's query and key have `plain` entries that do not turn and `rotated` ones that do; the latter's key is the
    same for all heads. `q_rank` is the width of the queries' own latents, None where there are none.
    """

    kv_rank: int
    plain: int
    rotated: int
    value: int
    q_rank: int | None = None
    norm_eps: float = 1e-6
    is_interleaved: bool = True
    """Stored rows of rotated parts lie in pairs (entry 2i with 2i + 1), not in halves."""
    is_absorbed: bool = False
    """The maps of keys and of values are stored apart, each head's as decoding wants it."""


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """How a picture is written into a prompt: a chat template leaves `mark`, in whose place stands `before`, as often
    as the picture has rows `row`, and `after`."""

    mark: str
    before: str
    row: str
    after: str
    row_id: int
    """The token that `row` is."""

    def text(self, rows: int) -> str:
        return self.before + self.row * rows + self.after


@dataclass(frozen=True, slots=True)
class PictureSize:
    """What pictures are resized to: `edge` × `edge`, or (where that is 0) nearly as they are, to whole merged patches
    and between `least_pixels` and `most_pixels`."""

    edge: int = 0
    least_pixels: int = 0
    most_pixels: int = 0


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A tower: a transformer over the patches of a picture, and what makes rows of the text's width of its output.

    `merge` × `merge` neighbouring patches become one row: their mean, normed and mapped once (`is_pooled`), or all of
    them side by side through two maps.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    """Pixels along a patch's edge."""
    merge: int
    prompt: PicturePrompt
    size: PictureSize
    resampling: Literal["bilinear", "bicubic"]
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    frames: int = 1
    """Frames in a patch; a picture is that many equal ones."""
    activation: Activation = "gelu_tanh"
    has_gate: bool = False
    norm: NormType = "layer"
    norm_eps: float = 1e-6
    positions: int = 0
    """Learned positions, one for each patch; 0: patches are turned by row and column."""
    window: int = 0
    """Merged patches along the edge of the windows that patches see, except in `whole_layers`; 0: all see all."""
    whole_layers: tuple[int, ...] = ()
    is_pooled: bool = False
    is_bidirectional: bool = False
    """The rows of a picture see each other in both directions in the text's layers: a step may not end inside one
    (`core.pictures.step_stop`)."""

    @property
    def patch_bytes(self) -> int:
        return 3 * self.patch * self.patch


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer."""

    family: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    context_length: int
    ropes: tuple[Rope, ...]
    norm_eps: float
    attention_scale: float
    activation: Activation = "silu"
    norm_placement: NormPlacement = "before"
    qk_norm: QkNorm = "none"
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    has_gate: bool = True
    """activation(gate) · up in a feed-forward block; without a gate activation(up)."""
    norm: NormType = "rms"
    has_norm_bias: bool = False
    is_parallel: bool = False
    """The feed-forward block reads what attention reads, and both are added at once."""
    norms_turned: bool = False
    """Queries and keys are normed after they are turned, in layers that turn."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what a block adds."""
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tied_head: bool = False
    state_bytes: int = 0
    """What a session keeps in each layer whatever its length: recurrent states, nearly."""
    is_whole: bool = False
    """Its layers share more than rows, so that one machine must have them all."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """Then there is one key head, of what is kept of a token: `head_dim` is `kv_rank + rotated`."""
    vision: VisionSpec | None = None
    """How it sees; None: it takes text alone."""

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def kv_shape(self) -> KvShape:
        if self.latent is not None:
            return latent_kv(self.latent.kv_rank, self.latent.rotated)
        return KvShape(self.kv_heads, self.head_dim)

    def kv_bytes_per_token_and_layer(self, kv_type: KvType = DEFAULT_KV_TYPE) -> int:
        return kv_token_bytes(kv_type, self.kv_shape)


@dataclass(frozen=True, slots=True)
class Stage:
    """A half-open layer range `[start, stop)` of a model with `total` layers."""

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.total:
            raise ValueError(f"no such stage: [{self.start}, {self.stop}) of {self.total} layers")

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.total

    @property
    def count(self) -> int:
        return self.stop - self.start


def whole(spec: ModelSpec) -> Stage:
    return Stage(0, spec.layer_count, spec.layer_count)


def head_stage(spec: ModelSpec) -> Stage:
    """A stage whose tensors include the head's."""
    return Stage(spec.layer_count - 1, spec.layer_count, spec.layer_count)


def cut(spec: ModelSpec, count: int) -> list[Stage]:
    """The model in `count` stages of nearly equal length; nothing is dropped."""
    return cut_layers(spec.layer_count, count)


def cut_layers(layers: int, count: int) -> list[Stage]:
    edges = [round(i * layers / count) for i in range(count + 1)]
    return [Stage(a, b, layers) for a, b in itertools.pairwise(edges)]
