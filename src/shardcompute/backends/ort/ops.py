"""Recording ops: a decoder run once over these leaves a program of graphs behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcompute.backends.host.low_rank import LowRank
from shardcompute.backends.matrix import Array, Float32, Matrix, StoredRows
from shardcompute.backends.ops import (
    Activation,
    Attention,
    Axes,
    ExpertBlock,
    Gate,
    RankGroup,
    RotationTables,
)
from shardcompute.backends.ort.activation import write_activation, write_gated
from shardcompute.backends.ort.attention import AttentionKernel
from shardcompute.backends.ort.experts import open_experts
from shardcompute.backends.ort.graph import CONTRIB, GraphWriter
from shardcompute.backends.ort.linear import Linear, describe_form, stack, write_linear, write_low_rank
from shardcompute.backends.ort.model_bytes import INT64
from shardcompute.backends.ort.program import Attend, Graph, ProgramStep, RankExchange, TakeWanted, Value
from shardcompute.backends.ort.table import EmbeddingTable, StoredTable
from shardcompute.core.kv_types import KvType


class _Piece:
    """A graph being written: which values of other steps it uses, and which of its own others use."""

    def __init__(self) -> None:
        self.graph = GraphWriter()
        self.takes: dict[str, Value] = {}
        self.makes: dict[str, Value] = {}
        self.tables: dict[str, Array] = {}
        self.row_numbers: dict[str, Array] = {}
        self.choices: tuple[str, str] | None = None
        """Each row's adapter, to be compared, and whether there is any."""
        self.is_open = True
        self.forms: set[str] = set()


@dataclass(frozen=True, slots=True)
class MixedTurns:
    """Cosines and sines of positions, and behind `first` those of rows that turn by several (`axes`)."""

    cosines: Float32
    sines: Float32
    axes: Sequence[int]
    first: int

    def place(self, positions: Array, rows: Array) -> None:
        """Lay down those of `rows` of a step at `positions` `[3, rows of the step]`."""
        where, pairs = positions[list(self.axes)][:, rows].T, np.arange(len(self.axes))
        for table in (self.cosines, self.sines):
            table[self.first + rows] = table[where, pairs]


