"""The tensors of a tower, by our names: which there are, and with what shapes.

`patch`, `positions`, `norm`, `row_norm`, `merge.{inner,out}`, and for each layer `layers.{i}.` with
`attention.{norm,q,k,v,qkv,out}` and `mlp.{norm,gate,up,down}`; biases as in `models.layout`, and all of them with
`models.layout.TOWER` before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardcompute.models.spec import VisionSpec

TowerSlot = tuple[str, tuple[int, ...]]


def qkv_names(vision: VisionSpec) -> tuple[str, ...]:
    """Towers with learned positions store three matrices, others one."""
    if vision.positions:
        return ("attention.q", "attention.k", "attention.v")
    return ("attention.qkv",)


def tower_slots(vision: VisionSpec, width: int) -> Iterator[TowerSlot]:
    """Those of a tower beside a text model of this width."""
    hidden = vision.hidden
    yield "patch", (hidden, vision.patch_bytes * vision.frames)
    if vision.positions:
        yield "patch.bias", (hidden,)
        yield "positions", (vision.positions, hidden)
    for layer in range(vision.layers):
        for name, shape in _layer_slots(vision):
            yield f"layers.{layer}.{name}", shape
    yield from _norm_slots(vision, "norm")
    if vision.is_pooled:
        yield "row_norm", (hidden,)
        yield "merge.out", (width, hidden)
        return
    merged = hidden * vision.merge**2
    yield from _linear_slots("merge.inner", (merged, merged))
    yield from _linear_slots("merge.out", (width, merged))


def _layer_slots(vision: VisionSpec) -> Iterator[TowerSlot]:
    hidden, inner, names = vision.hidden, vision.intermediate, qkv_names(vision)
    yield from _norm_slots(vision, "attention.norm")
    for name in names:
        yield from _linear_slots(name, (3 * hidden // len(names), hidden))
    yield from _linear_slots("attention.out", (hidden, hidden))
    yield from _norm_slots(vision, "mlp.norm")
    if vision.has_gate:
        yield from _linear_slots("mlp.gate", (inner, hidden))
    yield from _linear_slots("mlp.up", (inner, hidden))
    yield from _linear_slots("mlp.down", (hidden, inner))


def _norm_slots(vision: VisionSpec, name: str) -> Iterator[TowerSlot]:
    yield name, (vision.hidden,)
    if vision.norm == "layer":
        yield f"{name}.bias", (vision.hidden,)


def _linear_slots(name: str, shape: tuple[int, int]) -> Iterator[TowerSlot]:
    yield name, shape
    yield f"{name}.bias", shape[:1]
