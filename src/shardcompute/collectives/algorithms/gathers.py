"""All-gather, broadcast and barrier. Shapes are the senders' to say: frames carry them, and whoever passes an array on
passes it on as it came.

In an all-gather every rank receives what the others have, whichever way it comes; `direct` takes one round for it, so
the other ways are for networks whose lines are laid out so. In a broadcast they differ: `direct` has the root send n-1
times, a tree twice or three times at most in as many rounds, a ring once, in n-1 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcompute.collectives.algorithms.reductions import cut, doubling_partners, tree_kin
from shardcompute.collectives.algorithms.rounds import Rounds
from shardcompute.collectives.elements import code_of
from shardcompute.collectives.group import Array
from shardcompute.collectives.topology import Algorithm, Grid

_ANY_TYPE = 0


def all_gather(rounds: Rounds, array: Array, algorithm: Algorithm, grid: Grid) -> list[Array]:
    """By rank; this rank's own is `array` itself."""
    if algorithm is Algorithm.RING:
        return _gather_ring(rounds, array)
    if algorithm is Algorithm.DOUBLING:
        return _gather_doubling(rounds, array)
    if algorithm is Algorithm.TREE:
        return _gather_tree(rounds, array)
    if algorithm is Algorithm.MESH:
        row, column = grid.place(rounds.rank)
        along_row = _gather_lists(rounds, 0, grid.row(row), [array])
        by_rows = _gather_lists(rounds, 1, grid.column(column), [each[0] for each in along_row])
        return [each for arrays in by_rows for each in arrays]
    return [each[0] for each in _gather_lists(rounds, 0, range(rounds.size), [array])]


def gather_columns(rounds: Rounds, array: Array, widths: Sequence[int], out: Array) -> None:
    """Directly, into `out`: a single row's parts arrive where they belong, several rows' are laid there."""
    rows = out.size // max(1, sum(widths))
    flat = out.reshape(-1)
    if rows == 1:
        parts = cut(flat, widths)
        parts[rounds.rank][...] = array.reshape(-1)
    else:
        parts = [
            array.reshape(-1) if rank == rounds.rank else rounds.space(flat[: rows * width])
            for rank, width in enumerate(widths)
        ]
    own = array.reshape(-1)
    others = rounds.others
    rounds.exchange(0, [(rank, own) for rank in others], [(rank, parts[rank]) for rank in others])
    if rows != 1:
        np.concatenate(
            [part.reshape(rows, width) for part, width in zip(parts, widths, strict=True)],
            axis=-1,
            out=out.reshape(rows, -1),
        )


def broadcast(rounds: Rounds, array: Array | None, root: int, algorithm: Algorithm, grid: Grid) -> Array:
    """The root's array; `array` is looked at on the root alone."""
    # Counted from the root, so that every rank can be one.
    place = (rounds.rank - root) % rounds.size
    parent, children = _broadcast_kin(place, rounds.size, algorithm, grid)
    if parent is not None:
        source = (parent + root) % rounds.size
        (array,) = rounds.exchange_free(0, [], [source], _ANY_TYPE)
    assert array is not None
    held = array
    rounds.exchange_free(0, [((child + root) % rounds.size, held) for child in children], [], _ANY_TYPE)
    return held


def barrier(rounds: Rounds) -> None:
    """By dissemination: after step k every rank knows of the 2^(k+1) before it."""
    step, width = 0, 1
    while width < rounds.size:
        to, source = (rounds.rank + width) % rounds.size, (rounds.rank - width) % rounds.size
        rounds.signal(step, to, source)
        step, width = step + 1, 2 * width


def _gather_lists(
    rounds: Rounds, step: int, mates: Sequence[int], arrays: Sequence[Array]
) -> list[list[Array]]:
    """As many arrays of every mate, by mate, for all mates."""
    others = [mate for mate in mates if mate != rounds.rank]
    sends = [(mate, array) for mate in others for array in arrays]
    sources = [mate for mate in others for _ in arrays]
    came = iter(rounds.exchange_free(step, sends, sources, code_of(arrays[0])))
    return [list(arrays) if mate == rounds.rank else [next(came) for _ in arrays] for mate in mates]


def _gather_ring(rounds: Rounds, array: Array) -> list[Array]:
    size, rank = rounds.size, rounds.rank
    held = {rank: array}
    passing = array
    for step in range(size - 1):
        (passing,) = rounds.exchange_free(
            step, [((rank + 1) % size, passing)], [(rank - 1) % size], code_of(array)
        )
        held[(rank - step - 1) % size] = passing
    return [held[each] for each in range(size)]


def _gather_doubling(rounds: Rounds, array: Array) -> list[Array]:
    size, rank = rounds.size, rounds.rank
    held = {rank: array}
    for step, (source, targets) in enumerate(doubling_partners(rank, size)):
        width = 1 << step
        beside = (rank // width * width) ^ width
        coming = list(range(beside, min(beside + width, size)))
        sends = [(target, held[each]) for target in targets for each in sorted(held)]
        sources = [] if source is None else [source] * len(coming)
        came = rounds.exchange_free(step, sends, sources, code_of(array))
        held.update(zip(coming, came, strict=False))
    return [held[each] for each in range(size)]


def _gather_tree(rounds: Rounds, array: Array) -> list[Array]:
    size, rank = rounds.size, rounds.rank
    parent, children = tree_kin(rank, size)
    held = [array]
    # The nearest child comes first: what lies below it follows this rank's own.
    for child in reversed(children):
        below = min(child + (child - rank), size) - child
        held += rounds.exchange_free(0, [], [child] * below, code_of(array))
    if parent is not None:
        rounds.exchange_free(0, [(parent, each) for each in held], [], code_of(array))
        came = rounds.exchange_free(1, [], [parent] * size, code_of(array))
        held = [array if index == rank else each for index, each in enumerate(came)]
    rounds.exchange_free(1, [(child, each) for child in children for each in held], [], code_of(array))
    return held


def _broadcast_kin(place: int, size: int, algorithm: Algorithm, grid: Grid) -> tuple[int | None, list[int]]:
    """From whom a rank has the root's array and to whom it goes on, by places counted from the root."""
    if algorithm is Algorithm.DIRECT:
        return (None, list(range(1, size))) if place == 0 else (0, [])
    if algorithm is Algorithm.RING:
        return (place - 1 if place else None), ([place + 1] if place + 1 < size else [])
    if algorithm is Algorithm.MESH:
        row, column = grid.place(place)
        if column:
            return row * grid.columns, []
        down = [] if row else [each * grid.columns for each in range(1, grid.rows)]
        return (0 if row else None), down + grid.row(row)[1:]
    return tree_kin(place, size)
