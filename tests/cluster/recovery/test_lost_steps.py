"""Steps whose results do not come: lost on the way, swallowed by a stage that hangs, late or told twice. Clients get
the undisturbed tokens all the same, and a machine that is only slow is left in peace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.node.rpc.step_times import Patience
from shardcompute.wire import Message, StepFrame, StepResult
from shardcompute.wire.control import CommandReply
from support.models.requests import mixture
from support.network.lab_links import LabLink
from support.swarm.lab import Alone, LabSwarm, LabWorker, Talk, swarm

STANDBYS = (2, 2, 2, 2, 2, 2)
HASTY = Patience(floor_s=0.5, factor=30.0, cold_s=5.0)
"""Of stages that count as stuck much sooner than they do."""
TOKENS, ARRIVED = 60, 5
Matches = Callable[[LabLink, Message], bool]


class Tampering:
    """Delivers the first messages that match so many `times`, up to `most` of them."""

    def __init__(self, matches: Matches, times: int = 0, most: int = 1) -> None:
        self._matches = matches
        self._times = times
        self._left = most
        self._lock = threading.Lock()
        self.hits = 0

    def __call__(self, link: LabLink, message: Message) -> int:
        with self._lock:
            if self._left == 0 or not self._matches(link, message):
                return 1
            self._left -= 1
            self.hits += 1
            return self._times


class StuckStep:
    """The next step of a worker's shard does not return before it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.let_go.wait(60)


@contextmanager
def stuck_step(worker: LabWorker) -> Iterator[StuckStep]:
    [runtime] = worker.stages.shards().values()
    stuck, begin = StuckStep(), runtime.begin

    def hang(*args: Any) -> Any:
        runtime.begin = begin  # type: ignore[method-assign]
        stuck.wait()
        return begin(*args)

    runtime.begin = hang  # type: ignore[method-assign]
    try:
        yield stuck
    finally:
        stuck.let_go.set()


def start(lab: LabSwarm, alone: Alone, count: int = 2, tokens: int = TOKENS) -> list[Talk]:
    talks = [lab.start(request) for request in mixture(alone, count, tokens)]
    lab.wait_until(lambda: all(len(talk.tokens) >= ARRIVED for talk in talks), "tokens of all streams")
    return talks


def assert_undisturbed(lab: LabSwarm, alone: Alone, talks: list[Talk]) -> None:
    for talk in talks:
        assert talk.result() == alone.answer(talk.request)
    lab.wait_quiet()


def result(link: LabLink, message: Message) -> bool:
    return isinstance(message, StepResult)


def activations(link: LabLink, message: Message) -> bool:
    return isinstance(message, StepFrame) and message.width > 0 and not message.replay


def frame_of_driver(link: LabLink, message: Message) -> bool:
    return isinstance(message, StepFrame) and message.width == 0


@pytest.mark.parametrize("lost", [result, activations, frame_of_driver])
def test_one_message_is_lost(tmp_path: Path, tiny: Path, alone: Alone, lost: Matches) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start(lab, alone)
        before = lab.chain().stages
        with lab.network.tampered(tampering := Tampering(lost)):
            lab.wait_until(lambda: tampering.hits == 1, "the loss")
            assert_undisturbed(lab, alone, talks)
        assert lab.chain().stages == before, "nobody is to blame"
        assert len(lab.activations) == 2
        assert not any(node.refusals for node in lab.state.nodes.values())


def test_a_stage_that_hangs_inside_a_step_is_replaced(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3, patience=HASTY) as lab:
        talks = start(lab, alone)
        victim = lab.stage(1)
        with stuck_step(victim) as stuck:
            assert stuck.entered.wait(20)
            assert_undisturbed(lab, alone, talks)
            assert victim.node not in lab.chain().nodes
            node = lab.state.nodes[victim.node]
            assert node.status == "ready", "its heartbeats go on"
            assert ["stuck" in refusal.reason for refusal in node.refusals] == [True]


