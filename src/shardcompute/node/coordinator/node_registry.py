"""The registry of nodes with an open control link, and the commands that they have not answered yet."""

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
_ANSWER_TIMEOUT_S = 5.0
OnAnswer = Callable[[CommandReply], None]


class NoAnswerError(LinkError):
    """A node has not answered in time. It may yet."""


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
        self._nodes: dict[str, ConnectedNode] = {}
        self._waiting: dict[int, tuple[LinkPump, OnAnswer]] = {}
        self._commands = 0

    def all(self) -> list[ConnectedNode]:
        with self._lock:
            return list(self._nodes.values())

    def add(self, node: ConnectedNode) -> None:
        """Also in place of the same node's former link, which is closed."""
        with self._lock:
            former = self._nodes.get(node.node)
            self._nodes[node.node] = node
        if former is not None and former.pump is not node.pump:
            former.pump.link.close()
            self._give_up(former.pump)

    def remove(self, node: str, pump: LinkPump | None = None) -> ConnectedNode | None:
        """Who was removed; None if it was not here, or not with this link."""
        with self._lock:
            removed = self._nodes.get(node)
            if removed is not None and pump in (None, removed.pump):
                del self._nodes[node]
            else:
                removed = None
        if pump is None and removed is not None:
            pump = removed.pump
        if pump is not None:
            self._give_up(pump)
        return removed

    def command(self, node: str, command: NodeCommand, done: OnAnswer) -> None:
        with self._lock:
            self._commands += 1
            number = self._commands
            known = self._nodes.get(node)
            if known is not None:
                self._waiting[number] = (known.pump, done)
        if known is None:
            done(CommandReply(number, "it is not here", b""))
        elif not self.offer(known.pump, Command(number, encode_command(command))):
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
        for each in self.all():
            each.pump.close()
            self.remove(each.node)

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


def await_answer(
    node: str, answer: queue.SimpleQueue[CommandReply], timeout_s: float = _ANSWER_TIMEOUT_S
) -> bytes:
    """What the node answered; LinkError if that is an error, NoAnswerError if there is none in time."""
    try:
        answered = answer.get(timeout=timeout_s)
    except queue.Empty:
        raise NoAnswerError(
            f"{node} did not answer in time ({timeout_s:g} s)", hint="its log says what it is doing"
        ) from None
    if answered.error:
        raise LinkError(f"{node}: {answered.error}")
    return answered.result
