"""Random PEFT LoRA folders for tiny checkpoints, written by hand, and the same merged into a copy of their base."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def base_tensors(base: Path) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = safetensors.numpy.load_file(base / "model.safetensors")
    return tensors


def save_adapter(
    base: Path,
    folder: Path,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    size: float = 0.3,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """An adapter whose additions are clearly there."""
    noise = np.random.default_rng(seed)
    tensors = {}
    for name, weight in base_tensors(base).items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        if "layers" not in parts or parts[-1] not in targets or weight.ndim != 2:
            continue
        if layers is not None and int(parts[parts.index("layers") + 1]) not in layers:
            continue
        out, width = weight.shape
        prefix = f"base_model.model.{module}"
        down = noise.standard_normal((rank, width)) / math.sqrt(width)
        tensors[f"{prefix}.lora_A.weight"] = down.astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = (size * noise.standard_normal((out, rank))).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "layers_to_transform": None if layers is None else list(layers),
        **(config or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def save_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The base with W + B·A·scale in place of its matrices: what the adapter means."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors, added = base_tensors(base), safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    for name in added:
        if ".lora_A." in name:
            stored = name.removeprefix("base_model.model.").replace(".lora_A", "")
            up = added[name.replace("lora_A", "lora_B")]
            tensors[stored] = (tensors[stored] + scale * (up @ added[name])).astype(np.float32)
    shutil.copytree(base, folder)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
