"""The coordinator dies and comes back from its folder: workers wait for it with what they hold."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcompute.control import ClusterState, apply, decode_event, encode_event, next_actions
from shardcompute.control.actions import Record
from shardcompute.control.events import (
    ChainFenced,
    CoordinatorStarted,
    Event,
    ModelRequested,
    NodeDrained,
    NodeJoined,
    NodeLost,
    ShardLoaded,
)
from shardcompute.control.state import covers
from shardcompute.core.errors import CapacityError, ShardComputeError
from shardcompute.node.coordinator.journal import Journal
from support.models.plain_model import plain_model
from support.models.requests import greedy, mixture, prompts
from support.swarm.lab import Alone, LabSwarm, Talk, swarm


def start_streams(lab: LabSwarm, alone: Alone, count: int = 4, tokens: int = 60) -> list[Talk]:
    talks = [lab.start(request) for request in mixture(alone, count, tokens)]
    lab.wait_until(lambda: all(talk.tokens for talk in talks), "tokens of all streams")
    return talks


def assert_served(lab: LabSwarm, alone: Alone) -> None:
    for talk in start_streams(lab, alone):
        assert talk.result() == alone.answer(talk.request)
    lab.wait_quiet()


def test_workers_attach_again_without_loading_anything(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone, tokens=400)
        chain, standbys = lab.chain(), lab.ready_standbys(lab.chain())
        loads = {worker.node: list(worker.loads) for worker in lab.workers}
        for _ in range(2):
            lab.kill_cluster()
            lab.open_cluster()
            lab.serve()
            lab.wait_serving(stages=3, standbys=1)
            assert_served(lab, alone)
        for talk in talks:  # these ended with the process that they were in
            with pytest.raises(ShardComputeError):
                talk.result()
        assert lab.chain().id == chain.id
        assert lab.chain().stages == chain.stages
        assert lab.ready_standbys(lab.chain()) == standbys
        assert {worker.node: worker.loads for worker in lab.workers} == loads


def test_workers_that_are_back_before_the_model_is(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """One has forgotten its shard, too: nobody asks for weights that are not there yet."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        victim = lab.stage(1)
        lab.kill_cluster()
        lab.kill(victim)
        lab.open_cluster()
        lab.revive(victim)
        lab.wait_until(lambda: all(node.status == "ready" for node in lab.state.nodes.values()), lab.describe)
        turns = threading.Event()
        lab.cluster.coordinator.listen(lambda _: turns.set())
        lab.wait_until(turns.is_set, "the coordinator goes on")
        lab.serve()
        lab.wait_serving(stages=3)
        assert_served(lab, alone)
        assert not any(node.refusals for node in lab.state.nodes.values())


def test_a_worker_that_died_meanwhile_is_replaced(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2, 2, 2), stages=3, standbys=3) as lab:
        victim = lab.stage(1)
        lab.kill_cluster()
        lab.kill(victim)
        lab.open_cluster()
        lab.serve()
        lab.wait_until(lambda: lab.state.nodes[victim.node].status == "lost", "it is missed")
        lab.wait_serving(stages=3, standbys=2)
        assert_served(lab, alone)
        assert sorted(len(worker.loads) for worker in lab.workers)[:4] == [1, 1, 1, 1]


