"""The linear maps that are adapted, by the names that PEFT gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.finetune.adapters.parts import BOTTLENECK_MAPS
from shardcompute.finetune.plan import LoraShape
from shardcompute.models.families import is_fallback, is_foreign
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.adapters import BaseModule, base_modules


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """One linear map of a layer. `name` is PEFT's, `tail` the part of it within the layer."""

    layer: int
    tail: str
    name: str
    module: BaseModule


def choose_modules(
    spec: ModelSpec, layout: Layout, lora: LoraShape, *, is_gguf: bool, stage: Stage | None = None
) -> tuple[AdaptedMap, ...]:
    """Those of a stage (None: of the model) that `lora` adapts, layer by layer."""
    if is_fallback(spec) or is_foreign(spec):
        raise UnsupportedModelError(
            f"{spec.family} is run by another library, and its layers cannot be taught here",
            hint="choose a model of a family that is known (docs/models.md)",
        )
    found = []
    all_modules = base_modules(spec, layout, is_gguf=is_gguf)
    if lora.kind == "bottleneck":
        all_modules = {key: each for key, each in all_modules.items() if _ends_block(each)}
    _check_targets(lora.targets, all_modules, spec.family)
    for (layer, tail), module in sorted(all_modules.items()):
        is_here = stage is None or stage.start <= layer < stage.stop
        if not is_here or not module.is_adaptable or not _is_target(tail, lora.targets):
            continue
        name = f"model.layers.{layer}.{tail}" if is_gguf else module.stored.removesuffix(".weight")
        found.append(AdaptedMap(layer, tail, f"base_model.model.{name}", module))
    return tuple(found)


def _ends_block(module: BaseModule) -> bool:
    return all(name in BOTTLENECK_MAPS for name, _ in module.places)


def _is_target(tail: str, targets: Sequence[str]) -> bool:
    return not targets or any(tail == each or tail.endswith(f".{each}") for each in targets)


def _check_targets(targets: Sequence[str], modules: dict[tuple[int, str], BaseModule], family: str) -> None:
    usable = {tail for (_, tail), module in modules.items() if module.is_adaptable}
    for target in targets:
        if not any(_is_target(tail, (target,)) for tail in usable):
            known = ", ".join(sorted({tail.rpartition(".")[2] for tail in usable}))
            raise UsageError(
                f"a {family} model has no linear map {target!r} that can be adapted",
                hint=f"use --targets {known}",
            )
