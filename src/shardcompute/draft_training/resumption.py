"""What a training run leaves once a minute, so that a later one can go on from it: weights and the tokens known."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from shardcompute.draft_training.draft_net import DraftNet, NetShape

log = logging.getLogger(__name__)
_IDS, _SHAPE = "ids", "shape"


def _told(shape: NetShape) -> str:
    return json.dumps(dataclasses.asdict(shape), sort_keys=True)


def write_resumption(
    file: Path, shape: NetShape, weights: dict[str, torch.Tensor], ids: NDArray[np.int32]
) -> None:
    """All of it or nothing."""
    tensors = {name: each.detach().cpu() for name, each in weights.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}")
    save_file({**tensors, _IDS: torch.from_numpy(ids)}, written, {_SHAPE: _told(shape)})
    written.replace(file)


def read_resumption(
    file: Path, shape: NetShape, device: torch.device
) -> tuple[DraftNet, NDArray[np.int32]] | None:
    """None where there is none, or one of another shape, or one that cannot be read."""
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt", device=str(device)) as kept:
            if (kept.metadata() or {}).get(_SHAPE) != _told(shape):
                return None
            weights = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        ids = weights.pop(_IDS).cpu().numpy().astype(np.int32)
        return DraftNet(shape, {name: each.float().requires_grad_() for name, each in weights.items()}), ids
    except Exception as error:  # whatever a torn file may raise: it is begun anew
        log.warning("%s cannot be gone on from: %s", file, error)
        return None
