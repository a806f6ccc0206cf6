"""What a training run leaves once a minute, so that a later one can go on from it: weights and the tokens known."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.draft_training.draft_net import DraftNet, NetShape

log = logging.getLogger(__name__)


def write_resumption(
    file: Path, shape: NetShape, weights: dict[str, torch.Tensor], ids: NDArray[np.int32]
) -> None:
    """All of it or nothing."""
    kept = {
        "shape": dataclasses.asdict(shape),
        "ids": torch.from_numpy(ids),
        "weights": {name: each.detach().cpu() for name, each in weights.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}")
    torch.save(kept, written)
    written.replace(file)


def read_resumption(
    file: Path, shape: NetShape, device: torch.device
) -> tuple[DraftNet, NDArray[np.int32]] | None:
    """None where there is none, or one of another shape, or one that cannot be read."""
    if not file.exists():
        return None
    try:
        kept = torch.load(file, map_location=device, weights_only=True)
        if kept["shape"] != dataclasses.asdict(shape):
            return None
        weights = {name: each.float().requires_grad_() for name, each in kept["weights"].items()}
        return DraftNet(shape, weights), kept["ids"].cpu().numpy().astype(np.int32)
    except Exception as error:  # whatever a torn file may raise: it is begun anew
        log.warning("%s cannot be gone on from: %s", file, error)
        return None
