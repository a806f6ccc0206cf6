"""All-reduce and reduce-scatter: five ways to the same bits, each with its own steps and bytes.

For n ranks and an array of s bytes, what each rank sends and how many rounds follow each other:

    direct      (n-1) · s               1 round     everyone has everything and adds for itself
    ring        2(n-1)/n · s            2(n-1)      each adds its piece; finished pieces go round
    doubling    s · log2 n              log2 n      partners exchange ever larger sums
    tree        s (inner nodes more)    2 log2 n    up to rank 0 and down again; few links
    mesh        2(n-1)/n · s            4           ring's bytes with the peers of one row and one column only

A ring that hands sums from neighbour to neighbour begins at another rank for each piece, so that bits would depend on
the place of a number in its array. Ours moves the same bytes in as many rounds, but each part goes straight to the rank
that owns its piece, which adds them in the tree's order (`algorithms.order`). A mesh whose rows are not a power of two
sends more than one node of the tree in its second round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from shardcompute.collectives.algorithms.order import Node, nodes_of, sum_nodes, sum_ranks
from shardcompute.collectives.algorithms.rounds import Rounds
from shardcompute.collectives.elements import add
from shardcompute.collectives.group import Array, even_counts
from shardcompute.collectives.topology import Grid

AllReduce = Callable[[Rounds, Array, Array], None]
"""Of a flat array, into another."""


def cut(array: Array, counts: Sequence[int]) -> list[Array]:
    """Pieces of a flat array, as views."""
    ends = list(accumulate(counts, initial=0))
    return [array[start:stop] for start, stop in pairwise(ends)]


def all_reduce_direct(rounds: Rounds, array: Array, out: Array) -> None:
    others = rounds.others
    parts = [array if rank == rounds.rank else rounds.space(array) for rank in range(rounds.size)]
    rounds.exchange(0, [(rank, array) for rank in others], [(rank, parts[rank]) for rank in others])
    sum_ranks(parts, out, rounds.rank)


def all_reduce_ring(rounds: Rounds, array: Array, out: Array) -> None:
    size, rank = rounds.size, rounds.rank
    counts = even_counts(array.size, size)
    mine = reduce_scatter_stepwise(rounds, cut(array, counts))
    pieces = cut(out, counts)
    pieces[rank][...] = mine
    for step in range(size - 1):
        sends, comes = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        rounds.exchange(size + step, [((rank + 1) % size, sends)], [((rank - 1) % size, comes)])


def all_reduce_doubling(rounds: Rounds, array: Array, out: Array) -> None:
    out[...] = array
    theirs = rounds.space(out)
    for step, (source, targets) in enumerate(doubling_partners(rounds.rank, rounds.size)):
        comes = [] if source is None else [(source, theirs)]
        rounds.exchange(step, [(target, out) for target in targets], comes)
        if source is not None:
            low, high = (theirs, out) if source < rounds.rank else (out, theirs)
            add(low, high, out)


def all_reduce_tree(rounds: Rounds, array: Array, out: Array) -> None:
    out[...] = array
    theirs: Array | None = None
    rank, size = rounds.rank, rounds.size
    step, width = 0, 1
    while width < size:
        if rank % (2 * width) == width:
            rounds.exchange(step, [(rank - width, out)], [])
            break
        if rank + width < size:
            theirs = rounds.space(out) if theirs is None else theirs
            rounds.exchange(step, [], [(rank + width, theirs)])
            add(out, theirs, out)
        step, width = step + 1, 2 * width
    parent, children = tree_kin(rank, size)
    down = size.bit_length()
    if parent is not None:
        rounds.exchange(down, [], [(parent, out)])
    rounds.exchange(down, [(child, out) for child in children], [])


def mesh_all_reduce(grid: Grid) -> AllReduce:
    """All-reduce over the rows and columns of a grid."""

    def all_reduce_mesh(rounds: Rounds, array: Array, out: Array) -> None:
        row, column = grid.place(rounds.rank)
        mates, column_mates = grid.row(row), grid.column(column)
        by_column = even_counts(array.size, grid.columns)
        by_row = even_counts(by_column[column], grid.rows)
        nodes = _row_nodes(rounds, grid, array, by_column)
        total = _column_sum(rounds, grid, nodes, by_row)
        pieces = cut(out, by_column)
        shares = cut(pieces[column], by_row)
        shares[row][...] = total
        _gather(rounds, 2, column_mates, shares)
        _gather(rounds, 3, mates, pieces)

    return all_reduce_mesh


def _row_nodes(rounds: Rounds, grid: Grid, array: Array, counts: Sequence[int]) -> dict[Node, Array]:
    """This column's piece, summed over the row as far as the order of sums allows."""
    row, column = grid.place(rounds.rank)
    mates = grid.row(row)
    pieces = cut(array, counts)
    parts = [pieces[column] if mate == rounds.rank else rounds.space(pieces[column]) for mate in mates]
    rounds.exchange(
        0,
        [(mate, pieces[index]) for index, mate in enumerate(mates) if mate != rounds.rank],
        [(mate, parts[index]) for index, mate in enumerate(mates) if mate != rounds.rank],
    )
    first = mates[0]
    return {
        (start, stop): sum_ranks(
            parts[start - first : stop - first], rounds.space(pieces[column]), rounds.rank - start
        )
        for start, stop in nodes_of(first, first + grid.columns, rounds.size)
    }


