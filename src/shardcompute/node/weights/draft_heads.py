"""Draft heads: what a last stage drafts tokens with (`runtime.head_drafter`).

They are trained once for a model and kept on the coordinator's disk; that of the embedded model comes with the package.
They are attached to the model that is served, so that the last stage finds its own beside its weights.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import CorruptModelError
from shardcompute.core.kv_types import kv_token_bytes
from shardcompute.models.draft_head import DRAFT_HEAD, DraftHeadWeights, decode_draft_head, encode_draft_head
from shardcompute.models.spec import head_stage
from shardcompute.node.weights.client import RemoteTensors
from shardcompute.runtime.head_drafter import HeadDrafter
from shardcompute.runtime.shard import DRAFT_HEAD_ROWS, build_head_drafter
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
_LEAST_TOKENS = 4 * PAGE_TOKENS
"""Of sessions it must be able to remember so many, or it drafts worse than it costs."""


def save_draft_head(folder: Path, checkpoint: Checkpoint, weights: DraftHeadWeights) -> Path:
    """Keep a model's draft head in a folder of all models' heads; where it is kept."""
    path = _path(folder, checkpoint)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, encode_draft_head(weights))
    return path


def training_file(folder: Path, checkpoint: Checkpoint) -> Path:
    """Where a run that trains a model's draft head leaves what it has learned so far."""
    return _path(folder, checkpoint).with_name("training.pt")


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
        decode_draft_head(content, checkpoint.spec.hidden, checkpoint.spec.vocab_size)
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
    kv_tokens: int,
) -> tuple[HeadDrafter, int] | None:
    """What a last stage drafts with, and the memory that it takes; None where that is more than there is room for. It
    remembers `kv_tokens` of sessions, as many as the stage does, or as many as there is room for."""
    content = read_attachment(tensors, DRAFT_HEAD)
    if content is None:
        return None
    weights = decode_draft_head(content, card.spec.hidden, card.spec.vocab_size)
    share = len(weights.ids) / card.spec.vocab_size
    sizes = held_sizes_of_card(card, context_length=options.context_length)
    held = next(each for each in sizes if each.holder == holding)
    rows_bytes = int(share * (held.head_bytes + held.embedding_bytes))
    logits_bytes = 4 * options.max_logit_rows * len(weights.ids)
    size_bytes = _HELD_SHARE * len(content) // 4 + rows_bytes + logits_bytes + _scratch_bytes(weights)
    token_bytes = len(weights.layers) * kv_token_bytes(options.kv_type, weights.kv_shape)
    tokens = min(max(kv_tokens, _LEAST_TOKENS), (room_bytes - size_bytes) // token_bytes)
    if tokens < _LEAST_TOKENS:
        return None
    options = replace(options, kv_bytes=tokens * token_bytes)
    source = shard_source(card, tensors, head_stage(card.spec))
    drafter = build_head_drafter(card.spec, source, weights, backend=backend, options=options)
    return drafter, size_bytes + options.kv_bytes


def _scratch_bytes(weights: DraftHeadWeights) -> int:
    """What a step of most rows computes with: what goes into a layer's matrices and comes out of them."""
    layer = weights.layers[0]
    matrices = (weights.join, layer.qkv, layer.out, layer.gate_up, layer.down)
    return 4 * DRAFT_HEAD_ROWS * sum(sum(matrix.shape) for matrix in matrices)


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
