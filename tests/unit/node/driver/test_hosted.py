"""Generations that another node's driver computes: handed over, answered in order, taken back, taken over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec
import pytest

from shardcompute.core.errors import LinkError, PromptTooLongError, QueueFullError, UsageError
from shardcompute.core.generation import GenerationRequest, Sampling, Speculation, TokenChoice
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.hosted_client import HostedDriverClient, HostedDrivers, ResumableGeneration
from shardcompute.node.driver.hosted_server import HostedDriverServer
from shardcompute.node.driver.limits import DriverLoad
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocLink, InprocTransport, Ping, StageTiming
from shardcompute.wire.generations import Generate, unpack_delta, unpack_request
from support.network.lab_links import wait_until
from support.swarm.fake_chain import Caller, FakeChain, ask, connected, continuation, make_driver

CHAIN = "m#1"
HOST = Hello(VERSION_MIN, VERSION_MAX, "host", "", "home")
COORDINATOR = Hello(VERSION_MIN, VERSION_MAX, "coordinator", "generations", "home")


@dataclass
class Hosting:
    """A host with one chain, the coordinator's view of it, and its own driver for the same chain."""

    drivers: HostedDrivers
    host: Driver
    there: FakeChain
    own: Driver
    here: FakeChain
    links: list[InprocLink] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    hosted: dict[str, Driver] = field(default_factory=dict)
    servers: list[HostedDriverServer] = field(default_factory=list)

    def start(self, request: GenerationRequest) -> tuple[ResumableGeneration, Caller]:
        caller = Caller()
        generation = ResumableGeneration(CHAIN, request, self.own, caller, lambda session: None)
        generation.start(self.drivers.find(CHAIN))
        return generation, caller

    def run_there(self, tokens: int, caller: Caller) -> None:
        """So many tokens more of one generation are computed by the host, and have arrived."""
        wanted = computed = len(caller.tokens)
        wanted += tokens
        while computed < wanted:
            wait_for(lambda: self.there.compute() or bool(self.there.computed))
            outcome = self.there.computed[0][1]
            assert isinstance(outcome, list), outcome
            computed += sum(not picked.is_scored for picked in outcome)
            self.there.deliver(self.host)
        wait_for(lambda: len(caller.tokens) >= wanted)


@contextmanager
def hosting() -> Iterator[Hosting]:
    (host, there), (own, here) = connected(), connected()
    transport = InprocTransport()
    listener = transport.listen("inproc://host", HOST)
    threads: list[threading.Thread] = []

    def dial(peer: Peer) -> InprocLink:
        link = transport.dial(peer.url, COORDINATOR)
        server = HostedDriverServer(listener.accept(), find)
        thread = threading.Thread(target=server.serve)
        thread.start()
        threads.append(thread)
        lab.servers.append(server)
        lab.links.append(link)
        return link

    def find(chain: str) -> Driver:
        if chain not in lab.hosted:
            raise LinkError("it is not here")
        return lab.hosted[chain]

    drivers = HostedDrivers(dial, lambda chain, node: lab.lost.append((chain, node)))
    lab = Hosting(drivers, host, there, own, here, hosted={CHAIN: host})
    lab.drivers.host(CHAIN, "host", "inproc://host")
    try:
        yield lab
    finally:
        drivers.close()
        listener.close()
        for thread in threads:
            thread.join()


def wait_for(condition: object) -> None:
    assert callable(condition)
    wait_until(condition, "what the test waits for", 10.0)


@pytest.fixture
def lab() -> Iterator[Hosting]:
    with hosting() as lab:
        yield lab


def test_a_host_answers_as_the_driver_here_would(lab: Hosting) -> None:
    request = ask(stop=("zz",), speculation=Speculation("off"))
    _, caller = lab.start(request)
    lab.run_there(6, caller)
    assert caller.tokens == continuation(request.prompt, 6)
    assert [delta.finish for delta in caller.deltas] == [None] * 5 + ["length"]
    assert caller.deltas[-1].timings is not None
    assert lab.here.frames == []


def test_requests_and_answers_travel_whole() -> None:
    sampling = Sampling(
        temperature=0.5, logit_bias=MappingProxyType({3: -1.0}), seed=(1 << 64) - 1, logprobs=2
    )
    request = ask(
        sampling=sampling,
        stop_ids=frozenset({7}),
        cache_salt="mine",
        caller="key",
        request_id="id",
        shown_ids=frozenset({9}),
    )
    with hosting() as lab:
        seen: list[GenerationRequest] = []
        submit = lab.host.submit
        lab.host.submit = lambda request, emit, *rest: (seen.append(request), submit(request, emit, *rest))[1]  # type: ignore[method-assign]
        _, caller = lab.start(request)
        lab.run_there(1, caller)
    assert seen == [replace(request, sampling=replace(sampling, logit_bias={3: -1.0}))]


