"""Canary runner: sends a canary now and then as a client would, and compares what comes with what is known.

When, is drawn anew each time; what, comes of a secret bank; and it gives way to users. Nothing in what stages get of it
differs from a request of anybody else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shardcompute.backends.exactness import with_kv
from shardcompute.control.state import Chain, ClusterState
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.node.cluster.canaries.record import CanaryNotes, open_notes, save_notes
from shardcompute.node.driver.pool import DriverPool, PoolModel
from shardcompute.security.receipts import new_receipt_id
from shardcompute.trust.canaries import CanaryPrompt, DriftEstimate, agreement, compose

log = logging.getLogger(__name__)
BANK = 32
"""Canaries of a model: each comes again after so many others, on average."""
_FRESH = 4
"""One of so many may be one that nobody has answered yet."""
_SOONEST, _LATEST = 0.1, 5.0
_DOUBT = 0.2
"""Of the usual time, how soon one comes after one that differed."""
_BUSY_S = 5.0
_PATIENCE = 3.0
"""After so many times the usual time a canary goes out beside users' requests, if there is room."""
_ROOM = 0.5
_DEADLINE_S = 300.0
_CLOSE_S = 10.0


class Chance(Protocol):
    """Where times and choices come from."""

    def expovariate(self, lambd: float) -> float: ...
    def randrange(self, stop: int) -> int: ...


@dataclass(frozen=True, slots=True)
class CanaryReading:
    """One canary: on which chain, and which share of its answer was the known one; None: it is the known one now."""

    chain: str
    number: int
    agreed: float | None


