"""A tensor rank's share of a stage, loaded before anybody is there to compute it with.

Which group it meets in is said later, and anew for each epoch of its chain (`bind`). Until then it can be measured:
alone, with a group that only pretends to exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.executor import (
    Executor,
    ExecutorOptions,
    KvUsage,
    PickRule,
    SynchronousSteps,
    refuse_pictures,
)
from shardcompute.backends.matrix import Array
from shardcompute.backends.ops import RankGroup
from shardcompute.collectives.group import Group, GroupStats, columns_space
from shardcompute.core.batch import Segment
from shardcompute.core.errors import CollectiveError, LinkError
from shardcompute.core.pictures import PictureSpan
from shardcompute.models.spec import Stage
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.runtime.tensor_stage import PickedStep, TensorLeader


class LateGroup:
    """The ranks with which a share meets, as a `RankGroup`; LinkError while there are none."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: RankGroup | None = None

    def bind(self, group: RankGroup | None) -> None:
        self._group = group

    def all_reduce(self, array: Array, out: Array | None = None, /) -> Array:
        return self._current().all_reduce(array, out)

    def all_gather(self, array: Array, /) -> Sequence[Array]:
        return self._current().all_gather(array)

    def gather_columns(self, array: Array, widths: Sequence[int], out: Array | None = None, /) -> Array:
        return self._current().gather_columns(array, widths, out)

    def _current(self) -> RankGroup:
        if self._group is None:
            raise CollectiveError("this share is in no group of ranks", hint="form the group again")
        return self._group


class PretendedGroup:
    """A `Group` of one that acts as if the other ranks were there and gave nothing, to measure what a share takes."""

    epoch = 1
    stats = GroupStats()

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, array: Array, out: Array | None = None) -> Array:
        if out is None:
            return np.array(array)
        out[...] = array
        return out

    def reduce_scatter(self, array: Array, counts: Sequence[int] | None = None) -> Array:
        return np.array(array)

    def all_gather(self, array: Array) -> list[Array]:
        return [np.array(array)]

    def gather_columns(self, array: Array, widths: Sequence[int], out: Array | None = None) -> Array:
        result = columns_space(array, widths, self.rank, out)
        first = sum(widths[: self.rank])
        result[...] = 0
        result[..., first : first + widths[self.rank]] = array
        return result

    def broadcast(self, array: Array | None, root: int = 0, timeout_s: float | None = None) -> Array:
        assert array is not None
        return array

    def barrier(self) -> None:
        """Nobody else comes."""

    def send(self, array: Array, to: int) -> None:
        """Nobody receives it."""

    def receive(self, source: int, timeout_s: float | None = None) -> Array:
        raise CollectiveError("nobody sends anything in a group of one")

    def split(self, ranks: Sequence[int]) -> PretendedGroup:
        return self

    def abort(self, reason: str) -> None:
        """There is nobody to tell."""

    def close(self) -> None:
        """It holds nothing."""


@dataclass(frozen=True, slots=True)
class LoadedShare:
    """A rank's executor, and all that is needed to compute with it among others."""

    executor: Executor
    rank: TensorRank
    group: LateGroup
    stage: Stage
    options: ExecutorOptions

    def pretended(self) -> PretendedGroup:
        return PretendedGroup(self.group.rank, self.group.size)

    def forget_sessions(self) -> None:
        for session in self.executor.sessions():
            self.executor.close_session(session)


class LateLeader(SynchronousSteps):
    """The executor of the rank that leads (see `TensorLeader`), in whichever group it is. One caller at a time.

    What was held in the group before goes on in the next one as far as all its ranks still hold it; whoever wants
    nothing of that closes the sessions in between.
    """

    def __init__(self, share: LoadedShare) -> None:
        self.share = share
        self._leader: TensorLeader | None = None

    @property
    def can_pick(self) -> bool:
        return self.share.stage.is_last

    @property
    def exchange_s(self) -> float:
        return 0.0 if self._leader is None else self._leader.exchange_s

    @property
    def slowest(self) -> int | None:
        return None if self._leader is None else self._leader.slowest

    def bind(self, group: Group) -> None:
        """Compute with this group from now on. LinkError where it ends at once."""
        share, former = self.share, self._leader
        held = {} if former is None else {each: former.session_length(each) for each in former.sessions()}
        share.group.bind(group)
        self._leader = TensorLeader(share.executor, share.rank, group, share.stage, share.options, held)

    def unbind(self) -> None:
        """Forget the group, and all sessions."""
        self._leader = None
        self.share.forget_sessions()
        self.share.group.bind(None)

    def can_continue(self, session: int, position: int) -> bool:
        return False

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        return self._current().step(segments, inputs, keeps_hidden=keeps_hidden)

    def launch_picks(
        self,
        segments: Sequence[Segment],
        inputs: Array,
        rules: Sequence[PickRule | None],
        *,
        keeps_hidden: bool = False,
    ) -> PickedStep:
        return self._current().launch_picks(segments, inputs, rules, keeps_hidden=keeps_hidden)

    def hidden_rows(self) -> Array:
        return self.share.executor.hidden_rows()

    def final_rows(self) -> Array:
        return self.share.executor.final_rows()

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self._current().adopt(source, target, length, is_moved=is_moved)

    def open_pictures(
        self, session: int, spans: Sequence[PictureSpan], patches: Sequence[bytes] | None
    ) -> None:
        raise refuse_pictures("a stage of tensor ranks")

    def close_session(self, session: int) -> None:
        """Also where the group has ended: what the others hold of it they forget when they meet again."""
        try:
            if self._leader is not None:
                self._leader.close_session(session)
        except LinkError:
            self.share.executor.close_session(session)

    def session_length(self, session: int) -> int:
        return 0 if self._leader is None else self._leader.session_length(session)

    def sessions(self) -> list[int]:
        return [] if self._leader is None else self._leader.sessions()

    def kv_usage(self) -> KvUsage:
        """Of this rank alone, in tokens that all of them have room for."""
        own = self.share.executor.kv_usage()
        if self._leader is None:
            return own
        shared = self._leader.kv_usage()
        return KvUsage(own.used_bytes, own.total_bytes, shared.free_tokens, shared.sessions)

    def keep_waiting(self) -> None:
        self._current().keep_waiting()

    def close(self) -> None:
        """Its group is ended by whoever formed it."""
        self.share.executor.close()

    def _current(self) -> TensorLeader:
        if self._leader is None:
            raise CollectiveError("this share is in no group of ranks", hint="form the group again")
        return self._leader