@pytest.mark.parametrize("received", [0, 1, 4])
def test_what_a_host_leaves_unfinished_goes_on_here(lab: Hosting, received: int) -> None:
    _, caller = lab.start(ask())
    lab.run_there(received, caller)
    lab.links[0].sever()
    wait_for(lambda: lab.lost == [(CHAIN, "host")])
    wait_for(lambda: bool(lab.here.frames))
    assert lab.here.frames[0].rows == 5 + received, "all that is known is computed at once"
    lab.here.run(lab.own)
    assert caller.tokens == continuation(ask().prompt, 6)
    assert caller.text == "".join(chr(97 + token) for token in caller.tokens)
    timings = caller.deltas[-1].timings
    assert timings is not None
    assert timings.generated_tokens == 6
    assert min(timings.queue_s, timings.prefill_s, timings.decode_s) >= 0
    told = [delta.interruption for delta in caller.deltas if delta.interruption is not None]
    assert [(each.lost, each.after_tokens) for each in told] == [(("host",), received)][: received > 0]
    assert timings.interrupted_s == sum(each.pause_s for each in told)
    assert lab.drivers.find(CHAIN) is None
    wait_for(lambda: lab.host.load().running == 0)


def test_a_prompt_is_not_scored_twice(lab: Hosting) -> None:
    _, caller = lab.start(ask(prompt_logprobs=1))
    lab.run_there(2, caller)
    assert len(caller.deltas[0].prompt) == 5
    lab.drivers.unhost(CHAIN)
    assert [part.targets for frame in lab.here.frames for part in frame.work] == [()]
    lab.here.run(lab.own)
    assert caller.tokens == continuation(ask().prompt, 6)
    assert all(delta.prompt == () for delta in caller.deltas[1:])


def test_a_stop_string_may_span_the_change(lab: Hosting) -> None:
    letters = "".join(chr(97 + token) for token in continuation(ask().prompt, 6))
    _, caller = lab.start(ask(stop=(letters[1:4],)))
    lab.run_there(3, caller)
    lab.drivers.unhost(CHAIN)
    lab.here.run(lab.own)
    assert caller.text == letters[:1]
    assert caller.deltas[-1].finish == "stop"


def test_a_driver_that_moves_gives_back_what_it_has_not_finished(lab: Hosting) -> None:
    _, caller = lab.start(ask())
    lab.run_there(2, caller)
    lab.servers[0].release(CHAIN)
    lab.host.close()
    wait_for(lambda: bool(lab.here.frames))
    lab.here.run(lab.own)
    assert caller.error is None
    assert caller.tokens == continuation(ask().prompt, 6)
    assert [delta.interruption for delta in caller.deltas] == [None] * len(caller.deltas)
    assert lab.lost == []


def test_a_chain_that_the_host_does_not_know_is_computed_here(lab: Hosting) -> None:
    lab.hosted.clear()
    _, caller = lab.start(ask())
    wait_for(lambda: bool(lab.here.frames))
    lab.here.run(lab.own)
    assert caller.tokens == continuation(ask().prompt, 6)


def test_whoever_leaves_is_not_computed_for(lab: Hosting) -> None:
    generation, caller = lab.start(ask(max_tokens=500))
    lab.run_there(1, caller)
    assert generation.has_started()
    host = lab.drivers.find(CHAIN)
    assert host is not None
    assert host.count(CHAIN) == 1
    generation.cancel()
    assert host.count(CHAIN) == 0
    wait_for(lambda: lab.host.load().running == 0)
    lab.links[0].sever()
    wait_for(lambda: bool(lab.lost))
    assert lab.here.frames == []
    assert len(caller.tokens) == 1


def test_errors_come_back_as_what_they_were(lab: Hosting) -> None:
    _, too_long = lab.start(ask(2000))
    wait_for(lambda: too_long.is_over)
    assert isinstance(too_long.error, PromptTooLongError)
    assert too_long.error.hint
    _, wrong = lab.start(ask(sampling=Sampling(temperature=-1.0)))
    wait_for(lambda: wrong.is_over)
    assert isinstance(wrong.error, UsageError)
    lab.hosted[CHAIN] = make_driver(max_waiting=0)
    _, full = lab.start(ask())
    wait_for(lambda: full.is_over)
    assert isinstance(full.error, QueueFullError)


