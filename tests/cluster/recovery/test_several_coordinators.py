"""Several coordinators share a store: one leads, another takes over, and answers elsewhere go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shardcompute.api.access.metering import KeyMeter
from shardcompute.api.errors import RequestError
from shardcompute.node.cluster import Cluster
from shardcompute.security import KeyLimits
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
        assert [(each.node == first, each.status) for each in lab.cluster.coordinators()] == [
            (True, "leads"),
            (False, "away"),
        ]
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


def spend(cluster: Cluster, key: str, tokens: int) -> int:
    """An answer to a prompt of one token, at the coordinator's own API; all tokens that it took."""

    async def run() -> int:
        meter, caller = KeyMeter(cluster.quota), cluster.access.find_key(key)
        assert caller is not None
        await meter.admit(caller)
        hold = await meter.hold(caller, 1, tokens - 1)
        hold.settle(hold.prompt + hold.answer)
        return hold.prompt + hold.answer

    return asyncio.run(run())


def test_what_a_key_used_at_the_first_is_used_at_the_second(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=(), store=FakeStore()) as lab:
        daily = lab.cluster.access.create_key("daily", limits=KeyLimits(tokens_per_day=300))
        hasty = lab.cluster.access.create_key("hasty", limits=KeyLimits(requests_per_minute=2))
        free = lab.cluster.access.create_key("free", limits=KeyLimits(tokens_per_day=300))
        other = lab.add_candidate()
        assert spend(lab.cluster, daily, 400) == 300
        assert [spend(lab.cluster, hasty, 5) for _ in range(2)] == [5, 5]
        assert spend(lab.cluster, free, 100) == 100
        lab.cluster.quota.flush()  # as happens every two seconds
        lab.client.is_cut_off = True  # whatever is done from now on leaves no trace
        lab.kill_cluster()
        lab.options = other
        lab.open_cluster()
        with pytest.raises(RequestError, match="0 of the 300 tokens"):
            spend(lab.cluster, daily, 2)
        with pytest.raises(RequestError, match="2 requests"):
            spend(lab.cluster, hasty, 2)
        assert spend(lab.cluster, free, 400) == 200, "what is left, and no more"
