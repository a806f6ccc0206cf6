"""`bench prefix --copies`: to which copy of a model requests go that share their beginnings: by prefix and load, to the
fewest sessions, or by chance.

Drivers, schedulers, prefix caches and the rule are those of a cluster; chains compute nothing, and each takes a frame
of so many rows in a round. Rows and rounds are counted, so that the same seed gives the same figures everywhere.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardcompute.bench.report import Result
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.generation import Delta, GenerationRequest, Speculation, TokenChoice
from shardcompute.core.steps import Frame, Opening, Picked, SessionRows
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.limits import ChainShape, DriverLimits
from shardcompute.node.driver.sessions.prefix_routing import ChainOffer, choose_chain

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

POLICIES = ("random", "fewest-sessions", "prefix")
_VOCABULARY = 256
_MOST_ROUNDS = 100_000


@dataclass(frozen=True, slots=True)
class RoutingBench:
    """Clients talk on topics, each of which has a beginning of its own; some topics are more popular than others."""

    copies: int = 3
    topics: int = 12
    prompt_tokens: int = 1000
    question_tokens: int = 40
    answer_tokens: int = 24
    requests: int = 240
    per_round: float = 0.12
    kv_tokens: int = 16_384
    rows: int = 128
    seed: int = 1


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    policy: str
    prompt_rows: int
    """That were asked for."""
    computed_rows: int
    """Of these, what was computed; the rest was kept."""
    first_rounds: tuple[int, ...]
    """For each request, rounds until its first token."""


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    special_ids: frozenset[int] = frozenset()
    eos_ids = special_ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"


@dataclass(slots=True)
class _CountingChain:
    """A `ChainPort` that picks a token for every row that asks for one, a frame at a time."""

    frames: deque[Frame] = field(default_factory=deque)
    computed_rows: int = 0

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def close_sessions(self, sessions: Sequence[int]) -> None:
        """Nothing is held."""

    def replay(self, work: SessionRows, opening: Opening | None) -> None:
        """No chain is lost here."""

    def overdue(self, frame: Frame, waited_s: float, allowed_s: float) -> None:
        """No time passes."""

    def compute(self, driver: Driver) -> None:
        if not self.frames:
            return
        frame = self.frames.popleft()
        self.computed_rows += frame.rows
        picked = [
            Picked(part.session, part.start + len(part.ids) - part.logit_rows + index, TokenChoice(1))
            for part in frame.work
            for index in range(part.logit_rows)
        ]
        driver.take_results(frame.sequence, picked, [])


@dataclass(slots=True)
class _Rounds:
    count: int = 0


@dataclass(slots=True)
class _Caller:
    begun_round: int
    rounds: _Rounds
    first_round: int | None = None
    is_over: bool = False

    def __call__(self, delta: Delta | BaseException) -> None:
        if isinstance(delta, BaseException):
            raise delta
        if self.first_round is None and delta.tokens:
            self.first_round = self.rounds.count
        self.is_over = self.is_over or delta.finish is not None


def run_routing_bench(bench: RoutingBench) -> list[RoutingOutcome]:
    return [_run(bench, policy) for policy in POLICIES]


def _run(bench: RoutingBench, policy: str) -> RoutingOutcome:
    chance, choosing = random.Random(bench.seed), random.Random(bench.seed + 1)
    chains = {f"copy {number + 1}": _CountingChain() for number in range(bench.copies)}
    drivers = {name: _open_driver(bench, chain) for name, chain in chains.items()}
    requests, callers = deque(_requests(bench, chance)), list[_Caller]()
    prompt_rows = sum(len(request.prompt) for request in requests)
    rounds, due = _Rounds(), 0.0
    while (requests or not all(each.is_over for each in callers)) and rounds.count < _MOST_ROUNDS:
        due += bench.per_round
        while due >= 1 and requests:
            due -= 1
            request = requests.popleft()
            driver = drivers[_choose(policy, drivers, request, choosing)]
            callers.append(_Caller(rounds.count, rounds))
            driver.submit(request, callers[-1])
        for name, chain in chains.items():
            chain.compute(drivers[name])
        rounds.count += 1
    for driver in drivers.values():
        driver.close()
    decoded = bench.requests * (bench.answer_tokens - 1)
    computed = sum(chain.computed_rows for chain in chains.values()) - decoded
    waits = tuple(each.first_round - each.begun_round for each in callers if each.first_round is not None)
    return RoutingOutcome(policy, prompt_rows, computed, waits)


def _open_driver(bench: RoutingBench, chain: _CountingChain) -> Driver:
    limits = DriverLimits(
        _VOCABULARY, 4 * bench.prompt_tokens, max_sessions=64, speculation=Speculation("off")
    )
    # Nobody waits here for time to pass.
    driver = Driver(cast("Tokenizer", _Bytes()), limits, call_later=lambda delay_s, effect: lambda: None)
    capacity = bench.kv_tokens // PAGE_TOKENS * PAGE_TOKENS
    driver.connect(chain, ChainShape(capacity, max_rows=bench.rows, max_logit_rows=bench.rows))
    return driver


def _requests(bench: RoutingBench, chance: random.Random) -> Iterator[GenerationRequest]:
    topics = [_tokens(chance, bench.prompt_tokens) for _ in range(bench.topics)]
    weights = [1 / (rank + 1) for rank in range(bench.topics)]
    for _ in range(bench.requests):
        [topic] = chance.choices(topics, weights)
        yield GenerationRequest((*topic, *_tokens(chance, bench.question_tokens)), bench.answer_tokens)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(_VOCABULARY) for _ in range(count)]


def _choose(
    policy: str, drivers: dict[str, Driver], request: GenerationRequest, chance: random.Random
) -> str:
    if policy == "random":
        return chance.choice(list(drivers))
    offers = {}
    for name, driver in drivers.items():
        load = driver.load()
        kept_tokens = driver.kept_tokens(request) if policy == "prefix" else 0
        offers[name] = ChainOffer(kept_tokens, load.running + load.waiting)
    return choose_chain(offers, len(request.prompt))


def routing_results(outcomes: Sequence[RoutingOutcome]) -> list[Result]:
    results: list[Result] = []
    for each in outcomes:
        labels = {"policy": each.policy}
        waits = sorted(each.first_rounds)
        results += [
            Result("computed_share", each.computed_rows / each.prompt_rows, "fraction", labels),
            Result("first_token_median", statistics.median(waits), "rounds", labels),
            Result("first_token_p95", waits[int(0.95 * (len(waits) - 1))], "rounds", labels),
        ]
    return results


def routing_raw(bench: RoutingBench, outcomes: Sequence[RoutingOutcome]) -> dict[str, Any]:
    """What the JSON file has besides results."""
    return {
        "copies": bench.copies,
        "topics": bench.topics,
        "prompt_tokens": bench.prompt_tokens,
        "requests": bench.requests,
        "rows_by_policy": {each.policy: [each.computed_rows, each.prompt_rows] for each in outcomes},
    }