def test_an_error_of_a_driver_that_takes_over_reaches_the_caller(lab: Hosting) -> None:
    _, caller = lab.start(ask())
    lab.run_there(1, caller)
    lab.own.close()
    lab.drivers.unhost(CHAIN)
    assert caller.error is not None


def test_chains_of_one_host_share_a_link(lab: Hosting) -> None:
    lab.hosted["m#2"] = lab.host
    lab.drivers.host("m#2", "host", "inproc://host")
    assert len(lab.links) == 1
    lab.drivers.unhost("m#2", "somebody else")
    assert lab.drivers.find("m#2") is lab.drivers.find(CHAIN)
    lab.drivers.unhost(CHAIN, "host")
    assert lab.drivers.find(CHAIN) is None
    host = lab.drivers.find("m#2")
    assert isinstance(host, HostedDriverClient)
    assert not host.is_lost, "another chain needs the link"
    lab.drivers.unhost("m#2")
    assert host.is_lost
    assert lab.lost == [], "nobody lost it"


def test_a_node_that_cannot_be_dialled_is_no_host(lab: Hosting) -> None:
    with pytest.raises(LinkError):
        lab.drivers.host("m#2", "another", "inproc://nowhere")
    assert lab.drivers.find("m#2") is None


def test_nonsense_ends_the_link(lab: Hosting) -> None:
    host = lab.drivers.find(CHAIN)
    assert host is not None
    host._outbox.put(Ping(1, 0.0))
    wait_for(lambda: lab.lost == [(CHAIN, "host")])
    with pytest.raises(LinkError):
        unpack_request(Generate(1, CHAIN, b"\x93"), memoryview(b""))
    with pytest.raises(LinkError):
        unpack_delta(b"\x93")


def test_a_driver_goes_on_from_what_another_has_answered() -> None:
    driver, chain = connected()
    answered = [TokenChoice(token) for token in continuation(ask().prompt, 4)]
    caller = Caller()
    session = driver.submit(ask(), caller, answered)
    chain.run(driver)
    assert caller.tokens == continuation(ask().prompt, 6)[4:]
    assert [len(part.ids) for part in chain.sent_to(session)] == [9, 1]
    opening = chain.frames[0].openings[0]
    assert opening.prompt_length == 5, "what was answered is no prompt"


def test_what_stages_did_is_heard_of_chains_that_sit_there(lab: Hosting) -> None:
    steps: list[tuple[str, list[str]]] = []
    lab.drivers.on_step = lambda chain, timings: steps.append((chain, [each.node for each in timings]))
    packed = msgspec.msgpack.encode([StageTiming("a", 0.1), StageTiming("b")])
    lab.servers[0].timed(CHAIN, packed)
    _, caller = lab.start(ask())
    lab.run_there(1, caller)
    lab.hosted["m#2"] = lab.host
    host = lab.drivers.find(CHAIN)
    assert host is not None
    other = Caller()
    host.submit("m#2", ask(), other, lambda session: None)
    wait_for(lambda: lab.host.load().running + lab.host.load().waiting == 2)
    lab.servers[0].timed("m#2", packed)
    lab.servers[0].timed(CHAIN, packed)
    wait_for(lambda: bool(steps))
    assert steps == [(CHAIN, ["a", "b"])], (
        "not before it had something to do, and not of a chain that sits elsewhere"
    )


def test_how_busy_a_host_is(lab: Hosting) -> None:
    own = DriverLoad(1, 2, 3, 4)
    assert lab.drivers.load("m#2", own, {"x": 1.0}) == (own, {"x": 1.0})
    _, caller = lab.start(ask())
    assert lab.drivers.load(CHAIN, own, {"x": 1.0}) == (DriverLoad(2, 2, 3, 4), {"x": 1.0})
    lab.run_there(1, caller)
    lab.servers[0]._report()
    host = lab.drivers.find(CHAIN)
    assert host is not None
    wait_for(lambda: host.load(CHAIN) is not None)
    there = lab.host.load()
    load, router = lab.drivers.load(CHAIN, own, {"x": 1.0})
    assert load == DriverLoad(2, 2, 3 + there.used_tokens, 4 + there.capacity_tokens)
    assert router == lab.host.speculation()
