"""Pipeline of a chain in a simulation: frames go round driver → stages → driver, wait where a stage is busy, and bring
tokens.

The rules are the scheduler's (`node/driver/scheduler.py`): computed tokens catch up with known ones, as many frames as
keep the slowest stage busy share the sessions, and prompts get what room is left. One frame is one event: stages take
frames in order, so that its whole way is known when it departs, unless a machine of it fails meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import comb

from shardcompute.control.sizes import Sizes
from shardcompute.decoding.routing.router import depth_of_pipe
from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.machines import HOME, Lines, Rows, SimulatedMachine
from shardcompute.simulator.scenario import DriverTerms
from shardcompute.simulator.sessions import Ledger, SimulatedSession

_PROMPT_SHARE = 4
"""One row in so many is kept for prompts while others are answering."""
_ID_BYTES = 4
_ONE = Rows(answering=1, prompt=0, picked=1)


@dataclass(frozen=True, slots=True)
class StageOnMachine:
    machine: SimulatedMachine
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FramePart:
    """Rows `[start, start + rows)` of a session; then token `position` and those after it are picked, `tokens` in
    all."""

    session: SimulatedSession
    start: int
    rows: int
    position: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class FrameInFlight:
    epoch: int
    parts: tuple[FramePart, ...]
    leaves_s: tuple[float, ...]
    """When each stage is done with it."""


class Pipeline:
    """The sessions of one chain, and what is on its way."""

    def __init__(
        self,
        agenda: Agenda,
        lines: Lines,
        sizes: Sizes,
        hidden: int,
        kv_tokens: int,
        terms: DriverTerms,
        stride: int,
        ledger: Ledger,
    ) -> None:
        self._agenda = agenda
        self._lines = lines
        self._sizes = sizes
        self._row_bytes = hidden * terms.activation_bytes
        self._kv_tokens = kv_tokens
        self._terms = terms
        self._stride = stride
        self._ledger = ledger
        self._hop_s = terms.hop_ms / 1000
        self.waiting: deque[SimulatedSession] = deque()
        self.running: list[SimulatedSession] = []
        """In the order of their turns."""
        self.is_active = False
        self.epoch = 0
        self._stages: tuple[StageOnMachine, ...] = ()
        self._free_s: list[float] = []
        self._line_free_s: list[float] = []
        self._home_free_s = 0.0
        self._flights: dict[FrameInFlight, None] = {}
        self._held: dict[FrameInFlight, None] = {}
        """Of these, what a machine that says nothing holds up."""
        self._depth = 1

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def ask(self, session: SimulatedSession) -> None:
        self.waiting.append(session)
        self._fill()

    def drop(self, session: SimulatedSession) -> None:
        """Nobody waits for it any more; what is on its way of it counts for nothing."""
        if session in self.running:
            self.running.remove(session)
        elif session in self.waiting:
            self.waiting.remove(session)

    # What the coordinator says

    def activate(
        self, epoch: int, stages: Sequence[StageOnMachine], new: frozenset[int] | None, now_s: float
    ) -> None:
        """Use this epoch from now on; stages at `new` places are told what they missed, None: all is computed again."""
        self._lose_all()
        self.is_active, self.epoch, self._stages = True, epoch, tuple(stages)
        self._free_s = [now_s] * len(stages)
        self._line_free_s = [now_s] * len(stages)
        times = [self._step_s(stage, _ONE) for stage in self._stages]
        self._depth = depth_of_pipe(sum(times) + self._ring_s(), max(times), len(stages))
        for session in self.running:
            session.roll_back(0 if new is None else None)
        for index in new or ():
            self._free_s[index] = now_s + self._replay_s(index)
        self._fill()

    def fence(self, epoch: int) -> None:
        """Frames of this epoch and earlier ones are dropped."""
        if self.epoch <= epoch and self.is_active:
            self.is_active = False
            self._lose_all()

    def lose_machine(self, machine: SimulatedMachine) -> None:
        """What this machine had yet to compute does not come."""
        now_s = self._agenda.now_s
        places = [index for index, stage in enumerate(self._stages) if stage.machine is machine]
        for frame in self._flights:
            if places and frame.leaves_s[places[0]] > now_s:
                self._hold(frame)

    def regain_machine(self, machine: SimulatedMachine) -> None:
        """A machine of which nothing was heard goes on where it was, and so does what it held up."""
        if self.uses(machine) and all(stage.machine.answers for stage in self._stages):
            for frame in self._held:
                self._agenda.after(self._ring_s(), partial(self._take, frame))
            self._held = {}

    def _hold(self, frame: FrameInFlight) -> None:
        """It is missed until the chain is fenced, or the machine is back."""
        self._held[frame] = None
        for part in frame.parts:
            if part.session.interrupted_s is None:
                part.session.interrupted_s = self._agenda.now_s

    def uses(self, machine: SimulatedMachine) -> bool:
        return any(stage.machine is machine for stage in self._stages)

    def give_up(self) -> list[SimulatedSession]:
        """The chain will not come back: its sessions begin anew elsewhere, behind what is known of them."""
        self.fence(self.epoch)
        left = [*self.running, *self.waiting]
        for session in left:
            session.roll_back(0)
        self.running, self.waiting = [], deque()
        return left

    def _lose_all(self) -> None:
        """Nothing of what is on its way comes back: its rows are to be sent again."""
        for frame in self._flights:
            for part in frame.parts:
                part.session.roll_back()
                if part.session.interrupted_s is None:
                    part.session.interrupted_s = self._agenda.now_s
        self._flights, self._held = {}, {}

    # Frames

    def _fill(self) -> None:
        while self.is_active and len(self._flights) < self._depth:
            parts = self._next_parts()
            if not parts:
                return
            self._depart(parts)

    def _admit(self) -> None:
        held = sum(session.prompt + session.wanted for session in self.running)
        while self.waiting and len(self.running) < self._terms.max_sessions:
            needs = self.waiting[0].prompt + self.waiting[0].wanted
            if self.running and held + needs > self._kv_tokens:
                return
            held += needs
            self.running.append(self.waiting.popleft())

    def _next_parts(self) -> list[FramePart]:
        self._admit()
        due = [session for session in self.running if session.unsent > 0]
        answering = [session for session in due if session.generated]
        computing = [session for session in due if not session.generated]
        room = min(self._terms.chunk_rows, self._terms.shared_rows) if answering else self._terms.chunk_rows
        reserved = -(-room // _PROMPT_SHARE) if computing else 0
        share = -(-len(self.running) // self._depth)
        parts = _take_rows(answering[:share], room - reserved)
        parts += _take_rows(computing, room - sum(part.rows for part in parts))
        if not computing and all(part.rows == 1 and part.tokens for part in parts):
            left = min((part.session.wanted - part.session.generated for part in parts), default=1)
            count = max(1, min(self._stride, left))
            parts = [FramePart(p.session, p.start, p.rows, p.position, count) for p in parts]
        for part in parts:
            part.session.sent = part.start + part.rows + max(0, part.tokens - 1)
            self.running.remove(part.session)
            self.running.append(part.session)
        return parts

    def _depart(self, parts: Sequence[FramePart]) -> None:
        rows = Rows(
            answering=sum(part.rows for part in parts if part.session.generated and part.rows == 1),
            prompt=sum(part.rows for part in parts if not (part.session.generated and part.rows == 1)),
            picked=sum(1 for part in parts if part.tokens),
        )
        # A stride of several tokens goes round so many times.
        times = max(1, *(part.tokens for part in parts), 1)
        slowdown = self._crowding(rows)
        first, now_s = self._stages[0].machine.id, self._agenda.now_s
        arrives_s = now_s + times * (self._hop_s + self._lines.hop_s(HOME, first, _ID_BYTES * rows.total))
        leaves_s: list[float] = []
        for index, stage in enumerate(self._stages):
            begun_s = max(arrives_s, self._free_s[index])
            self._free_s[index] = begun_s + times * slowdown * self._step_s(stage, rows)
            leaves_s.append(self._free_s[index])
            is_last = index + 1 == len(self._stages)
            peer = HOME if is_last else self._stages[index + 1].machine.id
            size_bytes = _ID_BYTES * rows.picked if is_last else self._row_bytes * rows.total
            carry_s = size_bytes / self._lines.bytes_per_s(stage.machine.id, peer)
            # A line that is thinner than the stage is quick is what frames wait for.
            self._line_free_s[index] = max(leaves_s[-1], self._line_free_s[index]) + times * carry_s
            way_s = self._hop_s + self._lines.rtt_s(stage.machine.id, peer) / 2
            arrives_s = self._line_free_s[index] + times * way_s
        token_s = times * rows.picked * self._terms.token_ms / 1000
        self._home_free_s = arrives_s = max(arrives_s, self._home_free_s) + token_s
        frame = FrameInFlight(self.epoch, tuple(parts), tuple(leaves_s))
        self._flights[frame] = None
        if all(stage.machine.answers for stage in self._stages):
            self._agenda.at(arrives_s, partial(self._take, frame))
        else:
            self._hold(frame)

    def _take(self, frame: FrameInFlight) -> None:
        """A frame is back; one that was lost or fenced meanwhile counts for nothing."""
        if frame not in self._flights or frame in self._held:
            return
        del self._flights[frame]
        now_s = self._agenda.now_s
        for part in frame.parts:
            session = part.session
            if session.is_over:
                continue
            if part.tokens:
                self._ledger.deliver(session, part.position, part.tokens, now_s)
            session.computed = max(session.computed, part.start + part.rows + max(0, part.tokens - 1))
            if session.generated >= session.wanted:
                self.running.remove(session)
                self._ledger.finish(session, now_s)
                session.on_end()
        self._fill()

    # Times

    def _step_s(self, stage: StageOnMachine, rows: Rows) -> float:
        return stage.machine.step_s(self._sizes, stage.start, stage.stop, rows)

    def _crowding(self, rows: Rows) -> float:
        """By how much steps are slower because all machines share one computer: the mean over how many others of the
        frames in flight, and the driver, compute at the same time."""
        cores = self._terms.shared_cores
        if not cores:
            return 1.0
        compute_s = sum(self._step_s(stage, rows) for stage in self._stages)
        token_s = rows.picked * self._terms.token_ms / 1000
        frames = min(len(self._flights) + 1, self._depth)
        lap_s = max(compute_s + self._ring_s() + token_s, frames * compute_s / len(self._stages))
        busy = min(1.0, compute_s / lap_s)
        beside = min(1.0, frames * token_s / lap_s)
        mean = 0.0
        for others in range(frames):
            chance = comb(frames - 1, others) * busy**others * (1 - busy) ** (frames - 1 - others)
            alone, crowded = max(1.0, (1 + others) / cores), max(1.0, (2 + others) / cores)
            mean += chance * ((1 - beside) * alone + beside * crowded)
        return mean

    def _ring_s(self) -> float:
        """On the lines, once round, for one row."""
        names = [HOME, *(stage.machine.id for stage in self._stages), HOME]
        return sum(self._hop_s + self._lines.hop_s(a, b, self._row_bytes) for a, b in pairwise(names))

    def _replay_s(self, index: int) -> float:
        """How long a new stage takes to be told, and to compute, what it missed: by its predecessor, the first by the
        driver."""
        rows = sum(session.computed for session in self.running)
        if not rows:
            return 0.0
        stage = self._stages[index]
        teller = HOME if index == 0 else self._stages[index - 1].machine.id
        row_bytes = _ID_BYTES if index == 0 else self._row_bytes
        told_s = self._lines.hop_s(teller, stage.machine.id, row_bytes * rows)
        return told_s + self._step_s(stage, Rows(answering=0, prompt=rows, picked=0))


def _take_rows(sessions: Sequence[SimulatedSession], room: int) -> list[FramePart]:
    parts: list[FramePart] = []
    for session in sessions:
        rows = min(session.unsent, room)
        if rows < 1:
            break
        room -= rows
        is_end = session.sent + rows == session.prompt + session.generated
        parts.append(FramePart(session, session.sent, rows, session.generated, int(is_end)))
    return parts