def _column_sum(rounds: Rounds, grid: Grid, nodes: dict[Node, Array], counts: Sequence[int]) -> Array:
    """This rank's share of its column's piece, summed over all ranks."""
    row, column = grid.place(rounds.rank)
    mates = grid.column(column)
    gathered: dict[Node, Array] = {}
    sends: list[tuple[int, Array]] = []
    comes: list[tuple[int, Array]] = []
    for node, total in nodes.items():
        for index, share in enumerate(cut(total, counts)):
            if index == row:
                gathered[node] = share
            else:
                sends.append((mates[index], share))
    for index, mate in enumerate(mates):
        if index != row:
            first = index * grid.columns
            for node in nodes_of(first, first + grid.columns, rounds.size):
                gathered[node] = rounds.space(next(iter(nodes.values()))[: counts[row]])
                comes.append((mate, gathered[node]))
    rounds.exchange(1, sends, comes)
    return sum_nodes(gathered, rounds.size)


def _gather(rounds: Rounds, step: int, mates: Sequence[int], pieces: Sequence[Array]) -> None:
    """Every mate's piece, for all mates."""
    mine = pieces[mates.index(rounds.rank)]
    rounds.exchange(
        step,
        [(mate, mine) for mate in mates if mate != rounds.rank],
        [(mate, piece) for mate, piece in zip(mates, pieces, strict=True) if mate != rounds.rank],
    )


def reduce_scatter_direct(rounds: Rounds, pieces: Sequence[Array]) -> Array:
    """The sum of this rank's piece; all parts travel at once."""
    mine = pieces[rounds.rank]
    parts = [mine if rank == rounds.rank else rounds.space(mine) for rank in range(rounds.size)]
    others = rounds.others
    rounds.exchange(0, [(rank, pieces[rank]) for rank in others], [(rank, parts[rank]) for rank in others])
    return sum_ranks(parts, np.empty_like(mine), rounds.rank)


def reduce_scatter_stepwise(rounds: Rounds, pieces: Sequence[Array]) -> Array:
    """The same, with one peer to send to and one to hear from at a time."""
    size, rank = rounds.size, rounds.rank
    mine = pieces[rank]
    parts = [mine if other == rank else rounds.space(mine) for other in range(size)]
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        rounds.exchange(step, [(to, pieces[to])], [(source, parts[source])])
    return sum_ranks(parts, np.empty_like(mine), rank)


def doubling_partners(rank: int, size: int) -> list[tuple[int | None, list[int]]]:
    """For each step of recursive doubling: whom a rank hears from, and to whom it sends.

    In step k blocks of 2^k ranks hold the same sum, and each rank needs that of the block beside its own. Where the
    last block is short, its ranks send to several; where there is none beside, nothing happens.
    """

    def source_of(rank: int, width: int) -> int | None:
        start = rank // width * width
        beside = start ^ width
        length = min(beside + width, size) - beside
        return beside + (rank - start) % length if length > 0 else None

    steps: list[tuple[int | None, list[int]]] = []
    width = 1
    while width < size:
        beside = (rank // width * width) ^ width
        asking = range(beside, min(beside + width, size))
        steps.append((source_of(rank, width), [each for each in asking if source_of(each, width) == rank]))
        width *= 2
    return steps


def tree_kin(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a rank in the binomial tree under rank 0; the child with the most below comes first."""
    width = 1
    while width < size and rank % (2 * width) == 0:
        width *= 2
    parent = None if rank == 0 else rank - width
    children: list[int] = []
    width //= 2
    while width:
        if rank + width < size:
            children.append(rank + width)
        width //= 2
    return parent, children
