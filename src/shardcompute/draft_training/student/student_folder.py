"""Folder of a student: an ordinary checkpoint (weights, config, tokenizer) and a note of what it is a student of."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from shardcompute.core.errors import CorruptModelError, UsageError
from shardcompute.draft_training.student.shape import StudentShape
from shardcompute.draft_training.student.student_net import NORM, StudentNet, student_slots
from shardcompute.draft_training.student.tokenizer_files import tokenizer_files
from shardcompute.draft_training.training_loop import FrozenWeights
from shardcompute.models.families.hf_family import LLAMA_NAMES
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.served import weights_key
from shardcompute.weights.sources.disk import disk_errors

_NOTE = "student.json"
_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True)
class StudentFolder:
    """Where the student of one model is, or will be, and what an unfinished run left beside it."""

    path: Path

    @property
    def text_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.text.pt")

    @property
    def weights_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.weights.pt")

    def forget(self) -> None:
        """What an unfinished run left."""
        for file in (self.text_file, self.weights_file):
            file.unlink(missing_ok=True)

    def check_owner(self, parent: Checkpoint) -> bool:
        """Whether there is a student of this parent; UsageError where something else is there."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return False
        note = self._read_note()
        if note is None or note.get("parent_weights") != weights_key(parent):
            what = "no student" if note is None else f"a student of {note.get('parent', 'another model')}"
            raise UsageError(
                f"{self.path} is there already and is {what}", hint="give another folder with --out"
            )
        return True

    def _read_note(self) -> dict[str, Any] | None:
        try:
            note = json.loads((self.path / _NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) else None

    def write(self, net: StudentNet, frozen: FrozenWeights, parent: Checkpoint, told: dict[str, Any]) -> None:
        """All of it at once, in the place of what was there; `told` goes into the note."""
        note = {
            "parent": parent.name,
            "parent_weights": weights_key(parent),
            "layers": list(net.shape.kept),
            **told,
        }
        tokenizer = parent.tokenizer()
        texts = {
            **tokenizer_files(parent),
            "config.json": json.dumps(
                net.shape.config(sorted(tokenizer.eos_ids), tokenizer.bos_id), indent=2
            ),
            _NOTE: json.dumps(note, indent=2),
        }
        made = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        with disk_errors(self.path, lambda: student_bytes(net.shape)):
            try:
                made.mkdir(parents=True)
                for name, text in texts.items():
                    (made / name).write_text(text, encoding="utf-8")
                weights = made / "model.safetensors"
                save_file(_tensors(net, frozen), weights, {"format": "pt"})
                # The package lets nobody else read what it writes.
                shutil.copymode(made / _NOTE, weights)
                self._replace_with(made)
            finally:
                shutil.rmtree(made, ignore_errors=True)

    def _replace_with(self, made: Path) -> None:
        before = self.path.with_name(f"{self.path.name}.{os.getpid()}.old")
        if self.path.exists():
            self.path.replace(before)
        made.replace(self.path)
        shutil.rmtree(before, ignore_errors=True)


def student_bytes(shape: StudentShape) -> int:
    """What its weights take on disk."""
    spec = shape.spec
    tables = spec.vocab_size * spec.hidden * (1 if spec.tied_head else 2)
    layers = sum(int(np.prod(slot.shape)) for _, slot in student_slots(shape))
    return _NUMBER_BYTES * (tables + layers + spec.hidden)


def round_student(net: StudentNet) -> StudentNet:
    """With the weights that its folder will have."""
    rounded = {
        name: torch.from_numpy(_rounded(each).astype(np.float32)).to(each.device)
        for name, each in net.weights.items()
    }
    return StudentNet(net.shape, rounded)


def _tensors(net: StudentNet, frozen: FrozenWeights) -> dict[str, Any]:
    tensors = {
        "model.embed_tokens.weight": _rounded(frozen.embedding[1:]),
        "model.norm.weight": _rounded(net.weights[NORM]),
    }
    if not net.shape.spec.tied_head:
        tensors["lm_head.weight"] = _rounded(frozen.head)
    for name, slot in student_slots(net.shape):
        part = "bias" if slot.is_bias else "weight"
        layer = name.partition(".")[0]
        stored = f"model.layers.{layer}.{LLAMA_NAMES[slot.matrix]}.{part}"
        tensors[stored] = _rounded(net.weights[name])
    return tensors


def _rounded(values: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float16]]:
    with np.errstate(over="ignore"):
        found = values.detach().cpu().numpy().astype(np.float16)
    if not np.isfinite(found).all():
        raise CorruptModelError(
            "the student has weights that 16 bits cannot hold", hint="teach it anew with --fresh"
        )
    return np.ascontiguousarray(found)
