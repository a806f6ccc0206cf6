"""Shards that a worker holds, and their places in chains.

Any thread may ask; each answer is true for a moment. Which epoch of a chain is over is known here: whoever computes
asks before every step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from shardcompute.control.state import ShardPlace
from shardcompute.core.errors import LinkError
from shardcompute.node.rpc.commands import Admit, Connect, Peer
from shardcompute.node.rpc.step_times import Patience, StepTimes
from shardcompute.node.worker.activation_log import ActivationLog
from shardcompute.node.worker.migration.receiver import ReceivedKv
from shardcompute.node.worker.stages.service_pace import ServicePace
from shardcompute.node.worker.stages.slot import StageRoute, StageSlot
from shardcompute.runtime.stage import StageRuntime
from shardcompute.security.receipts.records import StageClaim
from shardcompute.wire import StepFrame

ShardKey = ShardPlace
"""(chain, first layer, layer behind the last, which share of them)"""


class StageSlots:
    """Of the worker `node`. Who closes shards is who takes them out."""

    def __init__(self, node: str, patience: Patience) -> None:
        self._node = node
        self._patience = patience
        self._lock = threading.Lock()
        self._runtimes: dict[ShardKey, StageRuntime] = {}
        self._times: dict[ShardKey, StepTimes] = {}
        self._paces: dict[ShardKey, ServicePace] = {}
        self._claims: dict[ShardKey, StageClaim] = {}
        self._slots: dict[str, StageSlot] = {}
        self._fences: dict[str, int] = {}
        self._is_closed = False

    # Shards

    def add(
        self, key: ShardKey, runtime: StageRuntime, pace: ServicePace | None, claim: StageClaim | None
    ) -> bool:
        """False: no more are taken in."""
        with self._lock:
            if self._is_closed:
                return False
            if claim is not None:
                self._claims[key] = msgspec.structs.replace(claim, node=self._node)
            self._runtimes[key] = runtime
            self._times[key] = StepTimes(self._patience)
            if pace is not None:
                self._paces[key] = pace
            return True

    def remove(self, key: ShardKey) -> StageRuntime | None:
        """Take a shard out, and out of its chain."""
        with self._lock:
            runtime = self._runtimes.pop(key, None)
            self._times.pop(key, None)
            self._paces.pop(key, None)
            self._claims.pop(key, None)
            slot = self._slots.get(key[0])
            if slot is not None and slot.runtime is runtime:
                del self._slots[key[0]]
        return runtime

    def close(self) -> None:
        """Take nothing more in."""
        with self._lock:
            self._is_closed = True

    def remove_all(self) -> list[StageRuntime]:
        with self._lock:
            runtimes, self._runtimes = list(self._runtimes.values()), {}
        return runtimes

    def shards(self) -> dict[ShardKey, StageRuntime]:
        with self._lock:
            return dict(self._runtimes)

    def shard(self, key: ShardKey) -> StageRuntime | None:
        with self._lock:
            return self._runtimes.get(key)

    def keys_of(self, slot: StageSlot) -> list[ShardKey]:
        """The shard of a slot, unless it was taken out meanwhile."""
        with self._lock:
            return [key for key, runtime in self._runtimes.items() if runtime is slot.runtime]

    def paces_of(self, slot: StageSlot) -> list[tuple[ShardKey, ServicePace]]:
        with self._lock:
            return [
                (key, pace) for key, pace in self._paces.items() if self._runtimes.get(key) is slot.runtime
            ]

    # Places in chains

    def place(self, command: Connect, received: ReceivedKv | None) -> tuple[StageSlot, bool]:
        """A shard with its new route, and whether it goes on with its sessions: those it has, or those `received`.
        LinkError: it is not loaded, or the epoch is over."""
        chain, epoch, key = command.chain, command.epoch, command.place
        with self._lock:
            runtime = self._runtimes.get(key)
            if runtime is None:
                raise LinkError(
                    f"layers {command.start} to {command.stop} of chain {chain} are not loaded here"
                )
            if epoch < self._fences.get(chain, 0):
                raise LinkError(f"epoch {epoch} of chain {chain} is over")
            former = self._slots.get(chain)
            goes_on = command.keeps_sessions and former is not None and former.runtime is runtime
            log = former.log if goes_on and former is not None else ActivationLog(0)
            goes_on = goes_on or (received is not None and received.runtime is runtime)
            slot = StageSlot(chain, runtime, StageRoute.of(command), log, self._times[key])
            slot.claim = self._claim_of(command)
            self._slots[chain] = slot
            self._fences[chain] = epoch
        return slot, goes_on

    def _claim_of(self, command: Connect) -> StageClaim | None:
        claim = self._claims.get(command.place)
        ranks = tuple(peer.node for peer in command.ranks)
        return claim if claim is None or not ranks else msgspec.structs.replace(claim, ranks=ranks)

    def slot(self, chain: str) -> StageSlot | None:
        with self._lock:
            return self._slots.get(chain)

    def slot_for(self, frame: StepFrame) -> StageSlot | None:
        """Where a frame of this epoch is computed; None: nowhere, or no more."""
        with self._lock:
            slot = self._slots.get(frame.chain)
            is_stale = frame.epoch < self._fences.get(frame.chain, 0)
        return None if slot is None or is_stale or frame.epoch != slot.route.epoch else slot

    def logs(self) -> list[ActivationLog]:
        with self._lock:
            return [slot.log for slot in self._slots.values()]

    def admit(self, command: Admit) -> StageSlot:
        """Let another driver's frames in. LinkError: the epoch is over."""
        chain, epoch = command.chain, command.epoch
        with self._lock:
            slot = self._slots.get(chain)
            if slot is None or slot.route.epoch != epoch or epoch < self._fences.get(chain, 0):
                raise LinkError(f"epoch {epoch} of chain {chain} is over")
            slot.route = slot.route.with_driver(command)
        return slot

    def dismiss(self, chain: str, namespace: int) -> StageSlot | None:
        """Let a driver's frames in no more; None: there is no such chain here."""
        with self._lock:
            slot = self._slots.get(chain)
            if slot is not None:
                slot.route = slot.route.without_driver(namespace)
        return slot

    def fence(self, chain: str, epoch: int) -> None:
        """This epoch and those before are over."""
        with self._lock:
            self._fences[chain] = max(self._fences.get(chain, 0), epoch + 1)

    def forget(self, chain: str, epoch: int) -> StageSlot | None:
        """Take a chain's shard out of it, unless it has a place in a later epoch."""
        with self._lock:
            slot = self._slots.get(chain)
            if slot is None or slot.route.epoch > epoch:
                return None
            return self._slots.pop(chain)

    def peer_urls(self) -> set[str]:
        """Of everybody to whom something may have to be sent."""
        with self._lock:
            routes = [slot.route for slot in self._slots.values()]
        return {peer.url for route in routes for peer in route.peers()}

    def expected_peers(self) -> set[Peer]:
        """To whom the frames of current epochs go."""
        with self._lock:
            routes: Sequence[StageRoute] = [
                slot.route
                for chain, slot in self._slots.items()
                if slot.route.epoch >= self._fences.get(chain, 0)
            ]
        return {each for route in routes for each in (route.next, *route.drivers.values())}
