"""Several drivers beside each other use one chain: same tokens, and what befalls one of them harms no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardcompute.node.driver.standalone import StandaloneDriver
from shardcompute.wire import SegmentHeader, StepFrame, pack_ids
from support.models.requests import mixture
from support.swarm.lab import SPREAD, Alone, LabSwarm, Talk, swarm

STANDBYS = (2, 2, 2, 2, 2, 2)
"""Three stages, and a standby for each."""
THREE = (2, 2, 2)
STREAMING, TOKENS, ARRIVED = 3, 100, 5


def start_streams(lab: LabSwarm, alone: Alone, drivers: Sequence[StandaloneDriver | None]) -> list[Talk]:
    """The same requests, greedy and sampled, at several drivers (None: the coordinator's own), well under way."""
    talks = [
        lab.start(each, driver=driver) for driver in drivers for each in mixture(alone, STREAMING, TOKENS)
    ]
    lab.wait_until(
        lambda: all(len(talk.tokens) >= ARRIVED for talk in talks),
        lambda: f"tokens of all streams: {[len(talk.tokens) for talk in talks]}; {lab.describe()}",
    )
    return talks


def assert_undisturbed(alone: Alone, talks: Sequence[Talk]) -> None:
    for talk in talks:
        assert talk.result() == alone.answer(talk.request)


def sessions_of(lab: LabSwarm, driver: StandaloneDriver) -> list[int]:
    """How many of its sessions hold memory, on each worker."""
    return [
        sum(session >> 32 == driver.pool.session_namespace for session in runtime.session_lengths())
        for worker in lab.workers
        for runtime in worker.stages.shards().values()
    ]


def test_three_drivers_at_once(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a, b = lab.add_driver(), lab.add_driver()
        lab.wait_driving(a, b)
        epoch = lab.chain().epoch
        talks = start_streams(lab, alone, [None, a, b])
        assert_undisturbed(alone, talks)
        lab.wait_quiet()
        assert lab.chain().epoch == epoch, "nobody's coming gave the chain another shape"
        assert {node.role for node in lab.state.nodes.values()} == {"worker", "driver"}
        assert [model.name for model in a.pool.models()] == [lab.model]
        shares = {each.kv_tokens for each in lab.chain().drivers}
        assert shares == {lab.options.kv_tokens // 3}


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_worker_dies_while_several_drive(tmp_path: Path, tiny: Path, alone: Alone, stage: int) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        talks = start_streams(lab, alone, [None, a])
        lab.kill(lab.stage(stage))
        assert_undisturbed(alone, talks)
        lab.wait_driving(a)
        lab.wait_quiet()


def test_layers_are_cut_anew_while_several_drive(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(4, 4, 4), stages=3, placing=SPREAD) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        talks = start_streams(lab, alone, [None, a])
        lab.kill(lab.stage(0))
        assert_undisturbed(alone, talks)
        lab.wait_quiet()


@pytest.mark.parametrize("harm", ["killed", "frozen"])
def test_a_driver_dies(tmp_path: Path, tiny: Path, alone: Alone, harm: str) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a, b = lab.add_driver(), lab.add_driver()
        lab.wait_driving(a, b)
        epoch = lab.chain().epoch
        start_streams(lab, alone, [a])
        talks = start_streams(lab, alone, [None, b])
        assert all(sessions_of(lab, a))
        if harm == "killed":
            lab.kill_driver(a)
        else:
            lab.network.freeze(a.node)
        lab.wait_until(
            lambda: not any(sessions_of(lab, a)), lambda: f"its memory is freed: {sessions_of(lab, a)}"
        )
        lab.wait_driving(b)
        assert_undisturbed(alone, talks)
        assert lab.chain().epoch == epoch
        shares = {each.kv_tokens for each in lab.chain().drivers}
        assert shares == {lab.options.kv_tokens // 2}


def test_a_driver_is_started_again(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        former = lab.open_driver(tmp_path / "driver")
        lab.wait_driving(former)
        start_streams(lab, alone, [former])
        lab.kill_driver(former)
        driver = lab.open_driver(tmp_path / "driver")
        assert driver.node == former.node
        lab.wait_driving(driver)
        assert_undisturbed(alone, start_streams(lab, alone, [None, driver]))
        lab.wait_quiet()
        assert lab.chain().epoch == 1


def test_a_driver_and_a_worker_die_at_once(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3) as lab:
        a, b = lab.add_driver(), lab.add_driver()
        lab.wait_driving(a, b)
        start_streams(lab, alone, [a])
        talks = start_streams(lab, alone, [None, b])
        lab.kill_driver(a)
        lab.kill(lab.stage(1))
        assert_undisturbed(alone, talks)
        lab.wait_driving(b)
        lab.wait_quiet()


def test_a_frozen_driver_comes_back(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        talks = start_streams(lab, alone, [a])
        lab.network.freeze(a.node)
        lab.wait_driving()
        lab.network.thaw(a.node)
        assert_undisturbed(alone, talks)
        lab.wait_quiet()


def test_a_driver_joins_under_load(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        before = start_streams(lab, alone, [None])
        a = lab.add_driver()
        lab.wait_driving(a)
        assert not any(talk.is_over for talk in before)
        talks = start_streams(lab, alone, [a])
        assert_undisturbed(alone, [*before, *talks])
        lab.wait_quiet()
        assert lab.chain().epoch == 1
        assert len(lab.activations) == 1


@pytest.mark.parametrize("stage", [0, -1], ids=["to the first stage", "from the last"])
def test_a_drivers_link_is_cut(tmp_path: Path, tiny: Path, alone: Alone, stage: int) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        talks = start_streams(lab, alone, [None, a])
        lab.cut(a.node, lab.stage(stage).node)
        assert_undisturbed(alone, talks)
        lab.wait_driving(a)
        lab.wait_quiet()
        assert lab.chain().epoch == 1, "for the others nothing happened"


def test_drivers_go_on_without_the_coordinator(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        talks = start_streams(lab, alone, [a])
        lab.kill_cluster()
        assert_undisturbed(alone, talks)
        later = start_streams(lab, alone, [a])
        lab.open_cluster()
        lab.serve()
        assert_undisturbed(alone, later)
        lab.wait_driving(a)
        assert_undisturbed(alone, start_streams(lab, alone, [None, a]))


def test_drivers_go_on_while_the_coordinator_opens_its_models(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        talks = start_streams(lab, alone, [a])
        for label in "abc":
            lab.cluster.access.create_key(label)
        before = lab.state.nodes[a.node].incarnation
        lab.kill_cluster()
        lab.open_cluster()
        lab.wait_until(lambda: lab.state.nodes[a.node].incarnation > before, "it has registered again")
        key = lab.cluster.access.create_key("d")
        lab.wait_until(lambda: a.find_key(key), "it has heard what the new coordinator has to say")
        assert [model.name for model in a.pool.models()] == [lab.model]
        lab.serve()
        assert_undisturbed(alone, talks)
        lab.wait_driving(a)
        assert_undisturbed(alone, start_streams(lab, alone, [None, a]))


def test_memory_is_shared(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """Each driver has more to do than its share holds; none takes what is another's."""
    with swarm(tmp_path, tiny, layers=THREE, stages=3, kv_tokens=768) as lab:
        a = lab.add_driver()
        lab.wait_driving(a)
        requests = mixture(alone, 8, 100)
        talks = [lab.start(each, driver=driver) for each in requests for driver in (None, a)]
        assert_undisturbed(alone, talks)
        lab.wait_quiet()


def test_strangers_are_not_heard(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        a, b = lab.add_driver(), lab.add_driver()
        lab.wait_driving(a, b)
        first, chain = lab.stage(0), lab.chain()

        def frame(session: int) -> StepFrame:
            segment = SegmentHeader(session, 0, 1, 0, pack_ids([1]))
            return StepFrame(chain.id, chain.epoch, 1 << 40, [segment], 1, 0, "", replay=True)

        first.stages.take(frame((b.pool.session_namespace << 32) + 7), memoryview(b""), a.node)
        first.stages.take(frame((1 << 62) + 7), memoryview(b""), a.node)
        first.stages.take(frame((a.pool.session_namespace << 32) + 7), memoryview(b""), lab.stage(1).node)
        first.stages.take(frame((a.pool.session_namespace << 32) + 8), memoryview(b""), a.node)
        lab.wait_until(lambda: any(sessions_of(lab, a)), "its own is taken, after all the others were not")
        assert first.sessions() == 1