def test_a_restart_in_the_middle_of_loading(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        lab.kill(lab.stage(0))
        lab.add_worker(2)
        lab.kill_cluster()
        lab.open_cluster()
        lab.serve()
        lab.wait_serving(stages=3)
        assert_served(lab, alone)


def test_papers_are_good_for_the_next_life(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=()) as lab:
        key = lab.cluster.access.create_key("for the tests")
        tokens = {summary.token_id for summary in lab.cluster.access.tokens()}
        outcast = lab.add_worker(2)
        lab.wait_until(lambda: outcast.node in lab.state.nodes, "it is here")
        lab.cluster.revoke_node(outcast.node)
        lab.wait_until(lambda: bool(outcast.refusal), "it was told")
        lab.kill_cluster()
        lab.open_cluster()
        found = lab.cluster.access.find_key(key)
        assert found is not None
        assert found.label == "for the tests"
        assert tokens < {summary.token_id for summary in lab.cluster.access.tokens()}
        with pytest.raises(ShardComputeError):
            lab.revive(outcast)


def test_a_coordinator_that_stood_still_gives_nobody_up(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """Its machine slept: the others were there all the time."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start_streams(lab, alone, tokens=200)
        awake = threading.Event()
        lab.network.freeze(lab.cluster.node)
        lab.cluster.coordinator.later(lambda: awake.wait() and None)
        health = lab.state.health
        lab.wait_real_time(health.lost_after_s + 0.5)
        awake.set()
        lab.network.thaw(lab.cluster.node)
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        lab.wait_quiet()
        assert len(lab.activations) == 1
        assert all(node.incarnation == 1 for node in lab.state.nodes.values())


def test_without_workers_it_comes_back_and_says_so(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=()) as lab:
        lab.serve()
        lab.wait_until(lambda: tiny.name in lab.state.models, "the model is known")
        lab.kill_cluster()
        lab.open_cluster()
        assert tiny.name in lab.state.models
        lab.serve()
        with pytest.raises(CapacityError):
            lab.ask(greedy(prompts(alone.service.tokenizer)[0]))


# The journal


MODEL = plain_model()


def written_history(write: Callable[[Event], None]) -> None:
    """A cluster's life: everything the coordinator would have written down."""
    state, now_s = ClusterState(), 0.0

    def happen(event: Event) -> None:
        nonlocal state
        write(event)
        state = apply(state, event)

    happen(CoordinatorStarted(now_s))
    happen(ModelRequested(MODEL, 1))
    for number in range(40):
        now_s += 1.0
        node = f"node-{number % 5}"
        known = state.nodes.get(node)
        happen(
            NodeJoined(
                node=node,
                name=node,
                role="worker",
                address=f"tcp://{node}:1",
                device="cpu",
                memory_bytes=450,
                threads=1,
                version="1",
                incarnation=1 if known is None else known.incarnation + 1,
                now_s=now_s,
                seconds_per_byte=1e-9,
            )
        )
        if number % 7 == 6:
            happen(NodeLost(node, state.nodes[node].incarnation, "silent", now_s))
        if number % 11 == 10:
            happen(NodeDrained(node))
        for action in next_actions(state, now_s):
            if isinstance(action, Record):
                happen(action.event)
        for chain in state.live_chains():
            happen(ChainFenced(chain.id, chain.epoch_to_fence))
            for stage in chain.stages:
                life = state.nodes[stage.node].incarnation
                happen(ShardLoaded(stage.node, life, chain.id, "m", stage.start, stage.stop, 100))


def files_of(journal: Path) -> list[Path]:
    return [path for path in (journal, journal.with_name(f"{journal.name}-wal")) if path.exists()]


def replayed(journal: Path) -> tuple[list[bytes], ClusterState]:
    opened = Journal(journal)
    try:
        lines = list(opened.events())
    finally:
        opened.close()
    state = ClusterState()
    for line in lines:
        state = apply(state, decode_event(line))
    return lines, state


def snapshot(journal: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in files_of(journal):
        shutil.copy(path, folder / path.name)
    return folder / journal.name


def test_a_journal_survives_a_kill_between_any_two_writes(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    history: list[bytes] = []
    shots: list[tuple[int, Path]] = []

    def write(event: Event) -> None:
        history.append(encode_event(event))
        journal.append(history[-1])
        if len(history) % 4 == 1:
            shots.append((len(history), snapshot(path, tmp_path / f"shot-{len(history)}")))

    written_history(write)
    assert len(shots) > 20
    for count, shot in shots:
        lines, _ = replayed(shot)
        assert lines == history[:count], "what was written is there"
    journal.close()


def test_a_torn_write_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Half of the history lies in the database, the rest in its log, which ends anywhere."""
    path = tmp_path / "journal.sqlite"
    history: list[bytes] = []
    written_history(lambda event: history.append(encode_event(event)))
    half = len(history) // 2
    for lines in (history[:half], history[half:]):
        journal = Journal(path)
        for line in lines:
            journal.append(line)
        if lines[0] == history[0]:
            journal.close()
    _main, log = files_of(path)
    whole = log.read_bytes()
    random_ = random.Random(2)
    lengths = {random_.randrange(len(whole) + 1) for _ in range(40)} | {0, 1, 31, 32, len(whole) - 1}
    counts = set()
    for length in sorted(lengths):
        torn = snapshot(path, tmp_path / f"torn-{length}")
        torn.with_name(log.name).write_bytes(whole[:length])
        lines, state = replayed(torn)
        assert lines == history[: len(lines)]
        assert len(lines) >= half
        counts.add(len(lines))
        for chain in state.live_chains():
            assert covers(chain.stages, MODEL.layer_count)
        # And it goes on from there.
        opened = Journal(torn)
        opened.append(history[0])
        opened.close()
        assert replayed(torn)[0] == [*lines, history[0]]
    assert len(counts) > 10, "the cuts were at different places"
    journal.close()


def test_a_kill_while_the_log_is_put_into_the_database(tmp_path: Path) -> None:
    """Some pages are new, others old; the log is still whole."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    history: list[bytes] = []
    written_history(lambda event: history.append(encode_event(event)))
    for line in history:
        journal.append(line)
    before = snapshot(path, tmp_path / "before")
    journal.close()
    page, old, new = 4096, before.read_bytes(), path.read_bytes()
    random_ = random.Random(3)
    for number in range(20):
        mixed = bytearray(old.ljust(len(new), b"\0"))
        for start in range(0, len(new), page):
            if random_.random() < number / 20:
                mixed[start : start + page] = new[start : start + page]
        shot = snapshot(before, tmp_path / f"mixed-{number}")
        shot.write_bytes(mixed)
        assert replayed(shot)[0] == history
