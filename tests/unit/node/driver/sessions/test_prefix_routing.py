"""Requests go to the chain that has kept their beginning, unless that one has too much to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardcompute.core.generation import GenerationRequest
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.pool import DriverPool, PoolModel, _PoolChain
from shardcompute.node.driver.sessions.prefix_routing import (
    SESSION_TOKENS,
    ChainOffer,
    SentPrompts,
    choose_chain,
)
from shardcompute.node.driver.sessions.session import PAGE_TOKENS
from support.swarm.fake_chain import LETTERS, SHAPE, FakeChain, connected, submit

PAGES = 2000
SHARING = replace(SHAPE, can_share=True, capacity_tokens=PAGES * PAGE_TOKENS)
Choose = Callable[[GenerationRequest], tuple[str, Driver]]


def _dial(peer: object) -> Any:
    raise AssertionError("nobody is dialled")


class Copies:
    """Three chains of one model in a pool."""

    def __init__(self, pool: DriverPool) -> None:
        self.pool = pool
        pool.add_model(
            PoolModel("m", SimpleNamespace(), 30, 1000, created_s=0, digest="", size_bytes=0)  # type: ignore[arg-type]
        )
        self.drivers: dict[str, Driver] = {}
        self.chains: dict[str, FakeChain] = {}
        for name in ("m#1", "m#2", "m#3"):
            self.drivers[name], self.chains[name] = connected(SHARING, PAGES)
            pool._chains[name] = _PoolChain("m", self.drivers[name], is_connected=True)

    def choose(self, request: GenerationRequest) -> tuple[str, Driver]:
        return self.pool._choose_driver("m", request)

    def computed_rows(self, choose: Choose, requests: list[GenerationRequest]) -> int:
        """How many rows the chains compute for requests one after the other."""
        for request in requests:
            name, driver = choose(request)
            _, caller = submit(driver, request)
            self.chains[name].run(driver)
            assert caller.is_over
        return sum(len(part.ids) for each in self.chains.values() for f in each.frames for part in f.work)


@pytest.fixture
def copies() -> Iterator[Copies]:
    with closing(DriverPool(_dial, "inproc://driver", lambda node: None)) as pool:
        yield Copies(pool)


def prompt_of(topic: int, question: int, length: int = 200) -> GenerationRequest:
    """A long beginning that all questions on a topic share, then the question."""
    begun = random.Random(topic)
    shared = [begun.randrange(LETTERS) for _ in range(length)]
    asked = random.Random(1000 * topic + question)
    return GenerationRequest((*shared, *(asked.randrange(LETTERS) for _ in range(12))), 2)


def shared_prefixes(topics: int = 6, questions: int = 8) -> list[GenerationRequest]:
    requests = [prompt_of(topic, question) for question in range(questions) for topic in range(topics)]
    random.Random(5).shuffle(requests)
    return requests


def test_a_beginning_is_computed_by_one_chain_alone(copies: Copies) -> None:
    """At random each of six beginnings is computed by all three chains sooner or later."""
    requests = shared_prefixes()
    rows = copies.computed_rows(copies.choose, requests)
    # Each beginning once; of every request its question, and what it generates.
    least = 6 * 200 + len(requests) * (12 + 1)
    assert rows <= 1.1 * least


def test_a_chain_that_has_much_to_do_is_spared(copies: Copies) -> None:
    first = prompt_of(1, 0, length=400)
    name, driver = copies.choose(first)
    submit(driver, first)
    copies.chains[name].run(driver)
    assert copies.choose(prompt_of(1, 1, length=400))[0] == name
    for number in range(3):
        submit(driver, prompt_of(7, number))
    assert copies.choose(prompt_of(1, 2, length=400))[0] != name, "400 tokens are computed sooner elsewhere"


def test_without_a_known_beginning_the_least_busy_one_is_chosen(copies: Copies) -> None:
    chosen = []
    for topic in range(6):
        name, driver = copies.choose(prompt_of(topic, 0))
        submit(driver, prompt_of(topic, 0))
        chosen.append(name)
    assert sorted(chosen) == ["m#1", "m#1", "m#2", "m#2", "m#3", "m#3"]


def test_others_beginnings_are_none_of_ones_own(copies: Copies) -> None:
    request = prompt_of(1, 0)
    name, driver = copies.choose(request)
    submit(driver, request)
    copies.chains[name].run(driver)
    assert driver.kept_tokens(prompt_of(1, 1)) == 200
    assert driver.kept_tokens(replace(prompt_of(1, 1), caller="somebody")) == 0
    assert driver.kept_tokens(replace(prompt_of(1, 1), prompt_logprobs=0)) == 0, "scored rows are computed"


def test_what_elsewhere_was_sent_is_remembered_for_a_while() -> None:
    sent = SentPrompts()
    sent.add(prompt_of(1, 0))
    assert sent.kept_tokens(prompt_of(1, 1)) == 200
    assert sent.kept_tokens(prompt_of(2, 1)) == 0
    assert sent.kept_tokens(replace(prompt_of(1, 1), cache_salt="other")) == 0
    for number in range(40):
        sent.add(prompt_of(10 + number, 0))
    assert sent.kept_tokens(prompt_of(1, 1)) == 0


def test_company_and_computing_are_weighed() -> None:
    busy, idle = ChainOffer(600, 2), ChainOffer(0, 0)
    assert choose_chain({"busy": busy, "idle": idle}, 1000) == "busy"
    assert choose_chain({"busy": ChainOffer(600, 3), "idle": idle}, 1000) == "idle"
    assert ChainOffer(50, 1).cost(40) == SESSION_TOKENS
