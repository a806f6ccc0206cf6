"""A swarm under attack: the tests' own, small and quick, with one member that has good papers and bad manners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardcompute.core.generation import GenerationRequest, TokenChoice
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Credentials, Role
from shardcompute.wire import Link
from shardcompute.wire.control import Command
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import LabSwarm, swarm

PROMPT = GenerationRequest(tuple(b"Once upon a time"), 24)
BAD_JSON = {
    "nothing": b"",
    "bytes": b"\xff\xfe\xfd",
    "another event": b'{"type":"King"}',
    "no event": b"[1,2,3]",
    "deep": b'{"type":' + b"[" * 100_000,
    "text": b'{"type":"NodeDrained","node":"\xff"}',
}


class Siege:
    """The swarm, what it answers, and its bad member."""

    def __init__(self, lab: LabSwarm) -> None:
        self.lab = lab
        self.expected: tuple[TokenChoice, ...] = lab.ask(PROMPT).tokens
        self.member: Credentials = join_cluster(lab._token, lab.folder / "member", Role.WORKER)[0]

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


def receive(link: Link, kind: type) -> Any:
    """The next message of that kind; commands that come between are left undone."""
    while True:
        message, _ = link.receive(20)
        if not isinstance(message, Command):
            assert isinstance(message, kind), message
            return message
