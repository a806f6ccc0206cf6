"""Draft heads: what a last stage drafts tokens with (`runtime.head_drafter`).

They are trained once for a model and kept on the coordinator's disk; that of the embedded model comes with the package.
They are attached to the model that is served, so that the last stage finds its own beside its weights.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import os
import sys
import tempfile
from pathlib import Path

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.footprint import holding_of
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import CorruptModelError
from shardcompute.models.draft_head import DraftHeadWeights, decode_draft_head, encode_draft_head
from shardcompute.models.spec import head_stage
from shardcompute.node.weights.client import RemoteTensors
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.shard import build_head_drafter, drafting_backend
from shardcompute.weights.attached import find_attachment, read_attachment
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.held import held_sizes_of_card
from shardcompute.weights.served import content_of, shard_source, weights_key
from shardcompute.weights.sources.disk import disk_errors

log = logging.getLogger(__name__)
_FILE = "head.draft"
_HELD_SHARE = 5
"""Quarters of its bytes in the file that kernels hold, see `backends.footprint`."""
_RUNTIME_BYTES = 48 << 20
"""Of a library that is loaded for a draft head alone."""
DRAFT_HEAD = "draft-head"
"""The name under which it is attached to a model."""


def save_draft_head(folder: Path, checkpoint: Checkpoint, weights: DraftHeadWeights) -> Path:
    """Keep a model's draft head in a folder of all models' heads; where it is kept."""
    path = _path(folder, checkpoint)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, encode_draft_head(weights))
    return path


def draft_head_attachments(checkpoint: Checkpoint, folder: Path | None) -> tuple[dict[str, bytes], str]:
    """A model's draft head to be served with it, where one was saved in the folder or comes with the package; and why
    one that is there is left out."""
    path = None if folder is None else _path(folder, checkpoint)
    if path is not None and path.exists():
        with disk_errors(path):
            content: bytes | None = path.read_bytes()
    else:
        content = packaged_draft_head(checkpoint)
    if content is None:
        return {}, ""
    try:
        decode_draft_head(content, checkpoint.spec.hidden)
    except CorruptModelError as error:
        problem = f"{path or 'the packaged one'} is left out: {error.message}"
        log.warning("%s", problem)
        return {}, problem
    return {DRAFT_HEAD: content}, ""


def packaged_draft_head(checkpoint: Checkpoint) -> bytes | None:
    """What comes with the package for these weights."""
    if checkpoint.files.listing is not None:
        return None  # To know them, all tensors would have to be asked for at the hub.
    spec = checkpoint.spec
    shape = f"{spec.layer_count}-{spec.hidden}-{spec.vocab_size}-"
    files = [
        file
        for file in (importlib.resources.files("shardcompute") / "drafters").iterdir()
        if file.name.startswith(shape)
    ]
    # Only of a model that has the shape of one of these are weights looked at.
    wanted = f"{shape}{weights_key(checkpoint)}.draft" if files else ""
    return next((file.read_bytes() for file in files if file.name == wanted), None)


def draft_head_bytes(card: Card) -> int:
    """How large the draft head on a model's card is; 0: there is none."""
    stored = find_attachment(card.entries, DRAFT_HEAD)
    return 0 if stored is None else card.entries[stored].size_bytes


def open_head_drafter(
    card: Card,
    tensors: RemoteTensors,
    *,
    backend: str,
    options: ExecutorOptions,
    room_bytes: int,
    holding: str,
) -> tuple[HeadDrafter, int] | None:
    """What a last stage drafts with, and the memory that it takes; None where that is more than there is room for."""
    content = read_attachment(tensors, DRAFT_HEAD)
    if content is None:
        return None
    weights = decode_draft_head(content, card.spec.hidden)
    share = len(weights.ids) / card.spec.vocab_size
    sizes = held_sizes_of_card(card, context_length=options.context_length)
    drafting = drafting_backend(backend)
    wanted = holding if drafting == backend else holding_of(drafting, options.device)
    held = next(each for each in sizes if each.holder == wanted)
    rows_bytes = int(share * (held.head_bytes + held.embedding_bytes))
    logits_bytes = 4 * options.max_logit_rows * len(weights.ids)
    size_bytes = _HELD_SHARE * len(content) // 4 + rows_bytes + logits_bytes + _kv_bytes(card, options)
    if drafting != backend and "onnxruntime" not in sys.modules:
        size_bytes += _RUNTIME_BYTES
    if size_bytes > room_bytes:
        return None
    source = shard_source(card, tensors, head_stage(card.spec))
    return build_head_drafter(card.spec, source, weights, backend=backend, options=options), size_bytes


def _kv_bytes(card: Card, options: ExecutorOptions) -> int:
    """It keeps nothing between steps: a page for every row, within what its executor may take."""
    page_bytes = PAGE_TOKENS * card.spec.kv_bytes_per_token_and_layer()
    return min(1 << 20, options.max_logit_rows * page_bytes)


def _path(folder: Path, checkpoint: Checkpoint) -> Path:
    return folder / content_of(checkpoint) / _FILE


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
