"""Fallback to `transformers`: stages of causal models that it knows and our families do not. Needs the `torch` extra.

Nothing that a checkpoint brings is run as a program: its configuration is plain values of a class that comes with
`transformers`, its tensors are numbers, and kernels are not fetched from anywhere.
"""

import os

# Read by `transformers` when it is imported: no code and no file from the hub, whatever a configuration names.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["USE_HUB_KERNELS"] = "0"

from shardcompute.backends.fallback.executor import TransformersExecutor
from shardcompute.backends.fallback.stage_model import FallbackStage, StoredTensor

__all__ = ["FallbackStage", "StoredTensor", "TransformersExecutor"]
