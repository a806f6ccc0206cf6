"""Linear maps as graph nodes: dense, in quantised blocks, blocks with 16-bit outliers, or several side by side."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix
from shardcompute.backends.ort.graph import CONTRIB, GraphWriter

# Activations are rounded to int8 inside the kernel: four to five times faster than keeping them in float32.
INT8_ACTIVATIONS = 4
_PROBED_OUTPUTS = 64
_PROBED_ROWS = (1, 2, 5, 16, 64)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map before it is written into a graph. Parts lie side by side along the outputs."""

    parts: tuple[Matrix, ...]
    bias: Float32 | None
    low_rank: LowRank | None = None

    @property
    def width(self) -> int:
        return sum(part.shape[0] for part in self.parts)


def stack(parts: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """Neighbours of one form joined into one matrix, so that they become one product."""
    joined: list[Matrix] = []
    for part in parts:
        if joined and (merged := _join(joined[-1], part)) is not None:
            joined[-1] = merged
        else:
            joined.append(part)
    return tuple(joined)


def write_linear(graph: GraphWriter, x: str, linear: Linear) -> str:
    outputs = [_write_part(graph, x, part) for part in linear.parts]
    y = outputs[0] if len(outputs) == 1 else graph.node("Concat", outputs, axis=-1)
    return y if linear.bias is None else graph.node("Add", [y, graph.constant(linear.bias)])


def write_low_rank(
    graph: GraphWriter, x: str, y: str, adapters: str, any_adapter: str, linear: Linear
) -> str:
    """`y` with what its rows' adapters add, where any row has one: other steps pay nothing. Numbers of other adapters'
    ranks are dropped, not multiplied by 0: they may be infinite."""
    part = linear.low_rank
    assert part is not None
    down, up = graph.constant(part.down), graph.constant(part.up)
    owners, nothing = graph.constant(part.owners), graph.number(0.0)
    added = graph.branch()
    inner = added.node("FusedMatMul", [x, down], domain=CONTRIB, transB=1)
    own = added.node("Equal", [adapters, owners])
    inner = added.node("Where", [own, inner, nothing])
    inner = added.node("FusedMatMul", [inner, up], domain=CONTRIB, transB=1)
    added.output(added.node("Add", [y, inner]), [1, "rows", linear.width])
    same = graph.branch()
    same.output(same.node("Identity", [y]), [1, "rows", linear.width])
    return graph.node("If", [any_adapter], then_branch=added.subgraph(), else_branch=same.subgraph())


def describe_form(matrix: Matrix) -> str:
    """Which kernels a matrix is multiplied with."""
    if isinstance(matrix, DenseMatrix):
        return "float32"
    blocks = matrix.blocks if isinstance(matrix, MixedMatrix) else matrix
    return f"int{blocks.bits} blocks of {blocks.block_size}"


def _write_part(graph: GraphWriter, x: str, matrix: Matrix) -> str:
    if isinstance(matrix, DenseMatrix):
        return _dense(graph, x, matrix.to_dense())
    if isinstance(matrix, BlockMatrix):
        return _blocks(graph, x, matrix)
    outliers = graph.node("Gather", [x, graph.constant(matrix.columns)], axis=-1)
    exact = _dense(graph, outliers, matrix.values.astype(np.float32))
    # Left in, they would set the scale with which the kernel rounds their neighbours.
    others = np.ones(matrix.shape[1], dtype=np.float32)
    others[matrix.columns] = 0
    quiet = graph.node("Mul", [x, graph.constant(others)])
    return graph.node("Add", [_blocks(graph, quiet, matrix.blocks), exact])


def _dense(graph: GraphWriter, x: str, weight: Float32) -> str:
    return graph.node("FusedMatMul", [x, graph.constant(weight)], domain=CONTRIB, transB=1)


def _blocks(graph: GraphWriter, x: str, matrix: BlockMatrix) -> str:
    width = matrix.shape[1]
    y = _product(graph, x, matrix, is_spent=_forgets_scales(matrix.bits, matrix.block_size, width))
    if matrix.shifts is None:
        return y
    blocked = graph.node("Reshape", [x, graph.integers(1, -1, width // matrix.block_size, matrix.block_size)])
    sums = graph.node("ReduceSum", [blocked, graph.integers(-1)], keepdims=0)
    return graph.node("Add", [y, _dense(graph, sums, matrix.shifts)])


def _product(graph: GraphWriter, x: str, matrix: BlockMatrix, *, is_spent: bool) -> str:
    rows, width = matrix.shape
    scales = matrix.scales.reshape(-1)
    return graph.node(
        "MatMulNBits",
        [x, graph.constant(matrix.codes), graph.constant(scales, is_spent=is_spent)],
        domain=CONTRIB,
        K=width,
        N=rows,
        bits=matrix.bits,
        block_size=matrix.block_size,
        accuracy_level=INT8_ACTIVATIONS,
    )


@functools.cache
def _forgets_scales(bits: int, block_size: int, width: int) -> bool:
    """Whether this machine's kernel reads scales only while it packs them, found out by taking them away."""
    noise = np.random.default_rng(0)
    blocks = width // block_size
    codes = noise.integers(0, 256, (_PROBED_OUTPUTS, blocks, block_size * bits // 8), dtype=np.uint8)
    matrix = BlockMatrix(bits, block_size, codes, noise.random((_PROBED_OUTPUTS, blocks), dtype=np.float32))
    kernels = []
    for is_spent in (False, True):
        graph = GraphWriter()
        graph.rename(_product(graph, graph.input("x", [1, "rows", width]), matrix, is_spent=is_spent), "y")
        graph.output("y", [1, "rows", _PROBED_OUTPUTS])
        kernels.append(graph.open())
    inputs = [noise.standard_normal((1, rows, width), dtype=np.float32) for rows in _PROBED_ROWS]
    return all(np.array_equal(*(kernel.run(["y"], {"x": rows})[0] for kernel in kernels)) for rows in inputs)


def _join(a: Matrix, b: Matrix) -> Matrix | None:
    if isinstance(a, DenseMatrix) and isinstance(b, DenseMatrix) and a.values.dtype == b.values.dtype:
        return DenseMatrix(np.concatenate([a.values, b.values]))
    if isinstance(a, BlockMatrix) and isinstance(b, BlockMatrix):
        if (a.bits, a.block_size, a.shifts is None) != (b.bits, b.block_size, b.shifts is None):
            return None
        shifts = None if a.shifts is None or b.shifts is None else np.concatenate([a.shifts, b.shifts])
        codes, scales = np.concatenate([a.codes, b.codes]), np.concatenate([a.scales, b.scales])
        return BlockMatrix(a.bits, a.block_size, codes, scales, shifts)
    return None
