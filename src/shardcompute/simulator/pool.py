"""Pool of the chains of a simulation: requests go to the least busy one that works, as `node/driver/pool.py` has it, or
wait for the first that does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from math import cos, tau

from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.distributions import draw_from
from shardcompute.simulator.pipeline import Pipeline
from shardcompute.simulator.scenario import LoadTerms
from shardcompute.simulator.sessions import Ledger, SimulatedSession


class PipelinePool:
    """All pipelines, by their chain. `open_pipeline` makes one for a chain that is new."""

    def __init__(self, agenda: Agenda, ledger: Ledger, open_pipeline: Callable[[], Pipeline]) -> None:
        self._agenda = agenda
        self._ledger = ledger
        self._open_pipeline = open_pipeline
        self.pipelines: dict[str, Pipeline] = {}
        self._backlog: deque[SimulatedSession] = deque()
        self._asked = 0

    def pipeline(self, chain: str) -> Pipeline:
        if chain not in self.pipelines:
            self.pipelines[chain] = self._open_pipeline()
        return self.pipelines[chain]

    def fence(self, chain: str, epoch: int) -> None:
        if chain in self.pipelines:
            self.pipelines[chain].fence(epoch)

    def retire(self, chain: str) -> None:
        known = self.pipelines.pop(chain, None)
        for session in [] if known is None else known.give_up():
            self._route(session)

    def serve_backlog(self) -> None:
        """Some chain works now."""
        waiting, self._backlog = self._backlog, deque()
        for session in waiting:
            if not session.is_over:
                self._route(session)

    def ask(
        self, prompt: int, wanted: int, patience_s: float, answer_s: float, on_end: Callable[[], None]
    ) -> None:
        """A request, `answer_s` of which passes on the way to the driver and back."""
        self._asked += 1
        # What passes outside is counted as if it passed before.
        asked_s = self._agenda.now_s
        session = SimulatedSession(
            self._asked, prompt, wanted, asked_s, patience_s, on_end, progress_s=asked_s
        )
        self._ledger.ask(session)
        self._agenda.after(answer_s, partial(self._route, session))
        self._agenda.after(patience_s, partial(self._lose_patience, session))

    def _route(self, session: SimulatedSession) -> None:
        if session.is_over:
            return
        working = [each for each in self.pipelines.values() if each.is_active]
        if working or self.pipelines:
            min(working or self.pipelines.values(), key=lambda each: each.load).ask(session)
        else:
            self._backlog.append(session)

    def _lose_patience(self, session: SimulatedSession) -> None:
        if session.is_over:
            return
        due_s = session.progress_s + session.patience_s
        if due_s > self._agenda.now_s:
            self._agenda.at(due_s, partial(self._lose_patience, session))
            return
        self._ledger.abandon(session)
        for pipeline in self.pipelines.values():
            pipeline.drop(session)
        session.on_end()


class LoadGenerator:
    """Clients of one kind."""

    def __init__(
        self,
        number: int,
        terms: LoadTerms,
        answer_s: float,
        agenda: Agenda,
        pool: PipelinePool,
        rng: random.Random,
        day_s: float,
    ) -> None:
        self._terms = terms
        self._answer_s = answer_s
        self._agenda = agenda
        self._pool = pool
        self._rng = rng
        self._day_s = day_s
        self._think = draw_from(f"load.{number}.think_s", terms.think_s)
        self._prompt = draw_from(f"load.{number}.prompt_tokens", terms.prompt_tokens, 1.0)
        self._wanted = draw_from(f"load.{number}.answer_tokens", terms.answer_tokens, 1.0)

    def start(self) -> None:
        for _ in range(self._terms.streams):
            self._agenda.at(self._terms.begins_s, partial(self._ask_again, self._terms.rounds))
        if self._terms.per_s:
            self._agenda.at(self._terms.begins_s, self._arrive)

    def _ask_again(self, rounds: int) -> None:
        def ended() -> None:
            if rounds != 1:
                self._agenda.after(self._think(self._rng), partial(self._ask_again, max(0, rounds - 1)))

        self._ask(ended)

    def _arrive(self) -> None:
        """Requests of a process whose rate follows the day: drawn at its height, and thinned."""
        most_per_s = self._terms.per_s * (1 + self._terms.day_swing)
        part = 0.5 - 0.5 * _day_curve(self._agenda.now_s / self._day_s)
        now_per_s = self._terms.per_s * (1 - self._terms.day_swing + 2 * self._terms.day_swing * part)
        if self._rng.random() * most_per_s < now_per_s:
            self._ask(lambda: None)
        self._agenda.after(self._rng.expovariate(most_per_s), self._arrive)

    def _ask(self, on_end: Callable[[], None]) -> None:
        prompt, wanted = round(self._prompt(self._rng)), round(self._wanted(self._rng))
        self._pool.ask(max(1, prompt), max(1, wanted), self._terms.patience_s, self._answer_s, on_end)


def _day_curve(days: float) -> float:
    """1 at midnight, -1 at noon."""
    return cos(tau * days)
