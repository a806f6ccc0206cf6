"""Torch backend: CUDA (Triton kernels, CUDA graphs), Apple GPUs, CPUs. Needs the `torch` extra.

Owns tensors on the device, the paged KV pool, captured graphs and `kernels`. May call its siblings in `backends` and
`core`. Imported only where torch is asked for.
"""

from shardcompute.backends.torch.executor import TorchExecutor
from shardcompute.backends.torch.weights import TensorMatrix

__all__ = ["TensorMatrix", "TorchExecutor"]
