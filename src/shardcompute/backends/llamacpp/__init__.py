"""llama.cpp as a backend: a GGUF stage run by llama.cpp itself, through the library in the wheel `xllamacpp`.

Owns the library's binding, a stage's context, where its sessions' keys and values lie, and the executor over them.
"""

from shardcompute.backends.llamacpp.executor import LlamaCppExecutor
from shardcompute.backends.llamacpp.stage_context import StageFile

__all__ = ["LlamaCppExecutor", "StageFile"]
