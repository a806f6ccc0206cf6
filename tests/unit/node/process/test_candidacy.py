"""A coordinator that waits to lead: what it says, when it begins, and whose cluster it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.node.cluster import ClusterOptions, find_authority
from shardcompute.node.coordinator.journal import bind_journal
from shardcompute.node.coordinator.shared import Candidate, CoordinatorList, SharedJournal
from shardcompute.node.process.candidacy import Candidacy
from support.swarm.fake_store import FakeStore

PREFIX = "/shardcompute/home/"


def options(folder: Path, port: int = 7420) -> ClusterOptions:
    return ClusterOptions(folder, host="0.0.0.0", port=port, join_port=port + 1, advertise="10.0.0.1")


class Time:
    """A clock of the store that moves when somebody pauses; what is to happen then happens."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses = 0
        self.then: dict[int, object] = {}

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses += 1
        assert self.pauses < 100, "it waits for ever"
        due = self.then.pop(self.pauses, None)
        if callable(due):
            due()


def test_one_waits_until_the_other_is_gone(tmp_path: Path) -> None:
    time = Time()
    store = FakeStore(time)
    first = Candidacy(options(tmp_path / "one"), store.client())
    said: list[str] = []
    with first.leading(said.append) as leader:
        authority = find_authority(tmp_path / "one")
        assert authority is not None
        bind_journal(SharedJournal(leader.store, PREFIX, leader), authority.fingerprint)
        shutil.copytree(tmp_path / "one" / "authority", tmp_path / "two" / "authority")
        second = Candidacy(options(tmp_path / "two", 7430), store.client())

        def lose_store() -> None:
            store.is_down = True

        def regain_store() -> None:
            store.is_down = False

        time.then = {2: lose_store, 4: regain_store, 6: leader.resign}
        with second.leading(said.append, time.pause) as next_leader:
            assert next_leader.epoch == leader.epoch + 1
    waits = f"{first.node} leads; this one takes over when it is gone"
    assert said == [waits, "waiting for the store: the store does not answer", waits]
    known = CoordinatorList(store.client(), PREFIX, Candidate("me", "tcp://10.0.0.9:1", "10.0.0.9:2"))
    assert known.refresh()
    assert not known.refresh()
    assert {each.join_address for each in known.all()} == {"10.0.0.9:2", "10.0.0.1:7421", "10.0.0.1:7431"}


def test_a_store_has_one_cluster_of_a_name(tmp_path: Path) -> None:
    store = FakeStore()
    with Candidacy(options(tmp_path / "one"), store.client()).leading(print) as leader:
        authority = find_authority(tmp_path / "one")
        assert authority is not None
        bind_journal(SharedJournal(leader.store, PREFIX, leader), authority.fingerprint)
    with pytest.raises(SourceError, match="whose authority is not on this machine"):
        Candidacy(options(tmp_path / "two"), store.client())
    assert find_authority(tmp_path / "two") is None, "no other cluster was begun"


def test_ports_that_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ports"):
        Candidacy(ClusterOptions(tmp_path, port=0), FakeStore().client())
