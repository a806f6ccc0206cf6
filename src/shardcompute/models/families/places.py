"""Tensor places: what tensors a spec needs, and a layout made of them.

A `Slot` is one tensor as the decoder wants it; `Slot.at` says where a checkpoint keeps it. Families give a
function that does so for every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families.fields import FALLBACK_HINT, shown
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import LatentAttention, ModelSpec


class UnknownTensorsError(UnsupportedModelError):
    """A checkpoint has tensors that nothing of its family reads."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a layer (`layer` is None: of the whole model), by our name. `unit` is how many rows are one
    head's, where checkpoints may keep its matrix apart."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    unit: int = 1

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm")

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    @property
    def matrix(self) -> str:
        """The name without `.bias`."""
        return self.name.removesuffix(".bias")

    @property
    def expert(self) -> tuple[int, str] | None:
        """(expert, gate/up/down) of an expert's tensor."""
        parts = self.matrix.split(".")
        return (int(parts[1]), parts[2]) if parts[0] == "experts" else None

    def at(self, stored: str) -> TensorPlace:
        return TensorPlace(stored, self.shape)


FUSED = frozenset(
    {"attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up", "shared.gate", "shared.up"}
)
"""What some checkpoints store as one matrix of q, k, v or one of gate, up."""

Locate = Callable[[Slot], TensorPlace]


def make_layout(spec: ModelSpec, locate: Locate, stored: Collection[str], ignored: tuple[str, ...]) -> Layout:
    """The layout of a checkpoint that holds exactly the tensors of `spec`, besides `ignored` ones."""
    layout = Layout(
        model={slot.name: locate(slot) for slot in model_slots(spec)},
        layers=tuple(
            {slot.name: locate(slot) for slot in layer_slots(spec, layer)}
            for layer in range(spec.layer_count)
        ),
        ignored=ignored,
    )
    _check_complete(spec, layout, stored)
    return layout


def model_slots(spec: ModelSpec) -> Iterator[Slot]:
    yield Slot("embedding", None, (spec.vocab_size, spec.hidden))
    yield from _norm_slots("norm", None, spec)
    yield Slot("head", None, (spec.vocab_size, spec.hidden))


def layer_slots(spec: ModelSpec, layer: int) -> Iterator[Slot]:
    yield from _attention_slots(spec, layer)
    if spec.norm_placement != "after" and not spec.is_parallel:
        yield from _norm_slots("mlp.norm", layer, spec)
    if spec.layers[layer].is_sparse:
        yield from _expert_slots(spec, layer)
    else:
        yield from _mlp_slots(spec, layer)
    if spec.norm_placement != "before":
        yield from _norm_slots("mlp.post_norm", layer, spec)


def _norm_slots(name: str, layer: int | None, spec: ModelSpec) -> Iterator[Slot]:
    yield Slot(name, layer, (spec.hidden,))
    if spec.has_norm_bias:
        yield Slot(f"{name}.bias", layer, (spec.hidden,))


def _latent_slots(spec: ModelSpec, latent: LatentAttention, layer: int) -> Iterator[Slot]:
    q_unit, up_unit = latent.plain + latent.rotated, latent.plain + latent.value
    if latent.q_rank is not None:
        yield Slot("attention.q_down", layer, (latent.q_rank, spec.hidden))
        yield Slot("attention.q_latent_norm", layer, (latent.q_rank,))
    q_shape = (spec.heads * q_unit, latent.q_rank or spec.hidden)
    yield Slot("attention.q", layer, q_shape)
    yield Slot("attention.kv_down", layer, (spec.head_dim, spec.hidden))
    yield Slot("attention.kv_norm", layer, (latent.kv_rank,))
    if latent.is_absorbed:
        k_shape, v_shape = (
            (spec.heads * latent.kv_rank, latent.plain),
            (spec.heads * latent.value, latent.kv_rank),
        )
        yield Slot("attention.k_up", layer, k_shape, latent.kv_rank)
        yield Slot("attention.v_up", layer, v_shape, latent.value)
    else:
        yield Slot("attention.kv_up", layer, (spec.heads * up_unit, latent.kv_rank))
    yield Slot("attention.out", layer, (spec.hidden, spec.heads * latent.value))


