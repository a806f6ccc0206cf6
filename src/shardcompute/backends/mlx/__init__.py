"""MLX backend: Apple silicon's GPU, and CPUs for tests. Needs the `mlx` extra.

Owns arrays on the device, the paged KV pool and compiled steps. May call its siblings in `backends` and `core`.
Imported only where mlx is asked for.
"""

from shardcompute.backends.mlx.executor import MlxExecutor

__all__ = ["MlxExecutor"]
