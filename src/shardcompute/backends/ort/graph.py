"""Graph writer: writes one ONNX graph and opens it as a session.

Activations are `[1, rows, width]` float32. Weights are handed to the session as memory, never through the
serialised graph, so that the only copy that stays is the kernels' own packed one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime

from shardcompute.backends.matrix import Array
from shardcompute.backends.ort.loading_room import LoadingRoom
from shardcompute.backends.ort.model_bytes import (
    FLOAT,
    Attribute,
    write_external_tensor,
    write_graph,
    write_model,
    write_node,
    write_tensor,
    write_value,
)
from shardcompute.core.errors import BackendError

CONTRIB = "com.microsoft"
_OPSETS = {"": 20, CONTRIB: 1}
_LARGE_BYTES = 1024
# This fusion would join an addition with the norm behind it inside a slice but not across a cut.
_DISABLED = ["SkipLayerNormFusion"]
_process_threads: int | None = None
LOADING_ROOM = LoadingRoom()
"""Where sessions of this process find, while they are opened, what their kernels pack."""


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


def shrink_scratch_memory() -> None:
    """Give back what the shared arena keeps of the largest step so far; the next one that large takes it anew."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _any_session().run(["y"], {"x": np.zeros(1, dtype=np.float32)}, options)


@functools.cache
def _any_session() -> onnxruntime.InferenceSession:
    """A run is asked to shrink the arena, whichever session's it is."""
    graph = GraphWriter()
    graph.rename(graph.node("Neg", [graph.input("x", [1])]), "y")
    graph.output("y", [1])
    return graph.open()


@dataclass(slots=True)
class _Node:
    kind: str
    inputs: Sequence[str]
    outputs: list[str]
    domain: str
    attributes: dict[str, Attribute]


class GraphWriter:
    """Collects nodes, inputs and weights of one graph; `open` makes the session."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._constants: dict[str, Array] = {}
        self._spent: set[str] = set()
        self._inputs: dict[str, bytes] = {}
        self._outputs: dict[str, bytes] = {}
        self._names = itertools.count(1)

    @property
    def is_empty(self) -> bool:
        return not self._nodes

    def input(self, name: str, shape: Sequence[int | str], kind: int = FLOAT) -> str:
        if name not in self._inputs:
            self._inputs[name] = write_value(name, kind, shape)
        return name

    def output(self, name: str, shape: Sequence[int | str]) -> None:
        self._outputs[name] = write_value(name, FLOAT, shape)

    def constant(self, values: Array, *, is_spent: bool = False) -> str:
        """A weight. One that `is_spent` once the session is open, because its kernel has packed it, is not kept."""
        name = self.fresh("w")
        self._constants[name] = np.ascontiguousarray(values)
        if is_spent:
            self._spent.add(name)
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, dtype=np.float32))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def fresh(self, prefix: str = "t") -> str:
        return f"{prefix}{next(self._names)}"

    def node(self, kind: str, inputs: Sequence[str], *, domain: str = "", **attributes: Attribute) -> str:
        return self.nodes(kind, inputs, 1, domain=domain, **attributes)[0]

    def nodes(
        self, kind: str, inputs: Sequence[str], outputs: int, *, domain: str = "", **attributes: Attribute
    ) -> list[str]:
        names = [self.fresh() for _ in range(outputs)]
        self._nodes.append(_Node(kind, inputs, list(names), domain, attributes))
        return names

    def branch(self) -> GraphWriter:
        """A graph to be a branch of a node of this one: it sees this one's values, and has no weights of its own."""
        inner = GraphWriter()
        inner._names = self._names
        return inner

    def subgraph(self) -> bytes:
        """What was written, as a node's attribute."""
        return write_graph(self._written(), self._inputs.values(), self._outputs.values(), ())

    def _written(self) -> list[bytes]:
        return [write_node(n.kind, n.inputs, n.outputs, n.domain, n.attributes) for n in self._nodes]

    def rename(self, name: str, wanted: str) -> None:
        """Give the last node's only output a name of our choice."""
        if self._nodes[-1].outputs != [name]:
            raise ValueError("only the last node's output can be renamed")
        self._nodes[-1].outputs[0] = wanted

    def open(self) -> onnxruntime.InferenceSession:
        """The session; this writer's weights are let go."""
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False
        large = {name: values for name, values in self._constants.items() if values.nbytes >= _LARGE_BYTES}
        initializers = [
            write_external_tensor(name, values) if name in large else write_tensor(name, values)
            for name, values in self._constants.items()
        ]
        model = write_model(
            self._written(), self._inputs.values(), self._outputs.values(), initializers, _OPSETS
        )
        self._constants.clear()
        with contextlib.ExitStack() as stack:
            spent = {name: large.pop(name) for name in self._spent & large.keys()}
            values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(kept) for name, kept in large.items()}
            large.clear()
            if spent:
                for name, placed in stack.enter_context(LOADING_ROOM.place(spent)).items():
                    values[name] = placed
                    # Without this the session would copy it for the kernel that no longer looks at it.
                    options.add_initializer(name, placed)
            if values:
                options.add_external_initializers(list(values), list(values.values()))
            return _open(model, options)


def _open(model: bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=_DISABLED
        )
    except Exception as error:
        raise BackendError(
            f"ONNX Runtime refused a graph: {error}", hint="report this with the model's name"
        ) from error
