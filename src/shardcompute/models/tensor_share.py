"""Tensor shares: which heads, columns, experts and vocabulary rows each rank of a tensor-parallel stage holds. Pure.

Every layer is cut the same way, along heads and along the inner columns of its feed-forward block, in ranges that
follow the ranks' weights: a rank of twice the speed gets twice the work, as nearly as whole units allow. Query heads
go with the key head that they share; only where there are more ranks than key heads do several ranks keep the same
one. Columns do not make up for heads that could not be divided evenly: ranks meet behind each, so that the longest of
every part is waited for.

Or ranks are laid out as a grid, each with a block of every matrix: its row's heads and inner columns, of which it reads
or makes its column's part of the hidden values. More is exchanged than where blocks are as long as the matrix, between
fewer ranks at a time; sparse blocks, embedding and head stay cut over all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.models.spec import Experts, ModelSpec

Span = tuple[int, int]
GridShape = tuple[int, int]
"""Rows and columns of a block grid."""
Exchange = Literal["reduce", "gather"]
"""How ranks put a block's answer together: they add up what each makes of its own inputs (two all-reduces a layer), or
each computes some outputs from all inputs (four all-gathers, and the bits of one process)."""
ExpertCut = Literal["columns", "experts"]
"""Each rank has some columns of every expert, or some experts."""
_LEAST_UNIT = 16
"""The smallest block that kernels take."""
_ROW_UNIT = 32
"""Outputs are cut at multiples of it, where there are enough: kernels compute several at once, and the last few by
other ways."""


@dataclass(frozen=True, slots=True)
class TensorShare:
    """What one rank holds, as half-open ranges. A range of all there is: every rank has it whole."""

    heads: Span
    kv_heads: Span
    columns: Span
    """Inner columns of dense feed-forward blocks."""
    vocabulary: Span
    hidden: Span
    """Outputs of a block that this rank computes, where ranks gather or are a grid."""
    experts: Span = (0, 0)
    expert_columns: Span = (0, 0)
    shared_columns: Span = (0, 0)
    inputs: Span | None = None
    """Hidden values that a block's first matrices are multiplied with; None: all."""


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """A stage's ranks: the share of each, and how they exchange. All of them know all shares."""

    shares: tuple[TensorShare, ...]
    exchange: Exchange = "reduce"
    grid: GridShape | None = None
    """Ranks row by row, where they are a block grid."""

    @property
    def size(self) -> int:
        return len(self.shares)

    def row_mates(self, rank: int) -> list[int]:
        """The ranks of a rank's row, itself among them: they have the same heads and inner columns."""
        columns = self.size if self.grid is None else self.grid[1]
        first = rank // columns * columns
        return list(range(first, first + columns))

    def column_mates(self, rank: int) -> list[int]:
        """The ranks of its column: they have the same hidden values."""
        columns = self.size if self.grid is None else self.grid[1]
        return list(range(rank % columns, self.size, columns))


@dataclass(frozen=True, slots=True)
class TensorCut:
    """What a rank takes of one tensor: rows, columns (None: all), or nothing, because another rank adds it."""

    rows: Span | None = None
    columns: Span | None = None
    is_others: bool = False


WHOLE = TensorCut()


