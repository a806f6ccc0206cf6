"""Draft heads: how a first stage comes to guess tokens itself (see `runtime.drafting`).

They are fitted once for a model, behind each layer at which it may be cut, and kept on the coordinator's disk. There
they are attached to the model that is served, so that a first stage finds the one for its own cut beside its weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.errors import CorruptModelError
from shardcompute.models.spec import Stage
from shardcompute.node.weights_client import RemoteTensors, open_remote_head
from shardcompute.runtime.drafting import DraftLimits, SelfDrafter
from shardcompute.runtime.lens import Lens, decode_lens, encode_lens
from shardcompute.weights.attached import find_attachment, read_attachment
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.disk import disk_errors
from shardcompute.weights.served import content_of, served_vocabulary

log = logging.getLogger(__name__)
_SUFFIX = ".lens"


class DraftHeadStore:
    """Fitted draft heads in a folder: one folder for each model, told by its content, one file for each layer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, checkpoint: Checkpoint, lenses: Mapping[int, Lens]) -> Path:
        """Keep these, beside those of other layers; where they are kept."""
        folder = self._folder / content_of(checkpoint)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for layer, lens in lenses.items():
                _write(folder / f"{layer}{_SUFFIX}", encode_lens(lens))
        return folder

    def attachments(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        """All that were fitted for a model, under the names by which stages find them; damaged ones are left out."""
        folder, spec = self._folder / content_of(checkpoint), checkpoint.spec
        found: dict[str, bytes] = {}
        for layer in range(1, spec.layer_count):
            path = folder / f"{layer}{_SUFFIX}"
            if not path.exists():
                continue
            with disk_errors(path):
                content = path.read_bytes()
            try:
                decode_lens(content, spec.hidden)
            except CorruptModelError as error:
                log.warning("%s is left out: %s", path, error)
            else:
                found[_attached_name(layer)] = content
        return found


def has_draft_head(card: Card, stage: Stage) -> bool:
    """Whether a stage that ends here can be given a draft head."""
    return find_attachment(card.entries, _attached_name(stage.stop)) is not None


def open_drafter(
    card: Card, stage: Stage, tensors: RemoteTensors, *, backend: str, options: ExecutorOptions
) -> SelfDrafter:
    """The drafter of a first stage for which there is a draft head."""
    content = read_attachment(tensors, _attached_name(stage.stop))
    if content is None:
        raise CorruptModelError(f"{card.model} has no draft head behind layer {stage.stop}")
    lens = decode_lens(content, card.spec.hidden)
    vocabulary = served_vocabulary(tensors)
    head = open_remote_head(card, tensors, backend=backend, is_normed=True, options=options)
    limits = DraftLimits(
        context_length=options.context_length, max_rows=options.max_rows, max_wanted=options.max_wanted
    )
    return SelfDrafter(head, limits, lens=lens, vocabulary=lambda: vocabulary)


def _attached_name(layer: int) -> str:
    return f"draft-head.{layer}"


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
