"""One decoder for every family, written once against Ops.

A `Decoder` is a slice of a model. It is told what differs between families by `ModelSpec` alone, asks for its
tensors by our names (see `layout`), and computes with whatever Ops it is given. Where several ranks share the slice
(see `tensor_rank`), it is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shardcompute.backends.executor import PictureNetwork
from shardcompute.backends.host.low_rank import NO_ADAPTERS, AdapterLayers
from shardcompute.backends.matrix import Float32, Matrix, StoredRows
from shardcompute.backends.ops import Attention, ExpertBlock, Gate, Handle, Ops, Tensor
from shardcompute.models.latent_attention import LatentWeights, attend_latent, load_latent
from shardcompute.models.rotation import rope_tables
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.models.tensor_rank import Inner, TensorRank
from shardcompute.models.tensor_share import rank_spec

_QKV = ("attention.q", "attention.k", "attention.v")


class TensorSource(Protocol):
    """Gives each tensor once, read at that moment: what the decoder has turned into handles can be freed."""

    def matrix(self, name: str, layer: int | None = None) -> Matrix: ...

    def vector(self, name: str, layer: int | None = None) -> Float32: ...


@runtime_checkable
class StoredTables(Protocol):
    """A `TensorSource` that can leave a table in its file."""

    def stored_rows(self, name: str) -> StoredRows | None:
        """None where it has to be read."""
        ...


@runtime_checkable
class StoredTableOps(Protocol):
    """Ops that look rows up where they are stored."""

    def stored_table(self, rows: StoredRows) -> Handle: ...


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: Handle
    bias: Handle | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Handles of one layer; None where the family has no such tensor."""

    qkv: Handle | None
    latent: LatentWeights | None
    out: Handle
    q_norm: Handle | None
    k_norm: Handle | None
    sinks: Handle | None
    attention_norm: NormWeights | None
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp_post_norm: NormWeights | None
    gate_up: Handle | None
    down: Handle | None
    experts: ExpertBlock | None
    shared: SharedExperts | None


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """What every row goes through beside its experts; `score` says how much of it, where the family has that."""

    gate_up: Handle
    down: Handle
    score: Handle | None


@dataclass(frozen=True, slots=True)
class HeadWeights:
    norm: NormWeights
    head: Handle


