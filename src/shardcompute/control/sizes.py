"""Bytes of a model's stages as sums over prefixes, so that any stage is measured in constant time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from shardcompute.control.state import Assignment, Model
from shardcompute.models.spec import Layer, ModelSpec

LAYER_OVERHEAD_BYTES = 3_500_000
"""What a layer costs besides reading its weights (norms, attention, calls), as bytes read in the same time. Measured
on CPUs with a model whose head is thirteen times a layer's bytes and five times its work."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`…_before[i]` is the sum over layers `[0, i)`; embedding and head belong to the first and last stage."""

    weights_before: tuple[int, ...]
    memory_before: tuple[int, ...]
    """Weights and KV."""
    work_before: tuple[int, ...]
    """Bytes read for one row."""
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int
    """Counted once, not twice, where one stage is the whole model."""
    overhead_bytes: int
    densest_work: float
    """The most bytes read per byte of memory in any layer."""

    is_uniform: bool
    """All layers are alike."""

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
    kv_bytes = model.kv_bytes_per_token_and_layer * model.kv_tokens
    work = model.work_bytes or model.layer_bytes
    return Sizes(
        weights_before=_sums(model.layer_bytes),
        memory_before=_sums(size + kv_bytes for size in model.layer_bytes),
        work_before=_sums(work),
        embedding_bytes=model.embedding_bytes,
        head_bytes=model.head_bytes,
        shared_bytes=min(model.embedding_bytes, model.head_bytes) if model.is_head_tied else 0,
        overhead_bytes=model.shard_overhead_bytes,
        densest_work=max(
            (read / max(1, size + kv_bytes) for read, size in zip(work, model.layer_bytes, strict=True)),
            default=1.0,
        ),
        is_uniform=len(set(model.layer_bytes)) == len(set(work)) == 1,
    )


def kv_bytes_of(model: Model, start: int, stop: int) -> int:
    """Of what layers `[start, stop)` take in memory, the part for conversations."""
    return (stop - start) * model.kv_bytes_per_token_and_layer * model.kv_tokens


def memory_of(model: Model, assignment: Assignment) -> int:
    return sizes_of(model).memory_bytes(assignment.start, assignment.stop)


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def layer_weights(spec: ModelSpec, layer: Layer) -> tuple[int, int]:
    """How many weights a layer holds, and how many of them one row reads."""
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    if not (layer.is_sparse and spec.experts is not None):
        total = attention + 3 * spec.hidden * spec.intermediate
        return total, total
    one = 3 * spec.hidden * spec.experts.intermediate
    router = spec.hidden * spec.experts.count
    return (
        attention + router + spec.experts.count * one,
        attention + router + spec.experts.per_token * one,
    )


def layer_work(spec: ModelSpec, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """What one row costs in each layer, in bytes read: of experts only those that it is sent to."""
    shares = (read / held for held, read in (layer_weights(spec, layer) for layer in spec.layers))
    return tuple(
        round(size * share) + LAYER_OVERHEAD_BYTES for size, share in zip(layer_bytes, shares, strict=True)
    )
