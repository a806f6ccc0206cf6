"""Sparse feed-forward blocks: the chosen experts of a step in one kernel where ONNX Runtime has one, else one by one.

`QMoE` takes the matrices of all experts stacked and computes those that rows choose. It is given pairs of a row and one
of its experts, since the order in which it sums up the experts of a row depends on what else there is to do; sums are
made here, in an order that is the row's own. An expert with a single pair gets it twice where its kernel takes another
path for one row: so a pair has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from shardcompute.backends.host.routing import choose_experts
from shardcompute.backends.matrix import Array, BlockMatrix, Float32
from shardcompute.backends.ops import ExpertBlock, Gate
from shardcompute.backends.ort.activation import GPT_OSS_ALPHA, write_gated
from shardcompute.backends.ort.graph import CONTRIB, GraphWriter
from shardcompute.backends.ort.linear import INT8_ACTIVATIONS, Linear, describe_form, write_linear
from shardcompute.backends.ort.program import Run, Value

# Pairs that are computed at once: more are hardly faster, and take as much more memory.
_MOST_PAIRS = 1024
_PROBED_ROWS = 5


@dataclass(slots=True, eq=False)
class ExpertsStep:
    """Sends each row to its experts and adds up what they answer, weighed."""

    experts: GroupedExperts | SingleExperts
    block: ExpertBlock
    """Without matrices: how rows choose."""
    x: Value
    scores: Value
    out: Value

    def inputs(self) -> Iterable[Value]:
        return (self.x, self.scores)

    def outputs(self) -> Iterable[Value]:
        return (self.out,)

    def run(self, run: Run) -> None:
        block, routing = self.block, self.block.routing
        most, count = max(1, _MOST_PAIRS // block.per_token), run.own_rows
        self.out.buffer[count : run.rows] = 0
        for first in range(0, count, most):
            rows = slice(first, min(first + most, count))
            logits = self.scores.buffer[rows]
            chosen, weights = choose_experts(logits, block.per_token, routing, block.choice_bias)
            x = np.repeat(self.x.buffer[rows], block.per_token, axis=0)
            if routing.weighs_input:
                x *= weights.reshape(-1, 1)
            answers = self._ask(x, chosen.reshape(-1)).reshape(*chosen.shape, -1)
            out = self.out.buffer[rows]
            out[:] = 0
            for rank in range(block.per_token):
                answer = answers[:, rank]
                out += answer if routing.weighs_input else answer * weights[:, rank, None]

    def _ask(self, x: Float32, chosen: NDArray[np.int64]) -> Float32:
        """What each row's expert answers. A rank without that expert has nothing to say; where ranks are a group, the
        one that has it answers for all, so that answers are weighed and added in the row's own order."""
        if self.block.owned is None:
            return self.experts.run(x, chosen)
        first, stop = self.block.owned
        own = np.nonzero((first <= chosen) & (chosen < stop))[0]
        answers: Float32 = np.zeros((len(x), self.out.width), dtype=np.float32)
        if len(own):
            answers[own] = self.experts.run(x[own], chosen[own] - first)
        return answers if self.block.group is None else self.block.group.all_reduce(answers)


@dataclass(slots=True)
class GroupedExperts:
    """All experts in one session."""

    session: onnxruntime.InferenceSession
    count: int
    doubles: bool
    """Whether a row alone takes another path."""

    def run(self, x: Float32, chosen: NDArray[np.int64]) -> Float32:
        """Rows of x, each through the expert that is chosen for it."""
        taken = np.arange(len(chosen))
        if self.doubles:
            alone = np.bincount(chosen, minlength=self.count)[chosen] == 1
            taken = np.concatenate([taken, np.nonzero(alone)[0]])
        probabilities = np.zeros((len(taken), self.count), dtype=np.float32)
        probabilities[np.arange(len(taken)), chosen[taken]] = 1
        rows = x if len(taken) == len(x) else x[taken]
        answers: Float32 = self.session.run(["y"], {"x": rows, "probabilities": probabilities})[0]
        return answers[: len(chosen)]


@dataclass(slots=True)
class SingleExperts:
    """A session for each expert: for matrices that the grouped kernel cannot take."""

    sessions: Sequence[onnxruntime.InferenceSession]
    width: int
    doubles: bool
    """Whether a row alone takes another path, in any of them."""

    bindings: dict[int, onnxruntime.IOBinding] = field(default_factory=dict)
    """By expert, where it has been chosen: calls with arrays cost more than short products do."""

    def run(self, x: Float32, chosen: NDArray[np.int64]) -> Float32:
        rows_of: dict[int, list[int]] = {}
        for row, expert in enumerate(chosen.tolist()):
            rows_of.setdefault(expert, []).append(row)
        taken: list[int] = []
        for rows in rows_of.values():
            taken += rows * 2 if self.doubles and len(rows) == 1 else rows
        inputs = x[taken]
        outputs: Float32 = np.empty((len(taken), self.width), dtype=np.float32)
        first = 0
        for expert, rows in rows_of.items():
            count = 2 if self.doubles and len(rows) == 1 else len(rows)
            self._run_expert(expert, inputs[first : first + count], outputs[first : first + count])
            first += count
        answers: Float32 = np.empty((len(x), self.width), dtype=np.float32)
        answers[taken] = outputs
        return answers

    def _run_expert(self, expert: int, x: Float32, y: Float32) -> None:
        session = self.sessions[expert]
        binding = self.bindings.get(expert)
        if binding is None:
            binding = self.bindings[expert] = session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, (1, *x.shape), x.ctypes.data)
        binding.bind_output("y", "cpu", 0, np.float32, (1, *y.shape), y.ctypes.data)
        session.run_with_iobinding(binding)


