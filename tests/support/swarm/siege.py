"""A swarm under attack: the tests' own, small and quick, with one member that has good papers and bad manners."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompute.core.generation import GenerationRequest, TokenChoice
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Credentials, Role
from shardcompute.wire import Link, Message, SessionClose, StepResult
from shardcompute.wire.control import Command
from support.models.tiny_checkpoint import save_tiny_llama
from support.network.lab_links import LabLink
from support.swarm.lab import DEADLINE_S, LabSwarm, Talk, swarm

PROMPT = GenerationRequest(tuple(b"Once upon a time"), 24)
BAD_JSON = {
    "nothing": b"",
    "bytes": b"\xff\xfe\xfd",
    "another event": b'{"type":"King"}',
    "no event": b"[1,2,3]",
    "deep": b'{"type":' + b"[" * 100_000,
    "text": b'{"type":"NodeDrained","node":"\xff"}',
}
_marks = itertools.count()


class Siege:
    """The swarm, what it answers, and its bad member."""

    def __init__(self, lab: LabSwarm) -> None:
        self.lab = lab
        self.expected: tuple[TokenChoice, ...] = lab.ask(PROMPT).tokens
        self.member: Credentials = join_cluster(lab.token, lab.folder / "member", Role.WORKER)[0]

    @contextlib.contextmanager
    def outlasted(self) -> Iterator[None]:
        """After the block the swarm answers as before, from the same epoch of the same chain."""
        before = self.lab.chain()
        yield
        assert self.lab.ask(PROMPT).tokens == self.expected
        self.lab.wait_quiet()
        after = self.lab.chain()
        assert (after.id, after.epoch, after.stages) == (before.id, before.epoch, before.stages)


@contextlib.contextmanager
def siege(folder: Path) -> Iterator[Siege]:
    with swarm(folder, save_tiny_llama(folder / "tiny"), layers=(2, 2, 2), stages=3) as lab:
        yield Siege(lab)


@dataclass(frozen=True, slots=True)
class Suspended:
    """An answer that stands still: `result` has come from the last stage, and its driver does not have it yet."""

    talk: Talk
    result: StepResult


@contextlib.contextmanager
def suspended(lab: LabSwarm, request: GenerationRequest = PROMPT, *, after: int = 3) -> Iterator[Suspended]:
    """Inside the block an answer stands still behind its first few results; afterwards it goes on."""
    arrived: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    may_go_on, last, results = threading.Event(), lab.stage(-1).node, itertools.count()

    def watch(link: LabLink, message: Message) -> None:
        is_result = link.owner == lab.cluster.node and link.peer == last and isinstance(message, StepResult)
        if is_result and not may_go_on.is_set() and next(results) == after:
            arrived.put(message)
            may_go_on.wait(DEADLINE_S)

    with lab.network.watched(watch):
        talk = lab.start(request)
        try:
            yield Suspended(talk, arrived.get(timeout=DEADLINE_S))
        finally:
            may_go_on.set()


def deliver(lab: LabSwarm, link: Link, sender: Credentials, *messages: Message) -> None:
    """Send them over the sender's link to a node of the swarm; it has looked at all of them when this returns."""
    taken: list[Message] = []
    mark, is_marked = SessionClose(f"mark {next(_marks)}", []), threading.Event()

    def watch(end: LabLink, message: Message) -> None:
        if (end.owner, end.peer) == (link.peer, sender.identity.node_id):
            taken.append(message)
            if message == mark:
                is_marked.set()

    with lab.network.watched(watch):
        for message in (*messages, mark):
            link.send(message)
        assert is_marked.wait(DEADLINE_S), f"{len(taken)} of {len(messages)} messages were taken"
    assert taken == [*messages, mark]


def receive(link: Link, kind: type) -> Any:
    """The next message of that kind; commands that come between are left undone."""
    while True:
        message, _ = link.receive(20)
        if not isinstance(message, Command):
            assert isinstance(message, kind), message
            return message