def test_a_machine_that_is_slow_is_left_in_peace(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """It is asked, says that it computes, and is waited for."""
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        talks = start(lab, alone)
        victim, before = lab.stage(1), lab.chain()
        asked = threading.Event()

        def watch(link: LabLink, message: Message) -> None:
            if isinstance(message, CommandReply) and b'"computing"' in message.result:
                asked.set()

        with lab.network.watched(watch), stuck_step(victim) as stuck:
            assert stuck.entered.wait(20)
            assert asked.wait(20)
        assert_undisturbed(lab, alone, talks)
        assert (lab.chain().epoch, lab.chain().stages) == (before.epoch, before.stages)


def test_results_that_are_told_twice(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        tampering = Tampering(lambda *at: result(*at) or activations(*at), times=2, most=1000)
        with lab.network.tampered(tampering):
            assert_undisturbed(lab, alone, start(lab, alone))
        assert tampering.hits > TOKENS
        assert len(lab.activations) == 1


def test_results_that_come_after_the_epoch(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """What was lost and recovered turns up at last."""
    kept: list[StepResult] = []

    def keep(link: LabLink, message: Message) -> bool:
        if isinstance(message, StepResult) and not kept:
            kept.append(message)
            return True
        return False

    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start(lab, alone)
        with lab.network.tampered(Tampering(keep)):
            lab.wait_until(lambda: len(lab.activations) == 2, "another epoch")
            lab.network.send(lab.stage(-1).node, lab.cluster.node, "stage", kept[0])
            assert_undisturbed(lab, alone, talks)


def test_a_part_of_a_prompt_is_lost(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """The next part finds that rows are missing: no fault of whoever asked."""
    long = max(mixture(alone, 6, 10), key=lambda request: len(request.prompt))
    request = replace(long, prompt=(long.prompt * (400 // len(long.prompt) + 1))[:400])

    def first_part(link: LabLink, message: Message) -> bool:
        return activations(link, message) and isinstance(message, StepFrame) and bool(message.opens)

    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        # Beside somebody who is being answered a prompt goes in parts, several of them on the way at once.
        talks = start(lab, alone, tokens=400)
        with lab.network.tampered(tampering := Tampering(first_part)):
            talks.append(lab.start(request))
            lab.wait_until(lambda: tampering.hits == 1, "the loss")
            assert_undisturbed(lab, alone, talks)


def test_a_replay_is_lost(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """A new stage was not told all: the sessions that it lacks are computed again."""

    def replayed(link: LabLink, message: Message) -> bool:
        return isinstance(message, StepFrame) and message.replay

    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        talks = start(lab, alone)
        with lab.network.tampered(tampering := Tampering(replayed)):
            lab.kill(lab.stage(1))
            assert_undisturbed(lab, alone, talks)
        assert tampering.hits == 1


def test_a_driver_on_another_machine_misses_a_result(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        driver = lab.add_driver()
        lab.wait_driving(driver)
        [request] = mixture(alone, 1, TOKENS)
        talk = lab.start(request, driver=driver)
        lab.wait_until(lambda: len(talk.tokens) >= ARRIVED, "tokens")

        def to_driver(link: LabLink, message: Message) -> bool:
            return link.owner == driver.node and result(link, message)

        with lab.network.tampered(tampering := Tampering(to_driver)):
            lab.wait_until(lambda: tampering.hits == 1, "the loss")
            assert talk.result() == alone.answer(request)
        assert len(lab.activations) == 1, "the others were not disturbed"


def test_a_driver_on_a_worker_misses_a_result(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, home_rtt_s=0.05) as lab:
        host = lab.wait_hosted()
        [request] = mixture(alone, 1, TOKENS)
        talk = lab.start(request)
        lab.wait_until(lambda: len(talk.tokens) >= ARRIVED, "tokens")

        def to_host(link: LabLink, message: Message) -> bool:
            return link.owner == host.node and result(link, message)

        with lab.network.tampered(tampering := Tampering(to_host)):
            lab.wait_until(lambda: tampering.hits == 1, "the loss")
            assert talk.result() == alone.answer(request)
