"""What a training run leaves once a minute, so that a later one can go on from it: weights and the tokens known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.draft_training.draft_net import DraftNet, NetShape
from shardcompute.draft_training.kept_tensors import read_kept, write_kept

_IDS = "ids"


def write_resumption(
    file: Path, shape: NetShape, weights: dict[str, torch.Tensor], ids: NDArray[np.int32]
) -> None:
    """All of it or nothing."""
    write_kept(file, {**weights, _IDS: torch.from_numpy(ids)}, dataclasses.asdict(shape))


def read_resumption(
    file: Path, shape: NetShape, device: torch.device
) -> tuple[DraftNet, NDArray[np.int32]] | None:
    """None where there is none, or one of another shape, or one that cannot be read."""
    kept = read_kept(file, device)
    if kept is None or kept.facts != dataclasses.asdict(shape) or _IDS not in kept.tensors:
        return None
    ids = kept.tensors.pop(_IDS).cpu().numpy().astype(np.int32)
    return DraftNet(shape, {name: each.float().requires_grad_() for name, each in kept.tensors.items()}), ids