def open_experts(block: ExpertBlock, x: Value, scores: Value, out: Value) -> ExpertsStep:
    """The step of a block; its matrices are let go."""
    experts: GroupedExperts | SingleExperts
    experts = _open_grouped(block, x.width) if can_group(block) else _open_singles(block, x.width, out.width)
    return ExpertsStep(experts, replace(block, router=None, gate_up=(), down=()), x, scores, out)


def can_group(block: ExpertBlock) -> bool:
    """Whether all experts' matrices are blocks of one form, without shifts, and gated as the kernel can."""
    if block.gate.limit is None and block.gate.activation != "silu":
        return False
    forms = {_form(linear) for maps in (block.gate_up, block.down) for linear in maps}
    return len(forms) == 1 and None not in forms


def _form(linear: Linear) -> tuple[int, int, bool] | None:
    matrix = linear.parts[0]
    if len(linear.parts) > 1 or not isinstance(matrix, BlockMatrix) or matrix.shifts is not None:
        return None
    return matrix.bits, matrix.block_size, linear.bias is None


def _open_grouped(block: ExpertBlock, width: int) -> GroupedExperts:
    graph, count = GraphWriter(), len(block.gate_up)
    x = graph.input("x", ["rows", width])
    probabilities = graph.input("probabilities", ["rows", count])
    form: BlockMatrix = block.gate_up[0].parts[0]
    bits, block_size = form.bits, form.block_size
    up = _stacked(graph, block.gate_up, is_gated=True)
    down = _stacked(graph, block.down, is_gated=False)
    limit = {} if block.gate.limit is None else {"swiglu_limit": float(block.gate.limit)}
    answer = graph.node(
        "QMoE",
        [x, probabilities, *up, *down],
        domain=CONTRIB,
        k=1,
        quant_type="int",
        block_size=block_size,
        expert_weight_bits=bits,
        accuracy_level=INT8_ACTIVATIONS,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0 if block.gate.limit is None else GPT_OSS_ALPHA,
        activation_beta=0.0 if block.gate.limit is None else 1.0,
        normalize_routing_weights=0,
        **limit,
    )
    graph.rename(answer, "y")
    graph.output("y", ["rows", width])
    experts = GroupedExperts(graph.open(), count, doubles=False)
    return replace(experts, doubles=not _has_even_rows(experts, width))


def _stacked(graph: GraphWriter, maps: Sequence[Linear], *, is_gated: bool) -> list[str]:
    """Codes, scales and biases of all experts as constants; each expert's own are let go as they are copied."""
    first: Any = maps[0].parts[0]
    rows = len(first.codes)
    # The kernel wants gate and up in turns, not one behind the other.
    order = np.arange(rows).reshape(2, -1).T.reshape(-1) if is_gated else np.arange(rows)
    codes: Array = np.empty((len(maps), rows, first.codes[0].size), dtype=np.uint8)
    scales: Float32 = np.empty((len(maps), *first.scales.shape), dtype=np.float32)
    has_bias = maps[0].bias is not None
    biases: Float32 = np.zeros((len(maps), rows), dtype=np.float32)
    for expert, linear in enumerate(maps):
        matrix: Any = linear.parts[0]
        codes[expert] = matrix.codes.reshape(rows, -1)[order]
        scales[expert] = matrix.scales[order]
        if linear.bias is not None:
            biases[expert] = linear.bias[order]
        if isinstance(maps, MutableSequence):
            maps[expert] = None
    return [graph.constant(codes), graph.constant(scales), graph.constant(biases) if has_bias else ""]


def _has_even_rows(experts: GroupedExperts | SingleExperts, width: int, expert: int = 0) -> bool:
    """Whether a row alone has the bits that it has among others, with this expert."""
    noise = np.random.default_rng(0).standard_normal((_PROBED_ROWS, width), dtype=np.float32)
    chosen = np.full(_PROBED_ROWS, expert, dtype=np.int64)
    together = experts.run(noise, chosen)
    return all(np.array_equal(experts.run(noise[i : i + 1], chosen[:1])[0], together[i]) for i in range(3))


def _open_singles(block: ExpertBlock, width: int, width_out: int) -> SingleExperts:
    first_of: dict[object, int] = {}
    for expert, pair in enumerate(zip(block.gate_up, block.down, strict=True)):
        first_of.setdefault(tuple(_kernels(linear) for linear in pair), expert)
    sessions = []
    for expert, (gate_up, down) in enumerate(zip(block.gate_up, block.down, strict=True)):
        sessions.append(_open_single(gate_up, down, width, block.gate))
        for maps in (block.gate_up, block.down):
            if isinstance(maps, MutableSequence):
                maps[expert] = None
    experts = SingleExperts(sessions, width_out, doubles=False)
    is_even = all(_has_even_rows(experts, width, expert) for expert in first_of.values())
    return replace(experts, doubles=not is_even)


def _kernels(linear: Linear) -> tuple[object, ...]:
    """What decides how its rows are computed."""
    return tuple((type(part), describe_form(part), part.shape) for part in linear.parts)


def _open_single(gate_up: Linear, down: Linear, width: int, gate: Gate) -> onnxruntime.InferenceSession:
    graph = GraphWriter()
    x = graph.input("x", [1, "rows", width])
    hidden = write_gated(graph, write_linear(graph, x, gate_up), gate_up.width, gate)
    graph.rename(write_linear(graph, hidden, down), "y")
    graph.output("y", [1, "rows", down.width])
    return graph.open()
