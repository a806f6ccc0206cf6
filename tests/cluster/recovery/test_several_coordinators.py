"""Several coordinators share a store: one leads, another takes over, and answers elsewhere go on."""

from __future__ import annotations

from pathlib import Path

from support.models.requests import mixture
from support.swarm.fake_store import FakeStore
from support.swarm.lab import Alone, LabSwarm, Talk, swarm


def start_streams(
    lab: LabSwarm, alone: Alone, count: int = 3, tokens: int = 300, **where: object
) -> list[Talk]:
    talks = [lab.start(request, **where) for request in mixture(alone, count, tokens)]  # type: ignore[arg-type]
    lab.wait_until(lambda: all(talk.tokens for talk in talks), "tokens of all streams")
    return talks


def test_another_coordinator_takes_over_and_everybody_follows(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3), stages=2, store=FakeStore()) as lab:
        key, first = lab.cluster.access.create_key("made by the first"), lab.cluster.node
        driver = lab.add_driver()
        lab.wait_driving(driver)
        other = lab.add_candidate()
        urls = {lab.cluster.url, f"tcp://127.0.0.1:{other.port}"}
        nodes = (*lab.workers, driver)
        lab.wait_until(lambda: all(set(each._control._urls) == urls for each in nodes), "all know both")
        loads = [list(worker.loads) for worker in lab.workers]
        talks = start_streams(lab, alone, driver=driver)
        lab.kill_cluster()
        lab.options = other
        lab.open_cluster()
        lab.serve()
        lab.wait_serving(stages=2)
        assert lab.cluster.node != first
        assert [list(worker.loads) for worker in lab.workers] == loads, "nothing was loaded again"
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        assert lab.cluster.access.find_key(key) is not None
        for talk in start_streams(lab, alone):
            assert talk.result() == alone.answer(talk.request)
        lab.wait_driving(driver)
        lab.wait_quiet()


def test_a_leader_without_its_store_changes_nothing_and_goes_on_afterwards(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    store = FakeStore()
    with swarm(tmp_path, tiny, layers=(3, 3, 3), stages=2, standbys=1, store=store) as lab:
        talks = start_streams(lab, alone)
        epoch, victim = lab.chain().epoch, lab.stage(1)
        store.is_down = True
        lab.wait_until(lambda: not lab.cluster.coordinator.may_act, "its lease is over")
        for talk in talks:
            assert talk.result() == alone.answer(talk.request)
        lab.wait_until(lambda: lab.cluster.coordinator._is_apart, "nodes may look for another")
        [warning] = lab.cluster.record_status.warnings
        assert "answers go on, and changes of the cluster wait" in warning
        lab.kill(victim)
        lab.wait_real_time(0.5)
        assert lab.chain().epoch == epoch, "it is not replaced meanwhile"
        store.is_down = False
        lab.wait_until(lambda: lab.chain().epoch > epoch, "it is replaced now")
        lab.wait_serving(stages=2)
        lab.wait_until(lambda: lab.cluster.record_status.warnings == (), "all is on record")
        for talk in start_streams(lab, alone):
            assert talk.result() == alone.answer(talk.request)


def test_a_leader_that_is_cut_off_from_the_store_gives_way(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3), stages=2, store=FakeStore()) as lab:
        other = lab.add_candidate()
        former, client, keeper = lab.cluster, lab.client, lab.keeper
        nodes = tuple(lab.workers)
        lab.wait_until(lambda: all(len(each._control._urls) == 2 for each in nodes), "all know both")
        client.is_cut_off = True
        lab.options = other
        lab.open_cluster()
        lab.serve()
        lab.wait_serving(stages=2)
        for talk in start_streams(lab, alone):
            assert talk.result() == alone.answer(talk.request)
        assert not former.coordinator.may_act
        client.is_cut_off = False
        assert former.leadership is not None
        leadership = former.leadership
        lab.wait_until(lambda: leadership.is_deposed, "it has heard that another leads")
        keeper.close()
        former.close()
        assert lab.ask(start_streams(lab, alone, count=1)[0].request) is not None
