"""Searches in the background: what they find becomes an event, and what nobody needs any more is dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcompute.control import ClusterState, Event, apply
from shardcompute.control.actions import SearchLayout
from shardcompute.control.events import LayoutFound, LinkBroken
from shardcompute.node.coordinator.coordinator_port import Task
from shardcompute.node.coordinator.layout_search import LayoutSearch
from support.swarm.noisy_cluster import Machine, NoisyCluster


@dataclass
class Desk:
    """A coordinator whose background runs when the test says so."""

    state: ClusterState
    waiting: list[Task] = field(default_factory=list)
    posted: list[Event] = field(default_factory=list)
    has_stood_down: bool = False
    may_act: bool = True

    def now_s(self) -> float:
        return 500.0

    def apply(self, event: Event) -> None:
        self.state = apply(self.state, event)

    def post(self, event: Event) -> None:
        self.posted.append(event)

    def later(self, task: Task) -> None:
        task()

    def after(self, delay_s: float, task: Task) -> None:
        task()

    def background(self, task: Task) -> None:
        self.waiting.append(task)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def desk_of(count: int) -> tuple[Desk, SearchLayout]:
    names = [f"n{number}" for number in range(count)]
    cluster = NoisyCluster({name: Machine() for name in names}, noise=0.0)
    cluster.request()
    cluster.run(10)
    [chain] = cluster.state.live_chains()
    return Desk(cluster.state), SearchLayout(chain.id, chain.epoch)


def test_what_is_found_is_an_event() -> None:
    desk, action = desk_of(7)
    search = LayoutSearch(desk, sleep=lambda _: None)
    search.start(action)
    assert desk.posted == [], "not in the coordinator's thread"
    desk.run()
    [found] = desk.posted
    assert isinstance(found, LayoutFound)
    desk.apply(found)
    chain = desk.state.chains[action.chain]
    assert chain.found == found.stages != ()
    assert chain.search_at_s == 500.0 + desk.state.placing.search_every_s


def test_a_search_for_a_state_that_is_no_more_is_dropped() -> None:
    desk, action = desk_of(7)
    search = LayoutSearch(desk, sleep=lambda _: None)
    search.start(action)
    first = desk.state.chains[action.chain].nodes[0]
    desk.apply(LinkBroken(desk.state.driver, first, 100.0))
    desk.run()
    assert desk.posted == []
    search.start(SearchLayout(action.chain, action.epoch + 1))
    assert desk.waiting == []


def test_a_search_has_a_deadline_and_gives_way() -> None:
    desk, action = desk_of(7)
    pauses: list[float] = []
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        pauses.append(seconds)
        now_s += 1.0

    LayoutSearch(desk, deadline_s=3.0, sleep=sleep, clock=lambda: now_s).start(action)
    desk.run()
    assert 0 < len(pauses) <= 3
    assert len(desk.posted) == 1
