"""Process groups over a fabric: numbers calls, chooses algorithms, bounds waits, and ends worlds that cannot go on."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np

from shardcompute.collectives.algorithms import gathers, reductions
from shardcompute.collectives.algorithms.rounds import Place, Rounds, Scratch, Traffic
from shardcompute.collectives.deadlines import CallDeadlines
from shardcompute.collectives.elements import code_of
from shardcompute.collectives.fabrics.fabric import Fabric, PeerAbortedError, PeerFailedError, farewell_frame
from shardcompute.collectives.fabrics.frames import MOST_BODY_BYTES, MOST_DIMENSIONS, SEQUENCE_SPAN, Operation
from shardcompute.collectives.group import Array, GroupStats, as_contiguous, columns_space, even_counts
from shardcompute.collectives.line_speeds import (
    FRAME_S,
    LineSpeed,
    LineSpeeds,
    all_reduce_s,
    choose_all_reduce,
    choose_broadcast,
)
from shardcompute.collectives.topology import AUTO, Algorithm, TopologyChoice
from shardcompute.core.errors import CollectiveError, UsageError

_MOST_CHOICES = 256
Outcome = TypeVar("Outcome")
_FIXED: dict[Algorithm, reductions.AllReduce] = {
    Algorithm.DIRECT: reductions.all_reduce_direct,
    Algorithm.RING: reductions.all_reduce_ring,
    Algorithm.DOUBLING: reductions.all_reduce_doubling,
    Algorithm.TREE: reductions.all_reduce_tree,
}


@dataclass(slots=True)
class World:
    """What the groups of one rank share: the fabric, and why it is over, once it is."""

    fabric: Fabric
    deadlines: CallDeadlines = field(default_factory=CallDeadlines)
    frame_s: float = FRAME_S
    """What this rank takes for a frame besides the line."""
    speeds: LineSpeeds | None = None
    failure: CollectiveError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    scratch: Scratch = field(default_factory=Scratch)
    quiet: Context = field(default_factory=lambda: _quiet_context())

    def fail(self, failure: CollectiveError) -> CollectiveError:
        """End the world for this reason, unless there was one before. Returns the first."""
        if self.failure is None:
            self.failure = failure
            blamed = self.fabric.rank if failure.rank is None else failure.rank
            self.fabric.end(farewell_frame(self.fabric.epoch, blamed, failure.message))
        return self.failure


class FabricGroup:
    """One rank's view of a group. The world's own is `FabricGroup(World(fabric))`; others come from `split`."""

    def __init__(
        self,
        world: World,
        topology: TopologyChoice = AUTO,
        members: Sequence[int] | None = None,
        name: str = "world",
    ) -> None:
        self.world = world
        self.members = tuple(range(world.fabric.size)) if members is None else tuple(members)
        self.rank = self.members.index(world.fabric.rank)
        self.size = len(self.members)
        self.epoch = world.fabric.epoch
        self.name = name
        topology.check(self.size)
        self._topology = topology
        self._grid = topology.grid_for(self.size)
        self._mesh = reductions.mesh_all_reduce(self._grid)
        self._id = zlib.crc32(f"{name} {self.members}".encode())
        self._sequence = 0
        self._pair_sequences: dict[tuple[int, bool], int] = {}
        self._traffic = Traffic()
        self._place = Place(world.fabric, self.members, self.rank, self._id, self._traffic, world.scratch)
        self._calls: dict[Operation, int] = {}
        self._busy_s = 0.0
        self._choices: dict[int, tuple[reductions.AllReduce, float]] = {}
        self.measured(world.speeds)

    @property
    def stats(self) -> GroupStats:
        moved = self._traffic
        calls = {operation.name.lower(): count for operation, count in self._calls.items()}
        return GroupStats(moved.bytes_sent, moved.bytes_received, moved.frames_sent, calls, self._busy_s)

    def measured(self, speeds: LineSpeeds | None) -> None:
        """Choose by these figures from now on, which every rank must have alike."""
        self.line = LineSpeed() if speeds is None else speeds.among(self.members)
        self._choices.clear()

    def algorithm_for(self, size_bytes: int) -> Algorithm:
        """Which way an all-reduce of so many bytes goes."""
        named = self._topology.algorithm
        return named or choose_all_reduce(size_bytes, self.size, self._grid, self.line)

    def all_reduce(self, array: Array, out: Array | None = None) -> Array:
        self._check(array)
        flat = as_contiguous(array).reshape(-1)
        result = np.empty_like(flat) if out is None else _flat_out(out, array)
        way, line_s = self._choices.get(flat.nbytes) or self._choose(flat.nbytes)
        self._run(Operation.ALL_REDUCE, flat.nbytes, line_s, lambda rounds: way(rounds, flat, result))
        return result.reshape(array.shape) if out is None else out

    def reduce_scatter(self, array: Array, counts: Sequence[int] | None = None) -> Array:
        self._check(array)
        if array.ndim == 0:
            raise UsageError("a single number cannot be scattered", hint="use all_reduce")
        rows = even_counts(len(array), self.size) if counts is None else list(counts)
        if len(rows) != self.size or sum(rows) != len(array) or min(rows) < 0:
            raise UsageError(
                f"{len(array)} rows cannot be scattered as {rows} over {self.size} ranks",
                hint="give a count for each rank, which together are all rows",
            )
        flat = as_contiguous(array).reshape(-1)
        width = array[:1].size
        pieces = reductions.cut(flat, [count * width for count in rows])
        is_direct = self._topology.algorithm in (None, Algorithm.DIRECT)
        way = reductions.reduce_scatter_direct if is_direct else reductions.reduce_scatter_stepwise
        line_s = all_reduce_s(Algorithm.RING, flat.nbytes, self.size, self._grid, self.line)
        mine = self._run(Operation.REDUCE_SCATTER, flat.nbytes, line_s, lambda rounds: way(rounds, pieces))
        return mine.reshape(rows[self.rank], *array.shape[1:])

    def all_gather(self, array: Array) -> list[Array]:
        self._check(array)
        held = as_contiguous(array)
        algorithm = self._topology.algorithm or Algorithm.DIRECT
        line_s = all_reduce_s(Algorithm.RING, held.nbytes * self.size, self.size, self._grid, self.line)
        gathered = self._run(
            Operation.ALL_GATHER,
            held.nbytes,
            line_s,
            lambda rounds: gathers.all_gather(rounds, held, algorithm, self._grid),
        )
        gathered[self.rank] = held.copy()
        return gathered

    def gather_columns(self, array: Array, widths: Sequence[int], out: Array | None = None) -> Array:
        self._check(array)
        result = columns_space(array, widths, self.rank, out)
        if not result.size:
            return result
        if self._topology.algorithm not in (None, Algorithm.DIRECT):
            np.concatenate(self.all_gather(array), axis=-1, out=result)
            return result
        held = as_contiguous(array)
        _, line_s = self._choices.get(held.nbytes) or self._choose(held.nbytes)
        self._run(
            Operation.ALL_GATHER,
            held.nbytes,
            line_s,
            lambda rounds: gathers.gather_columns(rounds, held, widths, result),
        )
        return result

    def broadcast(self, array: Array | None, root: int = 0, timeout_s: float | None = None) -> Array:
        self._check_rank(root)
        if self.rank == root:
            if array is None:
                raise UsageError("the root of a broadcast has nothing to send", hint="give it an array")
            self._check(array)
            held: Array | None = as_contiguous(array)
        else:
            held = None
        algorithm = self._topology.algorithm or choose_broadcast(self.size)
        size_bytes = 0 if held is None else held.nbytes
        line_s = all_reduce_s(Algorithm.TREE, size_bytes, self.size, self._grid, self.line)
        result = self._run(
            Operation.BROADCAST,
            size_bytes,
            line_s,
            lambda rounds: gathers.broadcast(rounds, held, root, algorithm, self._grid),
            timeout_s,
        )
        return result.copy() if self.rank == root else result

    def barrier(self) -> None:
        line_s = all_reduce_s(Algorithm.DOUBLING, 0, self.size, self._grid, self.line)
        self._run(Operation.BARRIER, 0, line_s, gathers.barrier)

    def send(self, array: Array, to: int) -> None:
        self._check(array)
        self._check_rank(to, is_other=True)
        held = as_contiguous(array)
        line_s = self.line.latency_s + self.line.carry_s(held.nbytes)
        self._run(
            Operation.SEND,
            held.nbytes,
            line_s,
            lambda rounds: rounds.exchange_free(0, [(to, held)], [], 0),
            pair=(to, True),
        )

    def receive(self, source: int, timeout_s: float | None = None) -> Array:
        self._check_rank(source, is_other=True)
        (array,) = self._run(
            Operation.SEND,
            0,
            self.line.latency_s,
            lambda rounds: rounds.exchange_free(0, [], [source], 0),
            timeout_s,
            pair=(source, False),
        )
        return array

    def split(self, ranks: Sequence[int]) -> Self:
        chosen = list(ranks)
        if self.rank not in chosen or len(set(chosen)) != len(chosen):
            raise UsageError(
                f"rank {self.rank} cannot be in a group of the ranks {chosen}",
                hint="name each rank once, this one among them",
            )
        for each in chosen:
            self._check_rank(each)
        members = [self.members[each] for each in chosen]
        topology = self._topology if self._topology.grid is None else TopologyChoice(self._topology.algorithm)
        return type(self)(self.world, topology, members, f"{self.name}/{chosen}")

    def abort(self, reason: str) -> None:
        self.world.fail(
            CollectiveError(
                f"rank {self.members[self.rank]} has ended the group: {reason}",
                hint="form the group again",
                rank=self.members[self.rank],
            )
        )

    def close(self) -> None:
        self.abort("it leaves")
        self.world.fabric.interrupt()
        with self.world.lock:
            self.world.fabric.close()

    def _run(
        self,
        operation: Operation,
        size_bytes: int,
        line_s: float,
        work: Callable[[Rounds], Outcome],
        timeout_s: float | None = None,
        pair: tuple[int, bool] | None = None,
    ) -> Outcome:
        """One numbered call: counted, timed, and the end of the world if it fails."""
        world = self.world
        with world.lock:
            if world.failure is not None:
                raise _again(world.failure)
            sequence = self._next_sequence(pair)
            started_s = time.monotonic()
            allowed_s = world.deadlines.timeout_s(size_bytes, line_s) if timeout_s is None else timeout_s
            rounds = Rounds(self._place, operation, sequence, started_s + allowed_s)
            try:
                outcome = world.quiet.run(work, rounds)
            except (PeerFailedError, PeerAbortedError) as error:
                raise self._failed(operation.name.lower(), sequence, error, allowed_s) from error
            except BaseException as error:
                # Others are in the same call and would wait for what does not come.
                self.abort(f"{operation.name.lower()} {sequence} ended with {type(error).__name__}")
                raise
            seconds = time.monotonic() - started_s
            if timeout_s is None:
                world.deadlines.took(size_bytes, seconds)
            self._busy_s += seconds
            self._calls[operation] = self._calls.get(operation, 0) + 1
            return outcome

    def _choose(self, size_bytes: int) -> tuple[reductions.AllReduce, float]:
        """The way of an all-reduce of this size, and what the lines take for it."""
        algorithm = self.algorithm_for(size_bytes)
        line_s = all_reduce_s(algorithm, size_bytes, self.size, self._grid, self.line)
        if len(self._choices) >= _MOST_CHOICES:
            self._choices.clear()
        found = self._choices[size_bytes] = (_FIXED.get(algorithm, self._mesh), line_s)
        return found

    def _next_sequence(self, pair: tuple[int, bool] | None) -> int:
        """Sends between two ranks are numbered by themselves: the others take no part in them."""
        if pair is None:
            self._sequence = (self._sequence + 1) % SEQUENCE_SPAN
            return self._sequence
        number = self._pair_sequences[pair] = (self._pair_sequences.get(pair, 0) + 1) % SEQUENCE_SPAN
        return number

    def _failed(
        self, operation: str, sequence: int, error: PeerFailedError | PeerAbortedError, allowed_s: float
    ) -> CollectiveError:
        here = self.members[self.rank]
        if isinstance(error, PeerAbortedError):
            found = CollectiveError(
                f"{operation} {sequence} was given up on rank {here}: {error.message}",
                hint="form the group again without the rank that failed",
                rank=error.rank if error.rank < self.world.fabric.size else None,
                operation=operation,
                sequence=sequence,
            )
        else:
            waited = f" (after {allowed_s:.3g} s)" if error.is_late else ""
            found = CollectiveError(
                f"{operation} {sequence} failed on rank {here} because of rank {error.peer}: "
                f"{error.message}{waited}",
                hint=error.hint or "form the group again",
                rank=error.peer,
                operation=operation,
                sequence=sequence,
            )
        return self.world.fail(found)

    def _check(self, array: Array) -> None:
        code_of(array)
        if array.nbytes > MOST_BODY_BYTES:
            raise UsageError(
                f"an array of {array.nbytes} bytes is over the limit of {MOST_BODY_BYTES}",
                hint="hand it over in parts",
            )
        if array.ndim > MOST_DIMENSIONS:
            raise UsageError(f"an array of {array.ndim} dimensions has too many", hint="reshape it")

    def _check_rank(self, rank: int, *, is_other: bool = False) -> None:
        if not 0 <= rank < self.size or (is_other and rank == self.rank):
            raise UsageError(
                f"rank {self.rank} of {self.size} cannot reach rank {rank}",
                hint="ranks of a group are counted from 0",
            )


def _flat_out(out: Array, array: Array) -> Array:
    if out.shape != array.shape or out.dtype != array.dtype or not out.flags.c_contiguous:
        raise UsageError(
            f"a sum of {array.dtype}{list(array.shape)} cannot be written to {out.dtype}{list(out.shape)}",
            hint="give `out` the shape and type of the array, in one run of memory",
        )
    return out.reshape(-1)


def _quiet_context() -> Context:
    """Where infinite sums raise no warnings: they are for whoever computes with them to judge, not for whoever adds."""
    context = copy_context()
    context.run(np.seterr, over="ignore", invalid="ignore", under="ignore")
    return context


def _again(failure: CollectiveError) -> CollectiveError:
    """The same error for a later call: one that was raised carries its own trace."""
    return CollectiveError(
        failure.message,
        hint=failure.hint,
        rank=failure.rank,
        operation=failure.operation,
        sequence=failure.sequence,
    )
