"""Bytes of a model's stages as sums over prefixes, so that any stage is measured in constant time.

Files, work and what is held are different sums, and what is held differs by who holds it (`Sizes.on`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil

from shardcompute.backends.footprint import pooled_tokens
from shardcompute.control.state import (
    Assignment,
    ClusterState,
    LayerShape,
    Model,
    RankPlace,
    ShardPlace,
    TensorTerms,
)
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.models.families import is_fallback
from shardcompute.models.spec import Layer, ModelSpec
from shardcompute.models.tensor_share import Exchange, TensorShare, TensorSplit, rank_spec, split_tensors
from shardcompute.weights.adapter_pack import adapters_key
from shardcompute.weights.card import Card
from shardcompute.weights.held import HeldSizes, card_column_block, held_sizes_of_card

LAYER_OVERHEAD_BYTES = 3_500_000
"""What a layer costs besides reading its weights (norms, attention, calls), as bytes read in the same time. Measured
on CPUs with a model whose head is thirteen times a layer's bytes and five times its work."""


INNER = "inner "
"""Before a holding: for machines that may have neither the first nor the last layer, however much memory they have."""
_ENDLESS = 1 << 60
"""More than any machine has; four times as much still is a number of 63 bits."""
_LEAST_LOG_BYTES = 16 << 20
"""What a stage keeps for its activation log at least; less where all of its conversations fit into less. What is left
of a machine's memory is for logs, too."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of one stage, by what it is for."""

    weights_bytes: int
    scratch_bytes: int
    """Buffers of the largest step that it may be given, and `log_bytes`."""
    kv_bytes: int
    """Reserved for conversations, whether or not it is filled."""
    log_bytes: int = 0
    """Of the scratch, the least that is kept for its activation log."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.scratch_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class HeldSums:
    """What stages take in memory where they are held in one way (see `backends.footprint`)."""

    memory_before: tuple[int, ...]
    """Weights and KV of layers `[0, i)`."""
    embedding_bytes: int
    head_bytes: int
    """With what only the last stage needs besides: room for logits."""
    shared_bytes: int
    """Counted once, not twice, where one stage is the whole model."""
    overhead_bytes: int
    """Of every stage: scratch, and `log_bytes`."""
    log_bytes: int
    head_scratch_bytes: int
    kv_bytes: int
    """Of one layer."""
    densest_work: float
    """The most bytes read per byte of memory in any layer."""
    table_bytes: int
    """The embedding where it does not stay in its file."""

    @property
    def layer_count(self) -> int:
        return len(self.memory_before) - 1

    @property
    def total_bytes(self) -> int:
        """What the whole model takes on one machine."""
        return self.memory_bytes(0, self.layer_count)

    def ends_bytes(self, start: int, stop: int) -> int:
        is_first, is_last = start == 0, stop == self.layer_count
        both = self.embedding_bytes * is_first + self.head_bytes * is_last
        return both - self.shared_bytes * (is_first and is_last)

    def memory_bytes(self, start: int, stop: int) -> int:
        """What a shard of these layers needs in memory."""
        layers = self.memory_before[stop] - self.memory_before[start]
        return layers + self.ends_bytes(start, stop) + self.overhead_bytes

    def parts(self, start: int, stop: int) -> StageBytes:
        scratch = self.overhead_bytes + self.head_scratch_bytes * (stop == self.layer_count)
        kv = self.kv_bytes * (stop - start)
        return StageBytes(self.memory_bytes(start, stop) - scratch - kv, scratch, kv, self.log_bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """`…_before[i]` is the sum over layers `[0, i)`; embedding and head belong to the first and last stage."""

    weights_before: tuple[int, ...]
    """As the files have them."""
    work_before: tuple[int, ...]
    """Bytes read for one row."""
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int
    """Travels once, not twice, where one stage is the whole model."""
    is_uniform: bool
    """All layers are alike."""
    held: Mapping[str, HeldSums]
    """By holding; "" counts by what files have, for whom nothing else is known."""

    @property
    def layer_count(self) -> int:
        return len(self.weights_before) - 1

    @property
    def file_bytes(self) -> int:
        """All weights, as files and on the wire."""
        return self.weights_before[-1] + self.embedding_bytes + self.head_bytes - self.shared_bytes

    def on(self, holding: str) -> HeldSums:
        return self.held.get(holding) or self.held[INNER if holding.startswith(INNER) else ""]

    def work_bytes(self, start: int, stop: int) -> int:
        """What is read to move one row through these layers; looking up an embedding reads next to nothing."""
        head = self.head_bytes if stop == self.layer_count else 0
        return self.work_before[stop] - self.work_before[start] + head

    def bytes_to_move(self, start: int, stop: int, held: Iterable[tuple[int, int]]) -> int:
        """Weights of these layers that a node holding the ranges `held` still has to fetch."""
        held = list(held)
        missing = sum(
            self.weights_before[layer + 1] - self.weights_before[layer]
            for layer in range(start, stop)
            if not any(first <= layer < last for first, last in held)
        )
        if start == 0 and not any(first == 0 for first, _ in held):
            missing += self.embedding_bytes
        if stop == self.layer_count and not any(last == stop for _, last in held):
            missing += self.head_bytes - (self.shared_bytes if start == 0 else 0)
        return missing


@lru_cache(maxsize=64)
def sizes_of(model: Model) -> Sizes:
    work = model.work_bytes or model.layer_bytes
    shared = min(model.embedding_bytes, model.head_bytes) if model.is_head_tied else 0
    held = {
        each.holder: _held_sums(model, work, each, dict(each.kv_bytes)[model.kv_type]) for each in model.held
    }
    held[""] = _file_sums(model, work, shared)
    held |= {INNER + holder: _without_ends(sums) for holder, sums in held.items()}
    return Sizes(
        weights_before=_sums(model.layer_bytes),
        work_before=_sums(work),
        embedding_bytes=model.embedding_bytes,
        head_bytes=model.head_bytes,
        shared_bytes=shared,
        is_uniform=all(
            len(set(sizes)) == 1
            for sizes in (model.layer_bytes, work, *(each.layer_bytes for each in model.held))
        ),
        held=held,
    )


def shape_of(model: Model) -> LayerShape:
    """By which the speed of a model is known on machines that have tried one like it."""
    work_bytes = sizes_of(model).work_before[-1] // max(1, model.layer_count)
    return LayerShape(model.hidden, work_bytes, model.weight_form)


def _held_sums(model: Model, work: Sequence[int], held: HeldSizes, kv_token_bytes: int) -> HeldSums:
    kv_bytes = kv_token_bytes * pooled_tokens(model.kv_tokens)
    log_bytes = min(_LEAST_LOG_BYTES, 4 * model.hidden * model.kv_tokens)
    return HeldSums(
        memory_before=_sums(size + kv_bytes for size in held.layer_bytes),
        embedding_bytes=held.embedding_bytes,
        head_bytes=held.head_bytes + held.head_scratch_bytes,
        shared_bytes=0,
        overhead_bytes=held.scratch_bytes + log_bytes,
        log_bytes=log_bytes,
        head_scratch_bytes=held.head_scratch_bytes,
        kv_bytes=kv_bytes,
        densest_work=_densest(work, held.layer_bytes, kv_bytes),
        table_bytes=held.table_bytes or held.embedding_bytes,
    )


def _file_sums(model: Model, work: Sequence[int], shared_bytes: int) -> HeldSums:
    kv_bytes = model.kv_bytes_per_token_and_layer * model.kv_tokens
    return HeldSums(
        memory_before=_sums(size + kv_bytes for size in model.layer_bytes),
        embedding_bytes=model.embedding_bytes,
        head_bytes=model.head_bytes,
        shared_bytes=shared_bytes,
        overhead_bytes=model.shard_overhead_bytes,
        log_bytes=0,
        head_scratch_bytes=0,
        kv_bytes=kv_bytes,
        densest_work=_densest(work, model.layer_bytes, kv_bytes),
        table_bytes=model.embedding_bytes,
    )


def _without_ends(held: HeldSums) -> HeldSums:
    """For who may hold no boundary layer: that both ends are too large for it every search understands."""
    return replace(held, embedding_bytes=_ENDLESS, head_bytes=_ENDLESS, shared_bytes=0)


def _densest(work: Sequence[int], layer_bytes: Sequence[int], kv_bytes: int) -> float:
    return max(
        (read / max(1, size + kv_bytes) for read, size in zip(work, layer_bytes, strict=True)), default=1.0
    )


def memory_of(state: ClusterState, model: Model, assignment: Assignment, node: str = "") -> int:
    """What a stage takes on its node, or on another member, in the costs of what holds it there."""
    return parts_of(state, model, assignment, node).total_bytes


def needs_of(state: ClusterState, model: Model, assignment: Assignment) -> dict[str, int]:
    """What a stage takes, by member."""
    return {node: memory_of(state, model, assignment, node) for node in assignment.members}


def parts_of(state: ClusterState, model: Model, assignment: Assignment, node: str = "") -> StageBytes:
    id = node or assignment.node
    known = state.nodes.get(id)
    holding = known.holding_of(model) if known is not None else ""
    return sums_of(model, holding, assignment.place_of(id)).parts(assignment.start, assignment.stop)


def place_bytes(model: Model, holding: str, place: ShardPlace) -> int:
    """What layers, or a rank's share of them, take where they are held in this way."""
    _, start, stop, tensor = place
    return sums_of(model, holding, tensor).memory_bytes(start, stop)