class Decoder:
    """Layers `[stage.start, stage.stop)` of a model, with embedding and head at its ends, and what `adapters` add to
    its layers. As a tensor `rank` it has the tensors of its share, which `source` and `adapters` give cut already, and
    logits of its own part of the vocabulary."""

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        source: TensorSource,
        adapters: AdapterLayers = NO_ADAPTERS,
        rank: TensorRank | None = None,
        pictures: PictureNetwork | None = None,
    ) -> None:
        self.rank = rank
        self.spec = spec = spec if rank is None else rank_spec(spec, rank.share)
        self.stage = stage
        self._source = source
        self._adapters = adapters
        self.is_first = stage.is_first
        self.is_last = stage.is_last
        self.layer_count = stage.count
        self.hidden = spec.hidden
        self.vocab_size = spec.vocab_size
        self.kv_shape = spec.kv_shape
        self.context_length = spec.context_length
        self.pictures = pictures

    # Loading

    def load_shared(self, ops: Ops) -> list[Handle]:
        """What all layers share: the rotations."""
        return [ops.rotation(partial(rope_tables, rope), rope.axes) for rope in self.spec.ropes]

    def load_embedding(self, ops: Ops) -> Handle:
        if self.rank is None and isinstance(ops, StoredTableOps) and isinstance(self._source, StoredTables):
            stored = self._source.stored_rows("embedding")
            if stored is not None:
                return ops.stored_table(stored)
        first = None if self.rank is None else self.rank.share.vocabulary[0]
        return ops.table(self._source.matrix("embedding"), first)

    def load_head(self, ops: Ops) -> HeadWeights:
        norm = _TensorReader(ops, self._source, None).norm("norm", self.spec.has_norm_bias)
        return HeadWeights(norm, ops.matrix([self._source.matrix("head")], None))

    def load_layer(self, ops: Ops, layer: int) -> LayerWeights:
        spec, index = self.spec, self.stage.start + layer
        load = _TensorReader(ops, self._source, index, self._adapters)
        before = spec.norm_placement in ("before", "around")
        after = spec.norm_placement in ("after", "around")
        is_sparse = spec.layers[index].is_sparse
        gate_up = ["mlp.gate", "mlp.up"] if spec.has_gate else ["mlp.up"]

        def norm(name: str, is_present: bool) -> NormWeights | None:
            return load.norm(name, spec.has_norm_bias) if is_present else None

        return LayerWeights(
            attention_norm=norm("attention.norm", before),
            qkv=None if spec.latent is not None else load.linear(_QKV, spec.has_qkv_bias),
            latent=None if spec.latent is None else load_latent(ops, self._source, spec, spec.latent, index),
            q_norm=self._load_qk_norm(load, "attention.q_norm"),
            k_norm=self._load_qk_norm(load, "attention.k_norm"),
            sinks=load.vector("attention.sinks", spec.has_sinks),
            out=load.linear(["attention.out"], spec.has_out_bias),
            attention_post_norm=norm("attention.post_norm", after),
            mlp_norm=norm("mlp.norm", before and not spec.is_parallel),
            gate_up=None if is_sparse else load.linear(gate_up, spec.has_mlp_bias),
            down=None if is_sparse else load.linear(["mlp.down"], spec.has_mlp_bias),
            experts=self._load_experts(load) if is_sparse else None,
            shared=self._load_shared(load) if is_sparse else None,
            mlp_post_norm=norm("mlp.post_norm", after),
        )

    def _load_qk_norm(self, load: _TensorReader, name: str) -> Handle | None:
        if self.spec.qk_norm == "unit":
            return load.ops.vector(np.ones(self.spec.head_dim, dtype=np.float32))
        return load.vector(name, self.spec.qk_norm != "none")

    def _load_experts(self, load: _TensorReader) -> ExpertBlock:
        experts = self.spec.experts
        if experts is None:
            raise ValueError("a sparse layer needs an Experts spec")
        expert = "experts.{}.{}".format
        owned = None if self.rank is None else self.rank.owned_experts
        numbers = range(*(owned or (0, experts.count)))
        return ExpertBlock(
            router=load.linear(["mlp.router"], experts.has_bias),
            gate_up=[load.linear([expert(e, "gate"), expert(e, "up")], experts.has_bias) for e in numbers],
            down=[load.linear([expert(e, "down")], experts.has_bias) for e in numbers],
            per_token=experts.per_token,
            gate=Gate(self.spec.activation, experts.swiglu_limit),
            routing=experts.routing,
            choice_bias=load.vector("mlp.choice_bias", experts.routing.has_choice_bias),
            owned=owned,
            group=None if self.rank is None or self.rank.sums else self.rank.group,
        )

    def _load_shared(self, load: _TensorReader) -> SharedExperts | None:
        experts = self.spec.experts
        if experts is None or not experts.shared_intermediate:
            return None
        return SharedExperts(
            gate_up=load.linear(["shared.gate", "shared.up"], has_bias=False),
            down=load.linear(["shared.down"], has_bias=False),
            score=load.linear(["mlp.shared_score"], has_bias=False) if experts.has_shared_gate else None,
        )

    # Computing

    def embed(self, ops: Ops, embedding: Handle, ids: Tensor) -> Tensor:
        x = ops.embed(embedding, ids)
        if self.rank is not None:
            x = self.rank.reduce(ops, x)
        return _scaled(ops, x, self.spec.embedding_scale)

    def layer(
        self, ops: Ops, shared: Sequence[Handle], weights: LayerWeights, layer: int, x: Tensor
    ) -> Tensor:
        y = self._norm(ops, x, weights.attention_norm)
        attended = self._attention(ops, shared, weights, layer, y)
        x = self._joined(ops, x, attended, weights.attention_post_norm)
        if not self.spec.is_parallel:
            y = self._norm(ops, x, weights.mlp_norm)
        return self._joined(ops, x, self._feed_forward(ops, weights, y), weights.mlp_post_norm)

    def normed(self, ops: Ops, weights: HeadWeights, x: Tensor) -> Tensor:
        return self._norm(ops, ops.logit_rows(x), weights.norm)

    def head(self, ops: Ops, weights: HeadWeights, x: Tensor) -> Tensor:
        # Scaled before, not behind the product: backends give logits straight from their widest sums.
        logits = ops.linear(_scaled(ops, x, self.spec.logit_scale), weights.head)
        cap = self.spec.logit_softcap
        return logits if cap is None else ops.softcap(logits, cap)

    def _joined(self, ops: Ops, x: Tensor, y: Tensor, post_norm: NormWeights | None) -> Tensor:
        """The residual stream with what a block adds to it."""
        return ops.add(x, _scaled(ops, self._norm(ops, y, post_norm), self.spec.residual_scale))

    def _norm(self, ops: Ops, x: Tensor, norm: NormWeights | None) -> Tensor:
        if norm is None:
            return x
        if self.spec.norm == "layer":
            return ops.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)
        return ops.rms_norm(x, norm.weight, self.spec.norm_eps)

    def _attention(
        self, ops: Ops, shared: Sequence[Handle], weights: LayerWeights, layer: int, x: Tensor
    ) -> Tensor:
        spec = self.spec
        kind = spec.layers[self.stage.start + layer]
        if spec.latent is not None and weights.latent is not None and kind.rope is not None:
            mixed = attend_latent(ops, spec, spec.latent, weights.latent, shared[kind.rope], layer, x)
            return self._answer(ops, mixed, weights.out, "heads")
        q, k, v = self._heads(ops, weights, x)
        query_rope = kind.rope if kind.query_rope is None else kind.query_rope
        if query_rope is not None:
            q = ops.rotate(q, spec.head_dim, shared[query_rope])
        if kind.rope is not None:
            k = ops.rotate(k, spec.head_dim, shared[kind.rope])
            if spec.norms_turned:
                q, k = self._norm_heads(ops, weights, q, k)
        attention = Attention(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=kind.window,
            chunk=kind.chunk,
            softcap=spec.attention_softcap,
            sinks=weights.sinks,
        )
        return self._answer(ops, ops.attend(q, k, v, layer, attention), weights.out, "heads")

    def _heads(self, ops: Ops, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads that are attended with here, normed where that comes before turning."""
        spec, rank = self.spec, self.rank
        has_all = rank is not None and spec.qk_norm == "width"
        normed = rank.spec if rank is not None and has_all else spec
        widths = [n * spec.head_dim for n in (normed.heads, normed.kv_heads, spec.kv_heads)]
        q, k, v = ops.split(self._inner(ops, x, weights.qkv), widths)
        if not spec.norms_turned:
            q, k = self._norm_heads(ops, weights, q, k)
        if rank is not None and has_all:
            q, k = rank.own_heads(ops, q, k)
        return q, k, v

    def _inner(self, ops: Ops, x: Tensor, matrix: Handle) -> Tensor:
        """A block's first linear map."""
        return ops.linear(x, matrix) if self.rank is None else self.rank.enter(ops, x, matrix)

    def _answer(self, ops: Ops, x: Tensor, matrix: Handle, inner: Inner) -> Tensor:
        """A block's last linear map; all ranks' where there are several."""
        return ops.linear(x, matrix) if self.rank is None else self.rank.project(ops, x, matrix, inner)

    def _norm_heads(self, ops: Ops, weights: LayerWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if weights.q_norm is None:
            return q, k
        eps = self.spec.norm_eps
        return ops.rms_norm(q, weights.q_norm, eps), ops.rms_norm(k, weights.k_norm, eps)

    def _feed_forward(self, ops: Ops, weights: LayerWeights, x: Tensor) -> Tensor:
        if weights.experts is None:
            inner = self._inner(ops, x, weights.gate_up)
            if self.spec.has_gate:
                inner = ops.gated(inner, Gate(self.spec.activation))
            else:
                inner = ops.activate(inner, self.spec.activation)
            return self._answer(ops, inner, weights.down, "columns")
        answer = self._sparse(ops, weights, weights.experts, x)
        return self.rank.reduce(ops, answer) if self.rank is not None and self.rank.sums else answer

    def _sparse(self, ops: Ops, weights: LayerWeights, experts: ExpertBlock, x: Tensor) -> Tensor:
        """The answer of experts, and of what every row goes through besides; this rank's part of it where ranks sum."""
        shared = weights.shared
        if shared is None:
            return ops.experts(x, experts)
        # First, so that a backend that runs graphs between experts has it in the graph of the router.
        inner = ops.gated(ops.linear(x, shared.gate_up), Gate(self.spec.activation))
        gathers = self.rank is not None and not self.rank.sums
        common = (
            self._answer(ops, inner, shared.down, "shared_columns")
            if gathers
            else ops.linear(inner, shared.down)
        )
        if shared.score is not None:
            common = ops.weigh(common, ops.linear(x, shared.score))
        return ops.add(ops.experts(x, experts), common)


def _scaled(ops: Ops, x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor)


@dataclass(frozen=True, slots=True)
class _TensorReader:
    """Reads tensors of one layer (None: of the whole model) and turns them into handles."""

    ops: Ops
    source: TensorSource
    layer: int | None
    adapters: AdapterLayers = NO_ADAPTERS

    def norm(self, name: str, has_bias: bool) -> NormWeights:
        weight = self.ops.vector(self.source.vector(name, self.layer))
        return NormWeights(weight, self.vector(f"{name}.bias", has_bias))

    def vector(self, name: str, is_present: bool) -> Any:
        return self.ops.vector(self.source.vector(name, self.layer)) if is_present else None

    def linear(self, names: Sequence[str], has_bias: bool) -> Any:
        parts = [self.source.matrix(name, self.layer) for name in names]
        bias = None
        if has_bias:
            bias = np.concatenate([self.source.vector(f"{name}.bias", self.layer) for name in names])
        if self.layer is None or not self.adapters.names:
            return self.ops.matrix(parts, bias)
        widths = [part.shape[0] for part in parts]
        return self.ops.matrix(parts, bias, self.adapters.low_rank(self.layer, names, widths))