class OrtOps:
    """Records nodes into the open piece; attention, experts, the choice of rows and exchanges of ranks close it.

    A value may be used in the piece that makes it and up to the end of the next one; then the first is opened as
    a session and its weights are let go. Pieces that end in an exchange count as one with the piece that follows: the
    residual goes past them.
    """

    def __init__(self, context_length: int, positions: Array, adapters: Array, kv_type: KvType) -> None:
        """The executor fills `positions` and `adapters`, `[1, rows]`, before it runs a step."""
        self._context_length = context_length
        self._positions = positions
        self._adapters = adapters
        self._kv_type = kv_type
        self._is_narrow = False
        self.steps: list[ProgramStep] = []
        self._ended: list[tuple[int, _Piece]] = []
        self._pending: list[tuple[int, _Piece]] = []
        """Pieces with their places among the steps: since the last that was closed, and up to it."""
        self._piece = _Piece()
        self._kernels: dict[Any, AttentionKernel] = {}
        self._names = 0
        self.mixed_turns: list[MixedTurns] = []

    @property
    def kernels(self) -> Sequence[AttentionKernel]:
        return list(self._kernels.values())

    # Loading: handles are plain arrays until they are written into a graph.

    def matrix(
        self, parts: Sequence[Matrix], bias: Float32 | None, low_rank: LowRank | None = None
    ) -> Linear:
        return Linear(stack(parts), bias, low_rank)

    def vector(self, values: Float32) -> Float32:
        return values

    def table(self, matrix: Matrix, first: int | None = None) -> EmbeddingTable:
        return EmbeddingTable(matrix, first)

    def stored_table(self, rows: StoredRows) -> StoredTable:
        return StoredTable(rows)

    def rotation(self, tables: RotationTables, axes: Axes = ()) -> tuple[Float32, Float32]:
        cosines, sines = tables(self._context_length)
        if not axes:
            return cosines, sines
        # Behind the positions there is a place for each row of a step that is at several at once.
        places = ((0, self._positions.shape[1]), (0, 0))
        mixed = MixedTurns(np.pad(cosines, places), np.pad(sines, places), list(axes), self._context_length)
        self.mixed_turns.append(mixed)
        return mixed.cosines, mixed.sines

    # Computing

    def source(self, width: int) -> Value:
        """A value that the executor fills before the program runs."""
        return Value(self._name("in"), width, None)

    def embed(self, table: EmbeddingTable | StoredTable, ids: Value) -> Value:
        """The executor looks rows of the table up itself and fills the source with them."""
        return ids

    def linear(self, x: Value, matrix: Linear) -> Value:
        piece, name = self._piece, self._use(x)
        piece.forms.update(describe_form(part) for part in matrix.parts)
        y = write_linear(piece.graph, name, matrix)
        if matrix.low_rank is not None:
            piece.forms.add("float32 of adapters")
            y = write_low_rank(piece.graph, name, y, *self._choices(), matrix)
        return self._made(y, matrix.width)

    def rms_norm(self, x: Value, weight: Float32, eps: float) -> Value:
        graph, name, width = self._piece.graph, self._use(x), len(weight)
        grouped = width != x.width
        if grouped:
            name = graph.node("Reshape", [name, graph.integers(1, -1, x.width // width, width)])
        scale = graph.constant(weight.astype(np.float32))
        name = graph.node("SimplifiedLayerNormalization", [name, scale], epsilon=eps, axis=-1)
        if grouped:
            name = graph.node("Reshape", [name, graph.integers(1, -1, x.width)])
        return self._made(name, x.width)

    def layer_norm(self, x: Value, weight: Float32, bias: Float32 | None, eps: float) -> Value:
        graph = self._piece.graph
        parts = [graph.constant(part.astype(np.float32)) for part in (weight, bias) if part is not None]
        name = graph.node("LayerNormalization", [self._use(x), *parts], epsilon=eps, axis=-1)
        return self._made(name, x.width)

    def split(self, x: Value, sizes: Sequence[int]) -> Sequence[Value]:
        graph = self._piece.graph
        names = graph.nodes("Split", [self._use(x), graph.integers(*sizes)], len(sizes), axis=-1)
        return [self._made(name, size) for name, size in zip(names, sizes, strict=True)]

    def add(self, x: Value, y: Value) -> Value:
        return self._made(self._piece.graph.node("Add", [self._use(x), self._use(y)]), x.width)

    def scale(self, x: Value, factor: float) -> Value:
        graph = self._piece.graph
        return self._made(graph.node("Mul", [self._use(x), graph.number(factor)]), x.width)

    def softcap(self, x: Value, cap: float) -> Value:
        graph = self._piece.graph
        limit = graph.number(cap)
        squashed = graph.node("Tanh", [graph.node("Div", [self._use(x), limit])])
        return self._made(graph.node("Mul", [squashed, limit]), x.width)

    def gated(self, gate_up: Value, gate: Gate) -> Value:
        name = write_gated(self._piece.graph, self._use(gate_up), gate_up.width, gate)
        return self._made(name, gate_up.width // 2)

    def activate(self, x: Value, activation: Activation) -> Value:
        return self._made(write_activation(self._piece.graph, self._use(x), activation), x.width)

    def weigh(self, x: Value, score: Value) -> Value:
        graph = self._piece.graph
        weight = graph.node("Sigmoid", [self._use(score)])
        return self._made(graph.node("Mul", [self._use(x), weight]), x.width)

    def rotate(self, x: Value, head_dim: int, rotation: tuple[Float32, Float32]) -> Value:
        cosines, sines = rotation
        piece, name = self._piece, self._use(x)
        tables = [self._table(cosines), self._table(sines)]
        self._numbers("positions", self._positions)
        turned = 2 * cosines.shape[1]
        name = piece.graph.node(
            "RotaryEmbedding",
            [name, "positions", *tables],
            domain=CONTRIB,
            num_heads=x.width // head_dim,
            rotary_embedding_dim=0 if turned == head_dim else turned,
        )
        return self._made(name, x.width)

    def head_maps(self, weights: Float32) -> Float32:
        return weights

    def per_head(self, x: Value, maps: Float32) -> Value:
        graph, (heads, width, width_in) = self._piece.graph, maps.shape
        self._piece.forms.add("float32 of each head")
        rows = graph.node("Reshape", [self._use(x), graph.integers(-1, heads, width_in)])
        rows = graph.node("Transpose", [rows], perm=[1, 0, 2])
        y = graph.node("FusedMatMul", [rows, graph.constant(maps)], domain=CONTRIB, transB=1)
        y = graph.node("Transpose", [y], perm=[1, 0, 2])
        return self._made(graph.node("Reshape", [y, graph.integers(1, -1, heads * width)]), heads * width)

    def join_heads(self, parts: Sequence[Value], heads: int) -> Value:
        graph = self._piece.graph
        split = [
            graph.node("Reshape", [self._use(part), graph.integers(1, -1, heads, part.width // heads)])
            for part in parts
        ]
        width = sum(part.width for part in parts)
        joined = graph.node("Concat", split, axis=-1)
        return self._made(graph.node("Reshape", [joined, graph.integers(1, -1, width)]), width)

    def attend(self, q: Value, k: Value, v: Value | None, layer: int, attention: Attention) -> Value:
        for value in (q, k) if v is None else (q, k, v):
            self._export(value)
        self._close()
        key = attention if attention.sinks is None else (layer, attention.window, attention.chunk)
        if key not in self._kernels:
            self._kernels[key] = AttentionKernel(attention, self._kv_type)
        step = Attend(
            kernel=self._kernels[key],
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=Value(self._name("a"), attention.width_out, None),
            kv_shape=attention.kept.grouped,
        )
        self.steps.append(step)
        return step.out

    def experts(self, x: Value, block: ExpertBlock) -> Value:
        scores = self.linear(x, block.router)
        for value in (x, scores):
            self._export(value)
        self._close()
        out = Value(self._name("e"), x.width, None)
        self.steps.append(open_experts(block, x, scores, out))
        return out

    def logit_rows(self, x: Value) -> Value:
        self._export(x)
        self._close()
        self._is_narrow = True
        out = Value(self._name("r"), x.width, None, is_narrow=True)
        self.steps.append(TakeWanted(x, out))
        return out

    def all_reduce(self, x: Value, group: RankGroup) -> Value:
        return self._exchange(x, x.width, group)

    def all_gather(self, x: Value, group: RankGroup, widths: Sequence[int]) -> Value:
        return self._exchange(x, sum(widths), group, widths)

    def _exchange(self, x: Value, width: int, group: RankGroup, widths: Sequence[int] | None = None) -> Value:
        self._export(x)
        self._end_piece()
        out = Value(self._name("x"), width, None, is_narrow=self._is_narrow)
        self.steps.append(RankExchange(x, out, group, widths))
        return out

    def keep(self, value: Value) -> None:
        """Make a value readable when the program has run."""
        self._export(value)

    def finish(self, result: Value) -> None:
        """No more nodes: open what is still being written."""
        self._export(result)
        self._end_piece()
        self._open_before()
        self._open_pending()

    # The piece under way

    def _name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}_{self._names}"

    def _made(self, name: str, width: int) -> Value:
        return Value(name, width, self._piece, is_narrow=self._is_narrow)

    def _use(self, value: Value) -> str:
        piece = self._piece
        if value.maker is piece:
            return value.name
        if value.maker is not None:
            self._export(value)
        name = f"{value.name}_{id(value):x}" if value.maker is not None else value.name
        if name not in piece.takes:
            piece.takes[name] = value
            piece.graph.input(name, [1, "rows", value.width])
        return name

    def _export(self, value: Value) -> None:
        """Make a value of a piece visible outside it."""
        maker = value.maker
        if isinstance(maker, _Piece):
            if not maker.is_open:
                raise ValueError(f"{value.name} is used after its piece was opened as a session")
            if value.name not in maker.makes:
                maker.makes[value.name] = value
                maker.graph.output(value.name, [1, "rows", value.width])

    def _table(self, table: Float32) -> str:
        name = f"table_{id(table):x}"
        self._piece.graph.input(name, list(table.shape))
        self._piece.tables[name] = table
        return name

    def _numbers(self, name: str, numbers: Array) -> str:
        self._piece.graph.input(name, [1, "rows"], INT64)
        self._piece.row_numbers[name] = numbers
        return name

    def _choices(self) -> tuple[str, str]:
        piece = self._piece
        if piece.choices is None:
            graph, name = piece.graph, self._numbers("adapters", self._adapters)
            most = graph.node("ReduceMax", [name, graph.integers(0, 1)], keepdims=0)
            is_any = graph.node("Greater", [most, graph.constant(np.array(0, dtype=np.int64))])
            piece.choices = graph.node("Unsqueeze", [name, graph.integers(-1)]), is_any
        return piece.choices

    def _close(self) -> None:
        """End the open piece and turn those before it into sessions."""
        if not self._piece.graph.is_empty:
            self._end_piece()
            self._open_before()

    def _open_before(self) -> None:
        self._open_pending()
        self._pending, self._ended = self._ended, []

    def _end_piece(self) -> None:
        if not self._piece.graph.is_empty:
            self._ended.append((len(self.steps), self._piece))
            self._piece = _Piece()

    def _open_pending(self) -> None:
        opened = len(self._pending)
        while self._pending:
            # The last first, so that the others' places among the steps stay right.
            self._open(*self._pending.pop())
        self._ended = [(place + opened, piece) for place, piece in self._ended]

    def _open(self, index: int, piece: _Piece) -> None:
        piece.is_open = False
        step = Graph(
            session=piece.graph.open(),
            takes=list(piece.takes.values()),
            makes=list(piece.makes.values()),
            input_names=list(piece.takes),
            tables=piece.tables,
            row_numbers=piece.row_numbers,
            forms=frozenset(piece.forms),
        )
        self.steps.insert(index, step)
