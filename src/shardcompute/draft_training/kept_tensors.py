"""Tensors that a run leaves, so that a later one can go on from them, as safetensors with facts about them as JSON.

Nothing of such a file is ever executed, and whatever cannot be read of it is begun anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardcompute.weights.sources.disk import disk_errors

log = logging.getLogger(__name__)
_FACTS = "facts"


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """`facts` are whatever JSON has: lists where there were tuples."""

    tensors: dict[str, torch.Tensor]
    facts: Mapping[str, Any]


def write_kept(file: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f"{file.name}.{os.getpid()}")
        plain = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
        try:
            save_file(plain, written, {_FACTS: json.dumps(facts)})
            written.replace(file)
        finally:
            written.unlink(missing_ok=True)


def read_kept(file: Path, device: torch.device) -> KeptTensors | None:
    """None where there is nothing, or nothing that can be read."""
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt", device=str(device)) as opened:
            facts = json.loads((opened.metadata() or {})[_FACTS])
            return KeptTensors({name: opened.get_tensor(name) for name in opened.keys()}, facts)  # noqa: SIM118
    except Exception as error:  # whatever a torn file may raise: it is begun anew
        log.warning("%s cannot be gone on from: %s", file, error)
        return None
