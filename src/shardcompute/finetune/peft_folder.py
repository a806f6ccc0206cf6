"""The folder that comes of a run: what PEFT's `save_pretrained` writes, and a card of what it was taught with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardcompute.backends.matrix import Float32
from shardcompute.finetune.checkpoints import write_tensors
from shardcompute.finetune.modules import AdaptedMap
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.finetune.training import CurvePoint
from shardcompute.weights.sources.disk import disk_errors

_SHOWN_POINTS = 20


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Where an adapter comes from."""

    base: str
    licence: str
    data: str
    data_sha256: str
    examples: int
    plan: FinetunePlan
    curve: tuple[CurvePoint, ...]
    samples: tuple[tuple[str, str, str], ...] = ()
    """Prompts, with the answers before and after."""


def write_peft_folder(
    folder: Path, learned: Mapping[str, Float32], modules: Sequence[AdaptedMap], card: AdapterCard
) -> None:
    """The tensors come last: a folder that has them is whole."""
    lora = card.plan.lora
    config = {
        "peft_type": "BOTTLENECK" if lora.kind == "bottleneck" else "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": card.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.is_rank_stabilised,
        "use_dora": lora.kind == "dora",
        "target_modules": sorted({module.tail for module in modules}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "layers_to_transform": None,
    }
    run = {
        "base": card.base,
        "licence": card.licence,
        "data_sha256": card.data_sha256,
        "examples": card.examples,
        "plan": asdict(card.plan),
        "curve": [asdict(point) for point in card.curve],
    }
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "training.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(describe_card(card), encoding="utf-8")
    write_tensors(folder / "adapter_model.safetensors", learned, {"format": "pt"})


def describe_card(card: AdapterCard, *, is_merged: bool = False) -> str:
    """The card as text: of the adapter, or of a model that it was merged into."""
    plan, lora = card.plan, card.plan.lora
    library = "transformers" if is_merged else "shardcompute" if lora.kind == "bottleneck" else "peft"
    lines = [
        "---",
        f"base_model: {json.dumps(card.base)}",
        f"license: {json.dumps(card.licence)}",
        f"library_name: {library}",
        "---",
        "",
        f"# {card.base} with an adapter merged into it" if is_merged else f"# An adapter of {card.base}",
        "",
        f"{_kind_of(lora)} of rank {lora.rank}{'' if lora.kind == 'bottleneck' else f', alpha {lora.alpha:g}'}, taught "
        f"in {len(card.curve)} steps of {plan.batch} examples.",
        "",
        f"- Licence: {card.licence}",
        f"- Data: {card.data}, {card.examples} examples, SHA-256 `{card.data_sha256}`",
        f"- Rate {plan.rate:g} ({plan.schedule}), seed {plan.seed}; the whole plan is in `training.json`",
        "",
        "| step | loss | held out | gradient norm |",
        "| --- | --- | --- | --- |",
    ]
    for point in _some(card.curve):
        held_out = "" if point.held_out is None else f"{point.held_out:.4f}"
        lines.append(f"| {point.step} | {point.loss:.4f} | {held_out} | {point.norm:.3f} |")
    for prompt, before, after in card.samples:
        lines += ["", f"> {_line(prompt)}", "", f"- before: {_line(before)}", f"- after: {_line(after)}"]
    return "\n".join(lines) + "\n"


def _kind_of(lora: LoraShape) -> str:
    if lora.kind == "bottleneck":
        return "Bottlenecks"
    base = "DoRA" if lora.kind == "dora" else "LoRA"
    return f"rs{base}" if lora.is_rank_stabilised else base


def _some(curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Those that were looked at with care, the first, the last and some between."""
    every = max(1, len(curve) // _SHOWN_POINTS)
    return [
        point
        for place, point in enumerate(curve)
        if place % every == 0 or place == len(curve) - 1 or point.held_out is not None
    ]


def _line(text: str) -> str:
    return " ".join(text.split())
