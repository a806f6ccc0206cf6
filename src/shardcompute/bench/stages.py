"""Memory limits of workers with which a model takes a wished number of stages, no fewer."""

from __future__ import annotations

from shardcompute.backends.footprint import holding_of, process_bytes
from shardcompute.control.sizes import HeldSums, sizes_of
from shardcompute.core.settings import load_settings
from shardcompute.node.admin.dry_run import size_up
from shardcompute.node.worker.memory.promise import least_promise
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_SPARE_BYTES = 64 << 20
"""Workers measure their own process, and may find more than is usual."""


def memory_per_stage(model: str, form: str, stages: int, *, kv_tokens: int, context: int) -> int:
    """Bytes with which the model fits on so many machines and not on fewer, unless workers cannot promise so little."""
    with open_checkpoint(resolve(parse_reference(model), load_settings())) as checkpoint:
        sizes = sizes_of(size_up(checkpoint, form, kv_tokens=kv_tokens, context_length=context))
    held = sizes.on(holding_of("onnx", "cpu"))
    enough = _least_memory(held, stages)
    wanted = process_bytes("onnx") + enough + (_least_memory(held, stages - 1) - enough) // 3
    return max(wanted, least_promise(process_bytes("onnx")) + _SPARE_BYTES)


def _least_memory(sizes: HeldSums, workers: int) -> int:
    """The least memory of each of so many workers that hold the model together."""

    def holds(memory: int) -> bool:
        start = 0
        for _ in range(workers):
            fitting = [
                s for s in range(start, sizes.layer_count + 1) if sizes.memory_bytes(start, s) <= memory
            ]
            start = max(fitting, default=start)
        return start == sizes.layer_count

    low, high = 0, sizes.total_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