class CanaryRunner:
    """`start` has them sent; `send` sends one now. Methods may be called from any thread."""

    def __init__(
        self,
        every_s: float,
        path: Path,
        pool: DriverPool,
        state: Callable[[], ClusterState],
        *,
        has_receipts: bool = False,
        bank: int = BANK,
        chance: Chance | None = None,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`has_receipts`: all answers of the cluster have them, so that one without would stand out. `wait` for so many
        seconds, unless it is over."""
        self._has_receipts = has_receipts
        self._every_s = every_s
        self._path = path
        self._pool = pool
        self._state = state
        self._bank = bank
        self._chance = chance or secrets.SystemRandom()
        self._clock = clock
        self._notes = open_notes(path)
        self._chains: dict[str, str] = {}
        """By the salt of one that is under way, the chain that it went to."""
        self._alerts: tuple[str, ...] = ()
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._thread = threading.Thread(target=self._serve, name="canaries", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # What others see

    @property
    def notes(self) -> CanaryNotes:
        return self._notes

    def warnings(self) -> tuple[str, ...]:
        """Of chains that serve, those that have drifted, in words."""
        return tuple(self._warn(chain, drift) for chain, drift in self._drifting())

    def placed(self, chain: str, request: GenerationRequest) -> None:
        """The pool says where each request goes, also those that are nobody's canary."""
        if request.cache_salt in self._chains:
            self._chains[request.cache_salt] = chain

    # One canary

    def send(self, model: str | None = None, number: int | None = None) -> CanaryReading | None:
        """Ask one canary now; None where that says nothing: nobody serves, a user came, or the chain changed."""
        with self._sending:
            models = [each for each in self._pool.all_models() if model in (None, each.name)]
            if not models:
                return None
            asked = models[self._chance.randrange(len(models))]
            which = self._choose(asked.name) if number is None else number
            try:
                return asyncio.run(asyncio.wait_for(self._ask(asked, which), _DEADLINE_S))
            except (ShardComputeError, TimeoutError) as error:
                log.info("a canary came to nothing: %s", error)
                return None

    def _choose(self, model: str) -> int:
        """Mostly one whose answer is known, now and then any: the bank fills while comparing has begun."""
        classes = self._notes.classes.items()
        known = sorted(
            {each for name, kept in classes if name.startswith(f"{model} ") for each in kept.answers}
        )
        if known and self._chance.randrange(_FRESH):
            return known[self._chance.randrange(len(known))]
        return self._chance.randrange(self._bank)

    async def _ask(self, model: PoolModel, number: int) -> CanaryReading | None:
        prompt = compose(self._notes.secret + model.digest.encode(), number)
        salt = secrets.token_hex(8)
        self._chains[salt] = ""
        receipt = new_receipt_id() if self._has_receipts else ""
        request = replace(_request_of(model, prompt, salt), receipt=receipt)
        before, tokens = self._state(), list[int]()
        try:
            async with aclosing(self._pool.generate(model.name, request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    tokens += [choice.id for choice in delta.tokens]
                    if self._must_yield():
                        return None
        finally:
            placed = self._chains.pop(salt)
        return self._compare(before, self._state(), placed, number, tuple(tokens))

    def _must_yield(self) -> bool:
        """A user is waiting, for whom there is no room beside it."""
        return self._closing.is_set() or self._pool.load().waiting > 0

    def _compare(
        self, before: ClusterState, after: ClusterState, placed: str, number: int, tokens: tuple[int, ...]
    ) -> CanaryReading | None:
        then, now = before.chains.get(placed), after.chains.get(placed)
        if then is None or now is None or then.epoch != now.epoch or then.stages != now.stages:
            return None
        kind, at_s = class_of(after, now), self._clock()
        known = self._notes.classes.get(kind)
        if known is None or number not in known.answers:
            if any(after.nodes[node].is_on_probation for node in now.members):
                return None  # what strangers answer first is no measure for others
            self._keep(self._notes.with_answer(kind, number, tokens, at_s))
            return CanaryReading(placed, number, None)
        agreed = agreement(known.answers[number], tokens)
        self._keep(self._notes.with_reading(kind, now.members, agreed, at_s))
        self._tell(placed, agreed)
        return CanaryReading(placed, number, agreed)

    def _keep(self, notes: CanaryNotes) -> None:
        self._notes = notes
        save_notes(self._path, notes)

    def _tell(self, chain: str, agreed: float) -> None:
        if agreed < 1.0:
            log.warning(
                "a canary on %s answered as known for %.0f %% of its tokens only", chain, 100 * agreed
            )
        before, self._alerts = self._alerts, self.warnings()
        for text in self._alerts:
            if text not in before:
                log.warning("%s", text)

    def _drifting(self) -> list[tuple[Chain, DriftEstimate]]:
        state, notes = self._state(), self._notes
        found = [(chain, notes.chains.get(class_of(state, chain))) for chain in state.live_chains()]
        return [(chain, drift) for chain, drift in found if drift is not None and drift.is_drifting]

    def _warn(self, chain: Chain, drift: DriftEstimate) -> str:
        state = self._state()
        levels = {node: self._notes.machines.get(node, DriftEstimate()).level for node in chain.members}
        most = max(levels.values(), default=0.0)
        named = ", ".join(state.nodes[node].name for node, level in levels.items() if level == most)
        return (
            f"{chain.id} answers otherwise than it did: {sum(drift.recent)} of the last {len(drift.recent)} canaries "
            f"differ; most of all where {named} take part. Look at their versions and devices, or audit them "
            "(--audit-rate)"
        )

    # In its own thread

    def _serve(self) -> None:
        wait_s = self._next_s()
        while not self._wait(wait_s):
            if self._find_a_moment():
                self.send()
            wait_s = self._next_s()

    def _next_s(self) -> float:
        """Drawn so that what has passed says nothing of what is to come."""
        usual_s = self._every_s * (_DOUBT if self._is_in_doubt() else 1.0)
        drawn_s = self._chance.expovariate(1.0 / usual_s)
        return min(max(drawn_s, _SOONEST * usual_s), _LATEST * usual_s)

    def _is_in_doubt(self) -> bool:
        return any(each.is_in_doubt for each in self._notes.chains.values())

    def _find_a_moment(self) -> bool:
        """Wait until nobody is served; after long enough, until nobody waits and there is room. False: it is over."""
        tried, most = 0, max(1, int(_PATIENCE * self._every_s / _BUSY_S))
        while not self._closing.is_set():
            load = self._pool.load()
            has_room = load.waiting == 0 and load.kv_used_fraction < _ROOM
            if load.running == 0 or (tried >= most and has_room):
                return True
            if tried >= 2 * most:
                return False
            tried += 1
            if self._wait(_BUSY_S):
                return False
        return False


def _request_of(model: PoolModel, prompt: CanaryPrompt, salt: str) -> GenerationRequest:
    """As the chat route makes it; without chat templates, as the completion route does."""
    tokenizer = model.tokenizer
    if tokenizer.has_chat_template:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
    else:
        ids = tokenizer.encode(prompt.text)
    return GenerationRequest(
        tuple(ids[: model.context_length // 2]),
        min(prompt.tokens, model.context_length // 4),
        Sampling(temperature=prompt.temperature, seed=prompt.seed),
        stop_ids=tokenizer.eos_ids,
        # What is kept of an earlier one is not used: it is to be computed.
        cache_salt=salt,
    )


def class_of(state: ClusterState, chain: Chain) -> str:
    """What an answer depends on: the model and its form, and the exactness class of whoever computes; where these
    differ, also of which layers."""
    model = state.models[chain.model].model
    parts = []
    for stage in chain.stages:
        found = {with_kv(state.nodes[node].exactness_of(model), model.kv_type) for node in stage.members}
        parts.append((stage.start, stage.stop, "+".join(sorted(found))))
    names = {name for _, _, name in parts}
    told = names.pop() if len(names) == 1 else "; ".join(f"{a}-{b} {name}" for a, b, name in parts)
    return f"{model.name} {model.weight_form} {told}"