def sums_of(model: Model, holding: str, tensor: RankPlace | None = None) -> HeldSums:
    """What stages take where they are held in this way, or what a tensor rank's share of them does."""
    if tensor is None or model.tensor is None:
        return sizes_of(model).on(holding)
    return _share_sums(model, holding, tensor)


def split_of(terms: TensorTerms, weights: Sequence[int], exchange: Exchange) -> TensorSplit:
    """The shares of all ranks: the same on every machine that knows the model. UnsupportedModelError where it has too
    few heads or columns for so many."""
    return _split(terms, tuple(weights), exchange)


@lru_cache(maxsize=256)
def _split(terms: TensorTerms, weights: tuple[int, ...], exchange: Exchange) -> TensorSplit:
    return split_tensors(terms.spec, weights, block=terms.block, exchange=exchange)


@lru_cache(maxsize=256)
def _share_sums(model: Model, holding: str, tensor: RankPlace) -> HeldSums:
    """A rank has its heads' keys and values, its rows of embedding and head, and its part of each layer's weights;
    buffers are those of the whole stage."""
    terms, whole = model.tensor, sizes_of(model).on(holding)
    assert terms is not None
    share = split_of(terms, tensor.weights, tensor.exchange).shares[tensor.rank]
    kv_part = _kv_part(terms.spec, share)
    parts = {
        is_sparse: weights_part(terms.spec, share, is_sparse=is_sparse) for is_sparse in set(terms.sparse)
    }
    rows = (share.vocabulary[1] - share.vocabulary[0]) / terms.spec.vocab_size
    layers = [b - a - whole.kv_bytes for a, b in pairwise(whole.memory_before)]
    kv_bytes = ceil(whole.kv_bytes * kv_part)
    return replace(
        whole,
        memory_before=_sums(
            ceil(size * parts[is_sparse]) + kv_bytes
            for size, is_sparse in zip(layers, terms.sparse, strict=True)
        ),
        embedding_bytes=ceil(whole.table_bytes * rows),
        head_bytes=ceil((whole.head_bytes - whole.head_scratch_bytes) * rows) + whole.head_scratch_bytes,
        shared_bytes=int(whole.shared_bytes * rows),
        kv_bytes=kv_bytes,
    )


