"""What a run that makes a student leaves, so that a later one can go on: text that was said, and weights so far."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardcompute.weights.sources.disk import disk_errors

log = logging.getLogger(__name__)


def write_kept(file: Path, kept: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            torch.save(dict(kept), written)
            written.replace(file)
        finally:
            written.unlink(missing_ok=True)


def read_kept(file: Path, device: torch.device) -> dict[str, Any] | None:
    """None where there is nothing, or nothing that can be read."""
    if not file.exists():
        return None
    try:
        kept = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # whatever a torn file may raise: it is begun anew
        log.warning("%s cannot be gone on from: %s", file, error)
        return None
    return kept if isinstance(kept, dict) else None
