"""The torch backend: CUDA (Triton kernels, CUDA graphs), Apple GPUs, CPUs. Needs the `torch` extra."""

from shardcompute.backends.torch.executor import TorchExecutor
from shardcompute.backends.torch.weights import TensorMatrix

__all__ = ["TensorMatrix", "TorchExecutor"]
