"""A worker that holds the whole model, on a device that computes by itself, goes on from what it picks: same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcompute.node.worker import shard_loader
from shardcompute.wire import Message, StepFrame
from shardcompute.wire.messages import ID_BYTES
from support.models.deferred import DeferredExecutor
from support.models.requests import mixture
from support.network.lab_links import LabLink
from support.swarm.lab import Alone, LabSwarm, swarm

_PICKED = b"\xff" * ID_BYTES


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeferredExecutor]]:
    opened: list[DeferredExecutor] = []
    open_shard = shard_loader.open_remote_shard

    def open_device(*args: Any, **options: Any) -> DeferredExecutor:
        opened.append(DeferredExecutor(open_shard(*args, **options)))
        return opened[-1]

    monkeypatch.setattr(shard_loader, "open_remote_shard", open_device)
    return opened


class Continued:
    """Counts rows that a worker was to go on with by itself."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, link: LabLink, message: Message) -> None:
        if isinstance(message, StepFrame):
            self.rows += sum(segment.ids.startswith(_PICKED) for segment in message.segments)


def assert_same(lab: LabSwarm, alone: Alone, count: int, tokens: int) -> None:
    talks = [lab.start(request) for request in mixture(alone, count, tokens)]
    for talk in talks:
        assert talk.result() == alone.answer(talk.request)
    lab.wait_quiet()


def test_steps_overlap_and_nobody_can_tell(
    tmp_path: Path, tiny: Path, alone: Alone, devices: list[DeferredExecutor]
) -> None:
    with swarm(tmp_path, tiny, layers=(6,), stages=1) as lab:
        continued = Continued()
        with lab.network.watched(continued):
            assert_same(lab, alone, 8, 30)
        assert continued.rows > 30


def test_a_device_that_is_lost_while_steps_overlap(
    tmp_path: Path, tiny: Path, alone: Alone, devices: list[DeferredExecutor]
) -> None:
    with swarm(tmp_path, tiny, layers=(6, 6), stages=1, standbys=1) as lab:
        talks = [lab.start(request) for request in mixture(alone, 4, 120)]
        lab.wait_until(
            lambda: all(len(talk.tokens) >= 5 for talk in talks),
            lambda: str([(len(t.tokens), t.is_over, t.error) for t in talks]),
        )
        lab.kill(lab.stage(0))
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        lab.wait_quiet()


def test_little_memory(tmp_path: Path, tiny: Path, alone: Alone, devices: list[DeferredExecutor]) -> None:
    with swarm(tmp_path, tiny, layers=(6,), stages=1, kv_tokens=512) as lab:
        assert_same(lab, alone, 12, 40)
