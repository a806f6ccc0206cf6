"""Stages of models of other families, run by `transformers`: from the tensors that are here to an executor."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.footprint import STATE_SESSIONS, fallback_device
from shardcompute.core.errors import BackendError, CorruptModelError, UsageError
from shardcompute.core.generation import Speculation
from shardcompute.models.families import fallback_type, is_fallback
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.attached import read_attachment
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.tensor_file import TensorFile

_CONFIG = "configuration"
_MOST_CONFIG_BYTES = 1 << 20
INSTALL = 'pip install "shardcompute[torch]"'


def is_fallback_installed() -> bool:
    """Whether this machine can run models of other families."""
    return all(importlib.util.find_spec(package) is not None for package in ("torch", "transformers"))


def config_attachment(checkpoint: Checkpoint) -> dict[str, bytes]:
    """What travels beside the weights of a model that `transformers` runs: its configuration."""
    if not is_fallback(checkpoint.spec):
        return {}
    return {_CONFIG: _encoded(checkpoint.config)}


def open_local_fallback(
    checkpoint: Checkpoint, stage: Stage, form: str, options: ExecutorOptions
) -> Executor:
    """A stage of a checkpoint on this machine."""
    check_form(checkpoint.name, form)
    _encoded(checkpoint.config)
    names = stage_names(checkpoint, stage)
    return _open(checkpoint.config, checkpoint.tensors, names, checkpoint.spec, stage, options)


def open_served_fallback(card: Card, tensors: TensorFile, stage: Stage, options: ExecutorOptions) -> Executor:
    """A stage of a model whose tensors come from elsewhere."""
    check_form(card.model, card.form)
    content = read_attachment(tensors, _CONFIG)
    if content is None:
        raise CorruptModelError(
            f"{card.model} comes without its configuration", hint="run the same release on every node"
        )
    try:
        config = json.loads(content[: _MOST_CONFIG_BYTES + 1])
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(
            f"the configuration of {card.model} cannot be read: {error}", hint="fetch the model again"
        ) from error
    if not isinstance(config, dict):
        raise CorruptModelError(
            f"the configuration of {card.model} is no object", hint="fetch the model again"
        )
    return _open(config, tensors, card.stage_tensors(stage), card.spec, stage, options)


def stage_names(checkpoint: Checkpoint, stage: Stage) -> tuple[str, ...]:
    """The stored tensors that a stage reads."""
    return tuple(dict.fromkeys(place.stored for place in checkpoint.layout.stage_places(stage)))


def check_form(model: str, form: str) -> None:
    if form not in ("native", "float32"):
        raise UsageError(
            f"{model} is run through transformers, which keeps its weights; {form} is not possible",
            hint="leave --weights away",
        )


def fallback_remark(spec: ModelSpec) -> str:
    """What to tell of a model that is not run by our own kernels; "": nothing."""
    if not is_fallback(spec):
        return ""
    where = "on one machine" if spec.is_whole else "on every machine that takes part"
    return (
        f"models of the type {fallback_type(spec)} are run through transformers: in float32 on CPUs and 16 bits on "
        f"GPUs, {where} with torch and transformers ({INSTALL})"
    )


def speculation_for(spec: ModelSpec, wanted: Speculation) -> Speculation:
    """How drafts are made for requests that do not say: not for recurrent models, whose states cannot be cut back for
    a draft that was wrong, but are computed again."""
    is_free = wanted.drafter == "auto" and spec.state_bytes > 0
    return replace(wanted, drafter="off") if is_free else wanted


def _open(
    config: Mapping[str, Any],
    tensors: TensorFile,
    names: tuple[str, ...],
    spec: ModelSpec,
    stage: Stage,
    options: ExecutorOptions,
) -> Executor:
    if not is_fallback_installed():
        raise BackendError(
            f"models of the type {fallback_type(spec)} are run through transformers, which is not installed here",
            hint=f"{INSTALL} on this machine",
        )
    from shardcompute.backends.fallback import FallbackStage, StoredTensor, TransformersExecutor

    def stored(name: str) -> StoredTensor:
        entry = tensors.entries[name]
        return StoredTensor(entry.dtype, entry.shape, lambda: tensors.read_bytes(name, 0, entry.size_bytes))

    part = FallbackStage(config, {name: stored(name) for name in names}, stage.start, stage.stop, stage.total)
    state_bytes = STATE_SESSIONS * spec.state_bytes * stage.count
    return TransformersExecutor(
        part, replace(options, device=fallback_device(options.device)), state_bytes=state_bytes
    )


def _encoded(config: Mapping[str, Any]) -> bytes:
    content = json.dumps(config, sort_keys=True).encode()
    if len(content) > _MOST_CONFIG_BYTES:
        raise CorruptModelError(
            f"its config.json has {len(content) >> 20} MiB, more than any model needs",
            hint="fetch the model again",
        )
    return content