def _attention_slots(spec: ModelSpec, layer: int) -> Iterator[Slot]:
    if spec.latent is not None:
        yield Slot("attention.norm", layer, (spec.hidden,))
        yield from _latent_slots(spec, spec.latent, layer)
        return
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.norm_placement != "after":
        yield from _norm_slots("attention.norm", layer, spec)
    for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        matrix = Slot(f"attention.{name}", layer, (width, spec.hidden))
        yield matrix
        if spec.has_qkv_bias:
            yield _bias(matrix)
    if spec.qk_norm == "head":
        yield Slot("attention.q_norm", layer, (spec.head_dim,))
        yield Slot("attention.k_norm", layer, (spec.head_dim,))
    elif spec.qk_norm == "width":
        yield Slot("attention.q_norm", layer, (q_width,))
        yield Slot("attention.k_norm", layer, (kv_width,))
    if spec.has_sinks:
        yield Slot("attention.sinks", layer, (spec.heads,))
    out = Slot("attention.out", layer, (spec.hidden, q_width))
    yield out
    if spec.has_out_bias:
        yield _bias(out)
    if spec.norm_placement != "before":
        yield from _norm_slots("attention.post_norm", layer, spec)


def _expert_slots(spec: ModelSpec, layer: int) -> Iterator[Slot]:
    if spec.experts is None:
        raise ValueError("a sparse layer needs an Experts spec")
    router = Slot("mlp.router", layer, (spec.experts.count, spec.hidden))
    yield router
    if spec.experts.has_bias:
        yield _bias(router)
    if spec.experts.routing.has_choice_bias:
        yield Slot("mlp.choice_bias", layer, (spec.experts.count,))
    if spec.experts.shared_intermediate:
        yield from _gated_slots("shared", layer, spec.hidden, spec.experts.shared_intermediate, False)
    if spec.experts.has_shared_gate:
        yield Slot("mlp.shared_score", layer, (1, spec.hidden))
    for expert in range(spec.experts.count):
        prefix = f"experts.{expert}"
        yield from _gated_slots(prefix, layer, spec.hidden, spec.experts.intermediate, spec.experts.has_bias)


def _mlp_slots(spec: ModelSpec, layer: int) -> Iterator[Slot]:
    for slot in _gated_slots("mlp", layer, spec.hidden, spec.intermediate, spec.has_mlp_bias):
        if spec.has_gate or slot.matrix != "mlp.gate":
            yield slot


def _gated_slots(prefix: str, layer: int, hidden: int, intermediate: int, has_bias: bool) -> Iterator[Slot]:
    for name in ("gate", "up"):
        matrix = Slot(f"{prefix}.{name}", layer, (intermediate, hidden))
        yield matrix
        if has_bias:
            yield _bias(matrix)
    down = Slot(f"{prefix}.down", layer, (hidden, intermediate))
    yield down
    if has_bias:
        yield _bias(down)


def _bias(matrix: Slot) -> Slot:
    return Slot(f"{matrix.name}.bias", matrix.layer, matrix.shape[:1])


def _check_complete(spec: ModelSpec, layout: Layout, stored: Collection[str]) -> None:
    used = {place.stored for places in (layout.model, *layout.layers) for place in places.values()}
    names = set(stored)
    if missing := used - names:
        raise CorruptModelError(
            f"the {spec.family} checkpoint lacks {shown(missing)}",
            hint="fetch the model again, all its files; or its description does not fit its weights",
        )
    prefixes = tuple(name[:-1] for name in layout.ignored if name.endswith("*"))
    left = {n for n in names - used - set(layout.ignored) if not (prefixes and n.startswith(prefixes))}
    if left:
        raise UnknownTensorsError(
            f"the checkpoint holds tensors that a {spec.family} model does not have: {shown(left)}",
            hint=f"it is a variant we would run wrongly; {FALLBACK_HINT}",
        )


def fused_rows(spec: ModelSpec, name: str) -> tuple[int, int]:
    """The rows of q, k or v in a matrix of all three, or of gate or up in a matrix of both."""
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shared = spec.experts.shared_intermediate if spec.experts is not None else 0
    return {
        "attention.q": (0, q_width),
        "attention.k": (q_width, q_width + kv_width),
        "attention.v": (q_width + kv_width, q_width + 2 * kv_width),
        "mlp.gate": (0, spec.intermediate),
        "mlp.up": (spec.intermediate, 2 * spec.intermediate),
        "shared.gate": (0, shared),
        "shared.up": (shared, 2 * shared),
    }[name]
