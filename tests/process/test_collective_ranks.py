"""Ranks as processes: one is killed or stands still in the middle of sums, and the others go on without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
MANY = 10_000_000


class RankProcess:
    def __init__(self, node: str) -> None:
        self.node = node
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.swarm.collective_rank", node],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )
        self.url = self.read()["url"]

    def tell(self, **content: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(content) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def four() -> Iterator[list[RankProcess]]:
    with ExitStack() as stack:
        started = []
        for index in range(4):
            started.append(RankProcess(f"n{index}"))
            stack.callback(started[-1].end)
        yield started


def form(ranks: Sequence[RankProcess], epoch: int) -> None:
    nodes, urls = [each.node for each in ranks], [each.url for each in ranks]
    for rank, each in enumerate(ranks):
        each.tell(do="form", epoch=epoch, rank=rank, nodes=nodes, urls=urls)
    assert [each.read() for each in ranks] == [{"epoch": epoch}] * len(ranks)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_are_told_and_form_a_new_epoch(four: list[RankProcess], how: signal.Signals) -> None:
    ranks, spare = four[:3], four[3]
    form(ranks, 1)
    for each in ranks:
        each.tell(do="add", times=MANY)
    assert [each.read() for each in ranks] == [{"is_adding": True}] * 3

    os.kill(ranks[1].process.pid, how)

    left = [ranks[0], ranks[2]]
    told = [each.read() for each in left]
    assert all("all_reduce" in each["error"] for each in told)
    assert 1 in [each["rank"] for each in told]
    # The time-out of three seconds, and room for a machine that does other things.
    assert all(each["waited_s"] < 20 for each in told)
    form([ranks[0], spare, ranks[2]], 2)
    for each in (ranks[0], spare, ranks[2]):
        each.tell(do="add", times=3)
    assert [(each.read(), each.read())[1] for each in (ranks[0], spare, ranks[2])] == [{"total": 111.0}] * 3
