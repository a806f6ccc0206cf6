"""Slots of stages: whom one hears, whom it sends to, whom it answers, and what it keeps of whose sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import CapacityError, LinkError
from shardcompute.node.rpc.commands import Admit, Connect, Peer, StepLimits, Wire
from shardcompute.node.rpc.session_ids import namespace_of, within
from shardcompute.node.rpc.step_times import STAGE_PATIENCE, StepTimes
from shardcompute.node.worker.activation_log import ActivationLog
from shardcompute.node.worker.ranks.groups import RankMeeting
from shardcompute.runtime.stage import StageRuntime
from shardcompute.security.receipts.records import StageClaim
from shardcompute.wire import StepFrame

_RANKS_S = 60.0
"""Longer than ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class StageRoute:
    """Whom a stage hears and sends to in one epoch of its chain."""

    epoch: int
    next: Peer
    driver: Peer
    """The coordinator's own, without which there is no chain."""
    is_last: bool
    previous: str
    """The node whose frames are taken: the stage before, or the driver where this is the first."""
    wire: Wire = field(default_factory=Wire)
    drivers: Mapping[int, Peer] = field(default_factory=dict)
    """Who is answered, by the namespace of their sessions."""
    shares: Mapping[int, int] = field(default_factory=dict)
    """KV tokens that each of them may use."""
    dismissed: frozenset[int] = frozenset()
    """Ranges of drivers that are gone: what still comes of them is dropped."""

    @classmethod
    def of(cls, command: Connect) -> StageRoute:
        return cls(
            command.epoch,
            command.next,
            command.driver,
            command.is_last,
            command.previous_node,
            command.wire,
            {command.session_namespace: command.driver},
            {command.session_namespace: command.kv_tokens},
        )

    def owner(self, sessions: Sequence[int]) -> Peer | None:
        """The one driver whose sessions these are."""
        namespaces = {namespace_of(session) for session in sessions}
        return self.drivers.get(namespaces.pop()) if len(namespaces) == 1 else None

    def hears(self, sender: str, sessions: Sequence[int], *, is_replay: bool = False) -> bool:
        """Whether rows of these sessions are taken from this node: from the stage before, where their driver is
        known, or from that driver. A replay may tell of drivers that are yet to come back in this epoch."""
        owner = self.owner(sessions)
        if self._is_stage_before(sender):
            are_welcome = not any(namespace_of(session) in self.dismissed for session in sessions)
            return owner is not None or (is_replay and are_welcome)
        return owner is not None and owner.node == sender

    def may_end(self, sender: str, sessions: Sequence[int]) -> bool:
        """Whether these sessions are over when this node says so."""
        owner = self.owner(sessions)
        return self._is_stage_before(sender) or (owner is not None and owner.node == sender)

    def with_driver(self, command: Admit) -> StageRoute:
        namespace = command.session_namespace
        return replace(
            self,
            drivers={**self.drivers, namespace: command.driver},
            shares={**self.shares, namespace: command.kv_tokens},
            dismissed=self.dismissed - {namespace},
        )

    def without_driver(self, namespace: int) -> StageRoute:
        return replace(
            self,
            drivers={key: driver for key, driver in self.drivers.items() if key != namespace},
            shares={key: share for key, share in self.shares.items() if key != namespace},
            dismissed=self.dismissed | {namespace},
        )

    def check_share(self, wanted: Mapping[int, int], held: Mapping[int, int]) -> None:
        """CapacityError if one driver's sessions, with lengths as `wanted`, take more than its share. Whoever has the
        chain alone may fill it."""
        namespace = namespace_of(next(iter(wanted)))
        share = self.shares.get(namespace, 0)
        lengths = {**{id: held[id] for id in within(namespace, held)}, **wanted}
        used = sum(-(-length // PAGE_TOKENS) * PAGE_TOKENS for length in lengths.values())
        if used > share and len(self.drivers) > 1:
            raise CapacityError(
                f"{used} tokens are more than this driver's share of the memory, {share}",
                hint="ask another driver, or start the cluster with more --kv-tokens",
            )

    def peers(self) -> list[Peer]:
        """Everybody to whom something may have to be sent."""
        return [self.next, self.driver, *self.drivers.values()]

    def _is_stage_before(self, sender: str) -> bool:
        # Before the first stage comes the coordinator's driver. A stage may host another driver besides.
        return sender == self.previous and sender != self.driver.node


def sessions_in(frame: StepFrame) -> list[int]:
    """All that a frame has to do with: what one begins with is another's content."""
    sources = [opened.prefix_source for opened in frame.opens if opened.prefix_length]
    rows = [segment.session for segment in frame.segments]
    return [*rows, *(opened.session for opened in frame.opens), *sources]


@dataclass(slots=True)
class StageSlot:
    """A shard in its chain, with what it has sent on to the next stage."""

    chain: str
    runtime: StageRuntime
    route: StageRoute
    log: ActivationLog
    times: StepTimes = field(default_factory=lambda: StepTimes(STAGE_PATIENCE))
    """What the shard's steps took."""
    ranks: RankMeeting | None = None
    """Those with whom it computes in this epoch, where there are others."""
    claim: StageClaim | None = None
    """What it says in receipts that it is; None: it signs for nothing."""
    _newest: dict[int, int] = field(default_factory=dict)
    """By the namespace of its sessions, the number of each driver's last frame."""

    def allowed_s(self, rows: int) -> float:
        """How long a step of so many rows may take. Of several ranks, one that hangs is found by the others."""
        return self.times.allowed_s(rows) + (_RANKS_S if self.ranks is not None else 0.0)

    def driver_of(self, frame: StepFrame) -> Peer:
        """Whom the frame's results go to. LinkError when it was dismissed meanwhile."""
        owner = self.route.owner([segment.session for segment in frame.segments])
        if owner is None:
            raise LinkError(f"the driver of a frame of chain {frame.chain} is gone")
        return owner

    def is_outdated(self, frame: StepFrame) -> bool:
        """What a driver sent before it dialled anew may come late, and would undo what it has sent since."""
        if frame.width or frame.replay:
            return False
        driver = namespace_of(frame.segments[0].session)
        newest = self._newest.get(driver, 0)
        self._newest[driver] = max(frame.sequence, newest)
        return frame.sequence <= newest

    def check_share(self, frame: StepFrame) -> None:
        """Of what a driver asks the first stage for; the others follow."""
        if not frame.width and not frame.replay and len(self.route.drivers) > 1:
            wanted = {segment.session: segment.start + segment.count for segment in frame.segments}
            self.route.check_share(wanted, self.runtime.session_lengths())

    def limits(self) -> StepLimits:
        """What the shard can do in one step."""
        runtime = self.runtime
        return StepLimits(runtime.max_rows, runtime.max_logit_rows, runtime.can_continue)

    def held(self, namespace: int) -> dict[int, int]:
        """The sessions of a namespace that have memory here, and how many tokens of each."""
        lengths = self.runtime.session_lengths()
        return {session: lengths[session] for session in within(namespace, lengths)}

    def close(self, sessions: Sequence[int]) -> None:
        self.runtime.close_sessions(sessions)
        for session in sessions:
            self.log.forget(session)

    def free(self, namespace: int) -> None:
        """Forget all sessions of a namespace."""
        self.close(within(namespace, {*self.runtime.session_lengths(), *self.log.lengths()}))