def split_tensors(
    spec: ModelSpec,
    weights: Sequence[float],
    *,
    block: int = 1,
    exchange: Exchange = "reduce",
    experts_by: ExpertCut | None = None,
    grid: GridShape | None = None,
) -> TensorSplit:
    """Shares for ranks of these weights (speeds). `block` is what quantised inputs are cut by, where that divides them
    into enough parts. Unless told otherwise, experts are cut by columns where ranks sum, and whole where they gather.
    Ranks of a `grid` sum.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise UsageError("tensor ranks need weights above 0, one for each rank")
    if exchange == "gather" and experts_by == "columns":
        raise UsageError("ranks that gather have whole experts", hint="cut by experts, or let ranks sum")
    experts_by = experts_by or ("columns" if exchange == "reduce" else "experts")
    if grid is not None:
        return _split_grid(spec, weights, grid, block, exchange, experts_by)
    ranks = len(weights)
    heads, kv_heads = _split_heads(spec, weights)
    columns = _split_blocks("feed-forward columns", spec.intermediate, weights, block)
    vocabulary = _split_rows("vocabulary rows", spec.vocab_size, weights)
    hidden = _split_rows("hidden columns", spec.hidden, weights)
    shares = [TensorShare(*parts) for parts in zip(heads, kv_heads, columns, vocabulary, hidden, strict=True)]
    if spec.experts is not None:
        sparse = _split_experts(spec.experts, weights, block, experts_by)
        shares = [replace(share, **each) for share, each in zip(shares, sparse, strict=True)]
    assert len(shares) == ranks
    return TensorSplit(tuple(shares), exchange)


def _split_grid(
    spec: ModelSpec,
    weights: Sequence[float],
    grid: GridShape,
    block: int,
    exchange: Exchange,
    experts_by: ExpertCut,
) -> TensorSplit:
    rows, columns = grid
    if rows < 1 or columns < 1 or rows * columns != len(weights):
        raise UsageError(
            f"a grid of {rows} × {columns} is not for {len(weights)} ranks",
            hint="give it as many places as there are ranks",
        )
    if exchange != "reduce":
        raise UsageError(
            "ranks of a block grid sum what they make of their inputs", hint="leave them to reduce"
        )
    if spec.latent is not None:
        raise UnsupportedModelError(
            f"{spec.family} has latent attention, whose matrices are not cut into blocks",
            hint="let ranks share heads and columns only, without a grid",
        )
    by_row = [sum(weights[row * columns : (row + 1) * columns]) for row in range(rows)]
    by_column = [sum(weights[column::columns]) for column in range(columns)]
    along_rows = split_tensors(replace(spec, experts=None), by_row, block=block).shares
    hidden = _split_blocks("hidden columns", spec.hidden, by_column, block)
    vocabulary = _split_rows("vocabulary rows", spec.vocab_size, weights)
    shares = [
        replace(
            along_rows[rank // columns],
            vocabulary=vocabulary[rank],
            hidden=hidden[rank % columns],
            inputs=hidden[rank % columns],
        )
        for rank in range(len(weights))
    ]
    if spec.experts is not None:
        sparse = _split_experts(spec.experts, weights, block, experts_by)
        shares = [replace(share, **each) for share, each in zip(shares, sparse, strict=True)]
    return TensorSplit(tuple(shares), exchange, grid)


def rank_spec(spec: ModelSpec, share: TensorShare) -> ModelSpec:
    """The model as one rank sees it: fewer heads and narrower blocks. Its vocabulary stays the whole one."""
    experts = spec.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate=_length(share.expert_columns),
            shared_intermediate=_length(share.shared_columns),
        )
    return replace(
        spec,
        heads=_length(share.heads),
        kv_heads=spec.kv_heads if spec.latent is not None else _length(share.kv_heads),
        intermediate=_length(share.columns),
        experts=experts,
    )


def tensor_cuts(spec: ModelSpec, share: TensorShare, exchange: Exchange) -> Mapping[str, TensorCut]:
    """By our name what a rank takes of each tensor that is cut (experts' without their number, biases as `.bias`)."""
    cuts = {"embedding": TensorCut(rows=share.vocabulary), "head": TensorCut(rows=share.vocabulary)}
    gathers, is_grid = exchange == "gather", share.inputs is not None

    def block(inner: Span, down: str, *ups: str, is_sparse: bool = False) -> None:
        for name in ups:
            _cut_first(cuts, name, inner, None if is_sparse else share.inputs)
        outputs = share.hidden if gathers or (is_grid and not is_sparse) else None
        cuts[down] = TensorCut(rows=outputs, columns=None if gathers else inner)
        # Of ranks that sum, the one with the first inputs adds what is added once.
        cuts[f"{down}.bias"] = TensorCut(rows=outputs, is_others=not gathers and inner[0] > 0)

    _cut_attention(spec, share, cuts)
    value = spec.head_dim if spec.latent is None else spec.latent.value
    block(_scaled(share.heads, value), "attention.out")
    block(share.columns, "mlp.down", "mlp.gate", "mlp.up")
    block(share.shared_columns, "shared.down", "shared.gate", "shared.up", is_sparse=True)
    if spec.experts is not None and share.experts == (0, spec.experts.count):
        block(share.expert_columns, "experts.down", "experts.gate", "experts.up", is_sparse=True)
    return cuts


def _cut_first(cuts: dict[str, TensorCut], name: str, rows: Span | None, inputs: Span | None) -> None:
    """A block's first matrix, and what it adds once."""
    cuts[name] = TensorCut(rows=rows, columns=inputs)
    cuts[f"{name}.bias"] = TensorCut(rows=rows, is_others=inputs is not None and inputs[0] > 0)


def cut_of(cuts: Mapping[str, TensorCut], name: str) -> TensorCut:
    """What is taken of the tensor with this name."""
    if name.startswith("experts."):
        _, _, kind = name.split(".", 2)
        name = f"experts.{kind}"
    return cuts.get(name, WHOLE)


def _cut_attention(spec: ModelSpec, share: TensorShare, cuts: dict[str, TensorCut]) -> None:
    latent = spec.latent
    if latent is not None:
        for name, width in (
            ("q", latent.plain + latent.rotated),
            ("kv_up", latent.plain + latent.value),
            ("k_up", latent.kv_rank),
            ("v_up", latent.value),
        ):
            cuts[f"attention.{name}"] = TensorCut(rows=_scaled(share.heads, width))
        return
    if spec.has_sinks:
        cuts["attention.sinks"] = TensorCut(rows=share.heads)
    for name, heads in (("q", share.heads), ("k", share.kv_heads), ("v", share.kv_heads)):
        # A norm over all heads needs them all, on every rank: no exchange is worth less than that.
        has_all = name != "v" and spec.qk_norm == "width"
        rows = None if has_all else _scaled(heads, spec.head_dim)
        _cut_first(cuts, f"attention.{name}", rows, share.inputs)


def _split_heads(spec: ModelSpec, weights: Sequence[float]) -> tuple[list[Span], list[Span]]:
    """Query heads and key heads of each rank, such that a rank's queries divide evenly among its keys."""
    ranks = len(weights)
    if spec.latent is not None:
        heads = apportion("heads", spec.heads, weights)
        return heads, [(0, 1)] * ranks
    if spec.kv_heads >= ranks:
        groups = apportion("key heads", spec.kv_heads, weights)
        return [_scaled(span, spec.group) for span in groups], groups
    if spec.heads < ranks:
        raise _too_few("heads", spec.heads, ranks)
    heads, kv_heads = [], []
    for kv_head, (first, last) in enumerate(_ranks_by_key_head(spec, weights)):
        for start, stop in apportion("heads", spec.group, weights[first:last]):
            heads.append((kv_head * spec.group + start, kv_head * spec.group + stop))
            kv_heads.append((kv_head, kv_head + 1))
    return heads, kv_heads


def _ranks_by_key_head(spec: ModelSpec, weights: Sequence[float]) -> list[Span]:
    """Neighbouring ranks for each key head: as equal in weight as can be, none with more ranks than query heads."""
    ranks, spans, first = len(weights), [], 0
    for kv_head in range(spec.kv_heads):
        left = spec.kv_heads - kv_head - 1
        least = max(1, ranks - first - left * spec.group)
        most = min(spec.group, ranks - first - left)
        target = sum(weights[first:]) / (left + 1)
        count = min(range(least, most + 1), key=lambda n: (abs(sum(weights[first : first + n]) - target), n))
        spans.append((first, first + count))
        first += count
    return spans


def _split_experts(
    experts: Experts, weights: Sequence[float], block: int, by: ExpertCut
) -> list[dict[str, Span]]:
    ranks, all_experts = len(weights), (0, experts.count)
    shared: list[Span] = [(0, 0)] * ranks
    if experts.shared_intermediate:
        shared = _split_blocks("columns of shared experts", experts.shared_intermediate, weights, block)
    if by == "experts":
        owned = apportion("experts", experts.count, weights)
        columns = [(0, experts.intermediate)] * ranks
    else:
        owned = [all_experts] * ranks
        columns = _split_blocks("columns of experts", experts.intermediate, weights, block)
    return [
        {"experts": own, "expert_columns": inner, "shared_columns": common}
        for own, inner, common in zip(owned, columns, shared, strict=True)
    ]


def _split_blocks(what: str, width: int, weights: Sequence[float], block: int) -> list[Span]:
    """Ranges of whole blocks; of halves of blocks, quarters, … where whole ones are too few."""
    unit = block if width % block == 0 else 1
    while width // unit < len(weights) and unit % 2 == 0 and unit > _LEAST_UNIT:
        unit //= 2
    return [_scaled(span, unit) for span in apportion(what, width // unit, weights)]


def _split_rows(what: str, rows: int, weights: Sequence[float]) -> list[Span]:
    unit = _ROW_UNIT
    while rows < unit * len(weights) and unit > 1:
        unit //= 2
    spans = apportion(what, -(-rows // unit), weights)
    return [(start * unit, min(stop * unit, rows)) for start, stop in spans]


def apportion(what: str, units: int, weights: Sequence[float]) -> list[Span]:
    """`units` in neighbouring ranges, as nearly in proportion to `weights` as whole units allow, none empty."""
    ranks = len(weights)
    if units < ranks:
        raise _too_few(what, units, ranks)
    total = sum(weights)
    counts = [max(1, int(units * weight / total)) for weight in weights]
    while sum(counts) != units:
        step = 1 if sum(counts) < units else -1
        # Whoever is furthest from what it should have; the first of several.
        errors = [step * (units * w / total - count) for w, count in zip(weights, counts, strict=True)]
        able = [i for i in range(ranks) if step > 0 or counts[i] > 1]
        counts[max(able, key=lambda i: (errors[i], -i))] += step
    edges = [0, *itertools.accumulate(counts)]
    return list(itertools.pairwise(edges))


def _too_few(what: str, units: int, ranks: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's {what} come in {units} parts, too few for {ranks} tensor ranks",
        hint="use fewer tensor ranks",
    )


def _length(span: Span) -> int:
    return span[1] - span[0]


def _scaled(span: Span, unit: int) -> Span:
    return span[0] * unit, span[1] * unit
