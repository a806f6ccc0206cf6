"""KV exchange of a worker: the sessions that its stages send away, and those that its shards take over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from shardcompute.control.state import ShardPlace
from shardcompute.core.errors import LinkError
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.rpc.commands import Connect, ExpectKv, Peer, SendKv
from shardcompute.node.worker.migration.receiver import KvReceiver, ReceivedKv
from shardcompute.node.worker.migration.sender import KvSender, Perform
from shardcompute.runtime.stage import StageRuntime
from shardcompute.wire import Link

_QUIET_S = 20.0
"""A copy that came no further for so long is given up."""
_REST_S = 3.0
"""So long a shard that is to be freed may take to send the rest."""


class KvExchange:
    """Methods may be called from any thread, but for `wrote`, which belongs to the one that computes."""

    def __init__(self, dial: Callable[[Peer], Link], perform: Perform) -> None:
        self._dial = dial
        self._perform = perform
        self._lock = threading.Lock()
        self._senders: list[KvSender] = []
        self._receiver = KvReceiver(perform)

    # What is sent

    def send(self, command: SendKv, runtime: StageRuntime, own: range) -> None:
        """Begin to send a stage's sessions, and return when little of them is left. LinkError where any of those who
        are to have them will not: then none will."""
        self._end([each for each in self._all() if each.chain == command.chain], 0.0)
        senders = []
        try:
            for target in command.targets:
                sender = KvSender(command, target, runtime, own, self._dial, self._perform)
                senders.append(sender)
                with self._lock:
                    self._senders = [*self._senders, sender]
                # Only now: it must hear of every write behind what it has read.
                sender.start()
            for sender in senders:
                sender.wait_caught_up(_QUIET_S)
        except LinkError:
            self._end(senders, 0.0)
            raise

    def wrote(self, runtime: StageRuntime, work: Sequence[SessionRows], openings: Sequence[Opening]) -> None:
        """A step is about to write these rows."""
        for sender in self._senders:
            if sender.runtime is runtime:
                sender.wrote(work, openings)

    def seal(self, chain: str, epoch: int) -> None:
        """This epoch is over: nothing of it is computed any more."""
        for sender in self._all():
            if sender.chain == chain and sender.epoch <= epoch:
                sender.seal()

    # What is taken over

    def expect(self, command: ExpectKv, runtime: StageRuntime | None) -> None:
        self._receiver.expect(command, runtime)

    def serve(self, link: Link) -> None:
        """Take what another worker sends, until the link ends."""
        self._receiver.serve(link)

    def take(self, command: Connect) -> ReceivedKv | None:
        """What a stage that is connected goes on with; None: with nothing that was sent to it."""
        if command.kv_copy:
            return self._receiver.take(command.place, command.kv_copy)
        self._receiver.drop(command.place)
        return None

    # The end

    def release(self, place: ShardPlace, runtime: StageRuntime | None) -> None:
        """A shard is about to be freed: others get the rest of its sessions, and it gets no more."""
        self._receiver.release(place)
        self._end([each for each in self._all() if each.runtime is runtime], _REST_S)

    def close(self) -> None:
        self._end(self._all(), 0.0)

    def _all(self) -> list[KvSender]:
        with self._lock:
            return list(self._senders)

    def _end(self, senders: Sequence[KvSender], patience_s: float) -> None:
        for sender in senders:
            sender.seal()
        for sender in senders:
            sender.end(patience_s)
        with self._lock:
            # Another list: whoever computes goes through the former one.
            self._senders = [each for each in self._senders if each not in senders]
