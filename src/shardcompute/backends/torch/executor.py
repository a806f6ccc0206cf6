"""Executor for torch: eagerly on CPUs and Apple GPUs, by our kernels and CUDA graphs on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardcompute.backends.executor import ExecutorOptions, Network, SynchronousSteps
from shardcompute.backends.kv import KvSessions
from shardcompute.backends.matrix import Array
from shardcompute.backends.torch.device import can_fuse, choose_device, choose_dtype
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.ops import TorchOps
from shardcompute.backends.torch.plan import plan_step
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.errors import UsageError


class TorchExecutor(KvSessions[PagedKv], SynchronousSteps):
    """See Executor. `use_library` leaves matrix products to torch's library, for comparison."""

    def __init__(self, network: Network, options: ExecutorOptions, *, use_library: bool = False) -> None:
        self._network = network
        self._max_rows = options.max_rows
        self._device = choose_device(options.device)
        self._dtype = choose_dtype(options.dtype, self._device)
        if self._device.type == "cpu":
            torch.set_num_threads(options.threads)
        self._kv = PagedKv(
            network.layer_count,
            network.kv_heads,
            network.head_dim,
            context_length=options.context_length,
            budget_bytes=options.kv_bytes,
            dtype=self._dtype,
            device=self._device,
        )
        self._ops, self._graphs = self._choose_ops(options, use_library)
        self._host: dict[tuple[int, ...], torch.Tensor] = {}
        self._hidden: torch.Tensor | None = None
        self._keeps_hidden = False
        ops = self._ops
        with torch.inference_mode():
            self._shared = network.load_shared(ops)
            self._embedding = network.load_embedding(ops) if network.is_first else None
            self._layers: list[Any] = [network.load_layer(ops, i) for i in range(network.layer_count)]
            self._head = network.load_head(ops) if network.is_last else None

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        rows = count_rows(segments)
        expected = (rows,) if self._network.is_first else (rows, self._network.hidden)
        if inputs.shape != expected or rows > self._max_rows:
            raise UsageError(
                f"a step of {rows} rows (at most {self._max_rows}) got inputs of shape {inputs.shape}"
            )
        if self._network.is_first and not 0 <= inputs.min() <= inputs.max() < self._network.vocab_size:
            # A CUDA device that meets such an id is lost to its whole process.
            raise UsageError(f"token ids must lie in [0, {self._network.vocab_size})")
        kind = np.int64 if self._network.is_first else np.float32
        tensor = torch.from_numpy(np.array(inputs, dtype=kind))
        return self._to_host(self.step_tensor(segments, tensor, keeps_hidden=keeps_hidden))

    def hidden_rows(self) -> Array:
        rows: Array = self.hidden_tensor().cpu().numpy()
        return rows

    def hidden_tensor(self) -> torch.Tensor:
        """`hidden_rows` where they were computed: on the device, not waited for."""
        if self._hidden is None:
            raise UsageError("the last step kept no hidden states")
        return self._hidden

    def step_tensor(
        self, segments: Sequence[Segment], inputs: torch.Tensor, *, keeps_hidden: bool = False
    ) -> torch.Tensor:
        """`step` on tensors: the result stays on the device, is not waited for, and holds until the next step."""
        self._hidden, self._keeps_hidden = None, keeps_hidden
        self._kv.take(segments)
        plan = plan_step(segments, self._kv)
        with torch.inference_mode():
            # A graph gives back its logits alone.
            is_eager = self._graphs is None or keeps_hidden
            result = None if is_eager else self._graphs.run(plan, inputs)
            if result is not None:
                return result[: len(plan.logit_rows) if self._network.is_last else plan.rows]
            self._ops.begin(plan)
            return self._forward(inputs.to(self._device, non_blocking=True))

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._host.clear()
        self._layers.clear()
        self._embedding = self._head = self._shared = None

    def _choose_ops(self, options: ExecutorOptions, use_library: bool) -> tuple[TorchOps, Any]:
        if not can_fuse(self._device):
            return TorchOps(self._kv, options.context_length, self._device, self._dtype), None
        from shardcompute.backends.torch.fused import FusedOps
        from shardcompute.backends.torch.graphs import GraphedSteps

        ops = FusedOps(self._kv, options.context_length, self._device, self._dtype, use_library=use_library)
        if not options.use_graphs:
            return ops, None
        width = None if self._network.is_first else self._network.hidden
        return ops, GraphedSteps(ops, self._kv, self._forward, width, self._dtype)

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        network, ops = self._network, self._ops
        x = ops.accept(inputs)
        if network.is_first:
            x = network.embed(ops, self._embedding, x)
        for i, weights in enumerate(self._layers):
            x = network.layer(ops, self._shared, weights, i, x)
        if not network.is_last:
            return ops.finish(x)
        normed = network.normed(ops, self._head, x)
        if self._keeps_hidden:
            self._hidden = ops.finish(normed)
        return ops.finish(network.head(ops, self._head, normed))

    def _to_host(self, result: torch.Tensor) -> Array:
        if self._device.type != "cuda":
            array: Array = result.cpu().numpy()
            return array
        # Pinned memory, kept: a pageable copy of a few rows of logits costs as much as half a step.
        held = self._host.get(tuple(result.shape))
        if held is None:
            held = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._host[tuple(result.shape)] = held
        held.copy_(result, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        pinned: Array = held.numpy()
        return pinned
