"""Stages of GGUF models on llama.cpp: from the tensors that are here to a file of theirs, and an executor over it."""

from __future__ import annotations

from pathlib import Path

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.core.settings import load_settings
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.gguf_stage import (
    CUTTABLE,
    GgufHeader,
    header_of,
    not_gguf,
    served_header,
    stage_file,
)


def open_local_stage(checkpoint: Checkpoint, stage: Stage, form: str, options: ExecutorOptions) -> Executor:
    """A stage of a file on this machine; the whole model is run from the file itself."""
    header = header_of(checkpoint.tensors)
    if header is None:
        raise not_gguf(checkpoint.name)
    _check_form(form)
    files = checkpoint.files
    if stage.count == stage.total and files.folder is not None:
        return _open(files.folder / files.main_file, checkpoint.spec, stage, options)
    return _open_part(header, checkpoint.tensors, checkpoint.spec, stage, options)


def open_served_stage(card: Card, tensors: TensorFile, stage: Stage, options: ExecutorOptions) -> Executor:
    """A stage of a model whose tensors come from elsewhere."""
    if card.kind == "packed":
        raise UsageError(
            f"{card.model} is served as {card.form}, and llama.cpp runs a GGUF file's own blocks",
            hint="leave --weights away where the cluster is started",
        )
    _check_form(card.form)
    return _open_part(served_header(tensors), tensors, card.spec, stage, options)


def _open_part(
    header: GgufHeader, tensors: TensorFile, spec: ModelSpec, stage: Stage, options: ExecutorOptions
) -> Executor:
    if stage.count < stage.total and header.architecture not in CUTTABLE:
        raise UnsupportedModelError(
            f"layers of the architecture {header.architecture} depend on their number, so that llama.cpp cannot run "
            "some of them alone",
            hint="serve it in one stage, or with another backend",
        )
    if header.too_large:
        raise UnsupportedModelError(
            f"{header.too_large} belongs to no layer and is too large to go with every stage",
            hint="run it in one process, from its file",
        )
    folder = load_settings().data_dir / "stages"
    with stage_file(header, tensors, stage, spec.vocab_size, folder) as path:
        return _open(path, spec, stage, options)


def _open(path: Path, spec: ModelSpec, stage: Stage, options: ExecutorOptions) -> Executor:
    from shardcompute.backends.llamacpp import LlamaCppExecutor, StageFile

    return LlamaCppExecutor(
        StageFile(
            path,
            layers=stage.count,
            hidden=spec.hidden,
            vocab_size=spec.vocab_size,
            kv_entries=stage.count * spec.kv_shape.parts * spec.kv_heads * spec.head_dim,
            is_first=stage.is_first,
            is_last=stage.is_last,
            has_experts=spec.experts is not None,
        ),
        options,
    )


def _check_form(form: str) -> None:
    if form != "native":
        raise UsageError(
            f"llama.cpp runs a GGUF file's own blocks; {form} is not possible", hint="leave --weights away"
        )
