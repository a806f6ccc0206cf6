"""The nodes that a coordinator can talk to, and what it has told them and not heard back of."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shardcompute.core.errors import LinkError
from shardcompute.node.rpc.commands import NodeCommand, encode_command
from shardcompute.wire import LinkPump, Message
from shardcompute.wire.control import Command, CommandReply

log = logging.getLogger(__name__)
_OFFER_TIMEOUT_S = 1.0
OnAnswer = Callable[[CommandReply], None]


@dataclass(frozen=True, slots=True)
class ConnectedNode:
    """A node with an open control link."""

    node: str
    incarnation: int
    pump: LinkPump


class NodeRegistry:
    """Methods may be called from any thread. Every command is answered: by the node or, with an error, by the end of
    its link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, ConnectedNode] = {}
        self._waiting: dict[int, tuple[LinkPump, OnAnswer]] = {}
        self._commands = 0

    def all(self) -> list[ConnectedNode]:
        with self._lock:
            return list(self._members.values())

    def enter(self, member: ConnectedNode) -> None:
        """Also in place of the same node's former link, which is closed."""
        with self._lock:
            former = self._members.get(member.node)
            self._members[member.node] = member
        if former is not None and former.pump is not member.pump:
            former.pump.link.close()
            self._give_up(former.pump)

    def leave(self, node: str, pump: LinkPump | None = None) -> ConnectedNode | None:
        """Who has left; None if it was not here, or not with this link."""
        with self._lock:
            member = self._members.get(node)
            if member is not None and pump in (None, member.pump):
                del self._members[node]
            else:
                member = None
        if pump is None and member is not None:
            pump = member.pump
        if pump is not None:
            self._give_up(pump)
        return member

    def command(self, node: str, command: NodeCommand, done: OnAnswer) -> None:
        with self._lock:
            self._commands += 1
            number = self._commands
            member = self._members.get(node)
            if member is not None:
                self._waiting[number] = (member.pump, done)
        if member is None:
            done(CommandReply(number, "it is not here", b""))
        elif not self.offer(member.pump, Command(number, encode_command(command))):
            self._finish(number, CommandReply(number, "it could not be told", b""))

    def ask(self, node: str, command: NodeCommand) -> queue.SimpleQueue[CommandReply]:
        answer: queue.SimpleQueue[CommandReply] = queue.SimpleQueue()
        self.command(node, command, answer.put)
        return answer

    def answered(self, pump: LinkPump, answer: CommandReply) -> None:
        """An answer came over this link; to a command that was given over another it is none."""
        with self._lock:
            asked, _ = self._waiting.get(answer.number, (None, None))
        if asked is pump:
            self._finish(answer.number, answer)

    def offer(self, pump: LinkPump, message: Message) -> bool:
        try:
            return pump.offer(message, timeout_s=_OFFER_TIMEOUT_S)
        except LinkError as error:
            log.info("%s did not get a %s: %s", pump.link.peer, type(message).__name__, error.message)
            return False

    def close(self) -> None:
        for member in self.all():
            member.pump.close()
            self.leave(member.node)

    def _give_up(self, pump: LinkPump) -> None:
        with self._lock:
            numbers = [number for number, (asked, _) in self._waiting.items() if asked is pump]
        for number in numbers:
            self._finish(number, CommandReply(number, "its control link ended", b""))

    def _finish(self, number: int, answer: CommandReply) -> None:
        with self._lock:
            _, done = self._waiting.pop(number, (None, None))
        if done is not None:
            done(answer)
