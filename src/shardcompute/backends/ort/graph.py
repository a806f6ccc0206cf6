"""Graph writer: writes one ONNX graph and opens it as a session.

Activations are `[1, rows, width]` float32. Weights are handed to the session as memory, never through the
serialised graph, so that the only copy that stays is the kernels' own packed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from shardcompute.backends.matrix import Array
from shardcompute.core.errors import BackendError

CONTRIB = "com.microsoft"
_OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid(CONTRIB, 1)]
_LARGE_BYTES = 1024
# This fusion would join an addition with the norm behind it inside a slice but not across a cut.
_DISABLED = ["SkipLayerNormFusion"]
_process_threads: int | None = None


def use_threads(threads: int) -> None:
    """Set the size of the thread pool that all sessions of this process share. Once."""
    global _process_threads
    if _process_threads is None:
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
        onnxruntime.set_default_logger_severity(3)
        _share_scratch_memory()
        _process_threads = threads
    elif threads != _process_threads:
        raise BackendError(
            f"this process computes with {_process_threads} threads and cannot change to {threads}",
            hint="start another process with --threads",
        )


def _share_scratch_memory() -> None:
    """One arena for the scratch memory of all sessions: each alone would keep its own peak."""
    state = onnxruntime.capi.onnxruntime_pybind11_state
    place = state.OrtMemoryInfo(
        "Cpu", state.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, state.OrtMemType.DEFAULT
    )
    grow_as_requested = 1
    arena = state.OrtArenaCfg(0, grow_as_requested, -1, -1)
    state.create_and_register_allocator(place, arena)


class GraphWriter:
    """Collects nodes, inputs and weights of one graph; `open` makes the session."""

    def __init__(self) -> None:
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, Array] = {}
        self._inputs: dict[str, ValueInfoProto] = {}
        self._outputs: dict[str, ValueInfoProto] = {}
        self._count = 0

    @property
    def is_empty(self) -> bool:
        return not self._nodes

    def input(self, name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> str:
        if name not in self._inputs:
            self._inputs[name] = helper.make_tensor_value_info(name, kind, shape)
        return name

    def output(self, name: str, shape: Sequence[int | str]) -> None:
        self._outputs[name] = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    def constant(self, values: Array) -> str:
        name = self.fresh("w")
        self._constants[name] = np.ascontiguousarray(values)
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, dtype=np.float32))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def fresh(self, prefix: str = "t") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def node(self, kind: str, inputs: Sequence[str], *, domain: str = "", **attributes: Any) -> str:
        return self.nodes(kind, inputs, 1, domain=domain, **attributes)[0]

    def nodes(
        self, kind: str, inputs: Sequence[str], outputs: int, *, domain: str = "", **attributes: Any
    ) -> list[str]:
        names = [self.fresh() for _ in range(outputs)]
        self._nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names

    def rename(self, name: str, wanted: str) -> None:
        """Give the last node's only output a name of our choice."""
        if list(self._nodes[-1].output) != [name]:
            raise ValueError("only the last node's output can be renamed")
        self._nodes[-1].output[0] = wanted

    def open(self) -> onnxruntime.InferenceSession:
        """The session; this writer's weights are let go."""
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False
        initializers, large = [], {}
        for name, values in self._constants.items():
            if values.nbytes < _LARGE_BYTES:
                initializers.append(_small_tensor(name, values))
            else:
                initializers.append(_external_tensor(name, values))
                large[name] = onnxruntime.OrtValue.ortvalue_from_numpy(values)
        if large:
            options.add_external_initializers(list(large), list(large.values()))
        graph = helper.make_graph(
            self._nodes, "shard", list(self._inputs.values()), list(self._outputs.values()), initializers
        )
        model = helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)
        self._constants.clear()
        try:
            return onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=_DISABLED,
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime refused a graph: {error}", hint="report this with the model's name"
            ) from error


def _small_tensor(name: str, values: Array) -> TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    return helper.make_tensor(name, kind, values.shape, values.tobytes(), raw=True)


def _external_tensor(name: str, values: Array) -> TensorProto:
    """A tensor whose bytes the session is given separately, in memory."""
    tensor = TensorProto()
    tensor.name = name
    tensor.data_type = helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor.dims.extend(values.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "memory"), ("offset", "0"), ("length", str(values.nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor
