"""A coordinator among several, while it waits: it answers HTTP, frees its port to lead, and ends when asked to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardcompute.api.access.hosts import hosts_of
from shardcompute.cli.options.cluster import ClusterArguments, ServingArguments
from shardcompute.cli.serve.foreground import ClusterPlan, _api_url
from shardcompute.cli.serve.standby.candidate import run_candidate
from shardcompute.cli.serve.standby.server import StandbyAddress
from shardcompute.node import cluster as cluster_room
from shardcompute.node.cluster import ClusterOptions
from shardcompute.node.coordinator import shared
from shardcompute.node.coordinator.shared import Candidate, Leadership, register_candidate
from support.network.lab_links import wait_until
from support.swarm.fake_store import FakeStore

PREFIX = "/shardcompute/home/"
FIRST = "http://10.0.0.1:8000"


class Coordinator:
    """One that runs in a thread, and what befalls it."""

    def __init__(self, folder: Path, store: FakeStore) -> None:
        self.port: int = 0
        self.said: list[str] = []
        self.led: list[int] = []
        self.opened = 0
        self.end: Callable[[str], None] = lambda line: None
        self.is_listening = threading.Event()
        self._options = ClusterOptions(folder, port=7420, join_port=7421)

    def say(self, line: str, *_: object) -> None:
        self.said.append(line)
        self.end(line)

    def _open(self) -> Any:
        self.opened += 1

    def _listening(self, host: str, port: int) -> None:
        self.port = port
        self.is_listening.set()

    def _lead(self, checkpoint: object, leadership: Leadership, prepared: object) -> None:
        assert not any(thread.name == "standby API" for thread in threading.enumerate()), "the port is free"
        self.led.append(leadership.epoch)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, timeout=60)

    def run(self) -> None:
        address = StandbyAddress(
            "127.0.0.1", 0, hosts_of("127.0.0.1"), None, self._listening, lambda certificate: None
        )
        screen: Any = self
        run_candidate(self._options, "etcd://127.0.0.1", "native", self._open, self._lead, address, screen)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(shared, "EtcdClient", lambda address: store.client())
    monkeypatch.setattr(cluster_room, "prepare_model", lambda options, checkpoint, form: None)
    return store


@pytest.fixture
def leader(store: FakeStore) -> Leadership:
    register_candidate(store.client(), PREFIX, Candidate("n-first", "tcp://a:1", "a:2", FIRST))
    leadership = Leadership(store.client(), PREFIX, "n-first", ttl_s=3600.0)
    assert leadership.try_to_lead()
    return leadership


def test_it_answers_while_another_leads_and_then_leads(
    tmp_path: Path, store: FakeStore, leader: Leadership
) -> None:
    waiting = Coordinator(tmp_path, store)
    thread = threading.Thread(target=waiting.run)
    thread.start()
    try:
        assert waiting.is_listening.wait(60)
        told = waiting.get("/health")
        assert (told.status_code, told.json()["leader"]["url"]) == (503, FIRST)
        assert waiting.get("/cluster/state").json()["error"]["code"] == "not_leading"
        wait_until(lambda: any(key.startswith(f"{PREFIX}waiting/") for key in store.values), "it says so", 60)
        store.is_down = True
        wait_until(lambda: "store" in waiting.get("/health").json()["reason"], "that is told, too", 60)
        store.is_down = False
    finally:
        store.is_down = False
        leader.resign()
        thread.join(60)
    assert not thread.is_alive()
    assert waiting.led == [leader.epoch + 1]
    assert not any(key.startswith(f"{PREFIX}waiting/") for key in store.values)


def test_one_that_waits_ends_when_it_is_asked_to(
    tmp_path: Path, store: FakeStore, leader: Leadership
) -> None:
    waiting = Coordinator(tmp_path, store)

    def interrupt(line: str) -> None:
        if "takes over when it is gone" in line:
            raise KeyboardInterrupt

    waiting.end = interrupt
    waiting.run()
    assert (waiting.led, waiting.opened) == ([], 1)
    assert not any(key.startswith(f"{PREFIX}waiting/") for key in store.values)


@pytest.mark.parametrize(
    ("advertise", "url"),
    [
        (None, "http://127.0.0.1:8000"),
        ("home.example.org", "http://home.example.org:8000"),
        ("2001:db8::1", "http://[2001:db8::1]:8000"),
    ],
)
def test_where_others_say_that_its_api_is(advertise: str | None, url: str) -> None:
    plan = ClusterPlan(ServingArguments(), ClusterArguments(advertise=advertise), "native")
    assert _api_url(plan, None, "127.0.0.1", 8000) == url