def weights_part(spec: ModelSpec, share: TensorShare, *, is_sparse: bool = False) -> float:
    """Which part of a layer's weights a rank holds."""
    layer, own = Layer(is_sparse=is_sparse), rank_spec(spec, share)
    held, whole = layer_weights(own, layer)[0], layer_weights(spec, layer)[0]
    if is_sparse and spec.experts is not None:
        # Of experts that are not cut a rank holds some, of those that are cut a part of each.
        count = share.experts[1] - share.experts[0]
        one = 3 * spec.hidden * (share.expert_columns[1] - share.expert_columns[0])
        held -= (spec.experts.count - count) * one
    return min(1.0, held / whole)


def _kv_part(spec: ModelSpec, share: TensorShare) -> float:
    if spec.latent is not None:
        return 1.0
    return (share.kv_heads[1] - share.kv_heads[0]) / spec.kv_heads


def tensor_terms(spec: ModelSpec, block: Callable[[], int]) -> TensorTerms | None:
    """How ranks may cut a model, whose quantised blocks have so many columns; None where they cannot."""
    if is_fallback(spec) or spec.is_whole:
        return None
    sparse = tuple(layer.is_sparse for layer in spec.layers)
    return TensorTerms(replace(spec, layers=(), ropes=(), vision=None), sparse, block())


