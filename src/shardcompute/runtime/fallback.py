"""Models of unknown families, run by `transformers` itself between cuts of ours."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.core.errors import BackendError, UnsupportedModelError
from shardcompute.weights.sources.resolve import ModelFiles


@dataclass(frozen=True, slots=True)
class FallbackModel:
    """What is known of a model without a spec of ours."""

    folder: Path
    layer_count: int
    vocab_size: int
    context_length: int

    def open_stage(self, start: int, stop: int, options: ExecutorOptions) -> Executor:
        """Layers `[start, stop)`; raises UnsupportedModelError where the model cannot be cut."""
        from shardcompute.backends.transformers_fallback import TransformersExecutor

        return TransformersExecutor(self.folder, start, stop, options)


def describe_fallback(files: ModelFiles) -> FallbackModel:
    """A checkpoint folder as `transformers` sees it."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise BackendError(
                f"models of other families need {package}", hint="pip install 'shardcompute[torch]'"
            )
    if files.kind != "safetensors" or files.folder is None:
        raise UnsupportedModelError(
            f"{files.name} is not a folder of safetensors", hint="use the model's original checkpoint"
        )
    from shardcompute.backends.transformers_fallback import context_length, layer_count, vocab_size

    folder = files.folder
    return FallbackModel(folder, layer_count(folder), vocab_size(folder), context_length(folder))
