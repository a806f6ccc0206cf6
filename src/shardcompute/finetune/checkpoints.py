"""Checkpoints of a run: what was learned, the optimiser's moments, the step, and the curve so far.

One safetensors file with facts as JSON in its header; nothing of it is ever executed. It is written beside the last
one and takes its name when it is whole, so that a run that is killed at any moment goes on from one of the two. Tensors
have PEFT's names, so that a run goes on however the model is cut then. The data's position and all chance follow from
the step and the plan's seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.sources.disk import disk_errors

_FACTS = "facts"
_BEST = "best "
CHECKPOINT_FILE = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A run after `step` steps; `facts` are the loop's own."""

    step: int
    state: Mapping[str, Float32]
    best: Mapping[str, Float32]
    """What was learned when the held-out loss was lowest; empty: nothing is held out."""
    facts: Mapping[str, Any]


def write_checkpoint(folder: Path, digest: str, kept: TrainingState) -> None:
    """All of it or nothing."""
    file = folder / CHECKPOINT_FILE
    tensors = {**kept.state, **{_BEST + name: values for name, values in kept.best.items()}}
    facts = json.dumps({"digest": digest, "step": kept.step, "facts": kept.facts})
    write_tensors(file, tensors, {_FACTS: facts})


def read_checkpoint(folder: Path, digest: str) -> TrainingState | None:
    """None where there is none, or one of another run. CorruptModelError where it cannot be read."""
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        return None
    try:
        with safe_open(file, "numpy") as opened:
            told = json.loads((opened.metadata() or {})[_FACTS])
            if told["digest"] != digest:
                return None
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            step, facts = int(told["step"]), dict(told["facts"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorruptModelError(
            f"{file} cannot be gone on from: {error}", hint="begin anew with --fresh"
        ) from error
    best = {name.removeprefix(_BEST): each for name, each in tensors.items() if name.startswith(_BEST)}
    state = {name: each for name, each in tensors.items() if not name.startswith(_BEST)}
    return TrainingState(step, state, best, facts)


def write_tensors(file: Path, tensors: Mapping[str, Float32], metadata: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all, and the same bytes for the same content."""
    plain = {name: np.ascontiguousarray(values) for name, values in sorted(tensors.items())}
    size = sum(values.nbytes for values in plain.values())
    with disk_errors(file, lambda: size):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            with written.open("wb") as out:
                out.write(safetensors.numpy.save(plain, dict(metadata)))
                out.flush()
                os.fsync(out.fileno())
            written.replace(file)
        finally:
            written.unlink(missing_ok=True)