def usual_holding(holdings: Iterable[str]) -> str:
    """The one of most machines: for figures about a model that no machine is given for."""
    counts = Counter(each.removeprefix(INNER) for each in holdings)
    return min(counts, key=lambda each: (-counts[each], each)) if counts else ""


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def layer_weights(spec: ModelSpec, layer: Layer) -> tuple[int, int]:
    """How many weights a layer holds, and how many of them one row reads."""
    attention = _attention_weights(spec)
    if not (layer.is_sparse and spec.experts is not None):
        total = attention + (3 if spec.has_gate else 2) * spec.hidden * spec.intermediate
        return total, total
    one = 3 * spec.hidden * spec.experts.intermediate
    shared = 3 * spec.hidden * spec.experts.shared_intermediate
    common = attention + spec.hidden * spec.experts.count + shared
    return common + spec.experts.count * one, common + spec.experts.per_token * one


def _attention_weights(spec: ModelSpec) -> int:
    latent = spec.latent
    if latent is None:
        return spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    queries = spec.heads * (latent.plain + latent.rotated)
    if latent.q_rank is None:
        queries *= spec.hidden
    else:
        queries = latent.q_rank * (spec.hidden + queries)
    kept = spec.hidden * spec.head_dim + latent.kv_rank * spec.heads * (latent.plain + latent.value)
    return queries + kept + spec.heads * latent.value * spec.hidden


def layer_work(spec: ModelSpec, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """What one row costs in each layer, in bytes read: of experts only those that it is sent to."""
    shares = (read / held for held, read in (layer_weights(spec, layer) for layer in spec.layers))
    return tuple(
        round(size * share) + LAYER_OVERHEAD_BYTES for size, share in zip(layer_bytes, shares, strict=True)
    )


def runner_of(spec: ModelSpec) -> str:
    """What alone can run a model, see `Model.runner`."""
    return "transformers" if is_fallback(spec) else ""


def describe_card(
    card: Card, *, kv_tokens: int, context_length: int, kv_type: KvType = DEFAULT_KV_TYPE
) -> Model:
    """The sizes of a model as it is served, for placement and for those who load parts of it."""
    spec = card.spec
    layer_bytes = tuple(card.layer_bytes(layer) for layer in range(spec.layer_count))
    norm = sum(card.entries[name].size_bytes for name in card.stored_names(card.layout.model["norm"]))
    return Model(
        name=card.model,
        layer_bytes=layer_bytes,
        work_bytes=layer_work(spec, layer_bytes),
        embedding_bytes=card.embedding_bytes,
        head_bytes=card.head_bytes + norm,
        kv_bytes_per_token_and_layer=spec.kv_bytes_per_token_and_layer(kv_type),
        kv_type=kv_type,
        kv_tokens=kv_tokens,
        hidden=spec.hidden,
        context_length=context_length,
        weight_form=card.form,
        is_head_tied=spec.tied_head,
        runner=runner_of(spec),
        is_whole=spec.is_whole,
        adapters=adapters_key(card.entries),
        held=held_sizes_of_card(card, context_length=context_length),
        tensor=tensor_terms(spec, lambda: card_column_block(card)),
        sees=spec.vision is not None,
    )
