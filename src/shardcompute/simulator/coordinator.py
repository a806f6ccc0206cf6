"""Coordinator of a simulation: the real control code in a shell without threads, links or files.

What decides is `control`: `apply`, `next_actions` and their policies, the very functions that a cluster runs. The shell
does what `node/coordinator/coordinator.py` does: it applies what happened, asks what is next, records decisions and
starts each command once. Heartbeats are brought in when somebody looks, all at once, at the times at which they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shardcompute.control import Action, ClusterState, Event, Record, apply, next_actions
from shardcompute.control.actions import identity
from shardcompute.control.events import CoordinatorStarted, NodeSeen, NodesSeen
from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.bookkeeping import Books
from shardcompute.simulator.machines import HOME, SimulatedMachine
from shardcompute.simulator.scenario import ControlTerms


class Effects(Protocol):
    """What commands bring about."""

    def start(self, action: Action) -> None: ...


class SimulatedCoordinator:
    def __init__(
        self,
        agenda: Agenda,
        terms: ControlTerms,
        machines: Mapping[str, SimulatedMachine],
        books: Books,
        since_s: float,
    ) -> None:
        self._agenda = agenda
        self._terms = terms
        self._machines = machines
        self.books = books
        self._since_s = since_s
        self.state = ClusterState(driver=HOME, health=terms.health, placing=terms.placing)
        self.effects: Effects | None = None
        self._under_way: set[Action] = set()
        self._turn_at_s: float | None = None
        self._turned_s = -1e9
        self._counted_s = 0.0

    def start(self) -> None:
        self.apply(CoordinatorStarted(0.0))
        self._tick()

    def post(self, event: Event, *, is_message: bool = True) -> None:
        """Something happened: of a message, a node told of it."""
        if is_message:
            self.books.messages[type(event).__name__] += 1
        self.apply(event)
        self.turn_soon()

    def forget(self, action: Action) -> None:
        """It was not done, and may be asked for again."""
        self._under_way.discard(identity(action))
        self.turn_soon()

    def apply(self, event: Event) -> None:
        before = self.state
        with self.books.changed(event):
            self.state = apply(before, event)
        if self.state is not before:
            self.books.applied(event)

    def hear_last_of(self, machine: SimulatedMachine) -> None:
        """A machine is about to say nothing any more: what it said before has been heard."""
        if self._is_live(machine):
            beat_s = machine.last_beat_s(self._agenda.now_s, self.state.health.heartbeat_interval_s)
            self.apply(NodesSeen((NodeSeen(machine.id, machine.incarnation, beat_s),)))

    def turn_soon(self) -> None:
        """Look what is to be done: now, or when the turn before is over."""
        if self._turn_at_s is None:
            self._turn_at_s = max(self._agenda.now_s, self._turned_s + self._terms.turn_s)
            self._agenda.at(self._turn_at_s, self._turn)

    def count_time(self) -> None:
        """Book how long the state was as it is."""
        begun_s = max(self._counted_s, self._since_s)
        if self._agenda.now_s > begun_s:
            self.books.lived(self.state, self._agenda.now_s - begun_s)
        self._counted_s = self._agenda.now_s

    # Turns

    def _tick(self) -> None:
        self.turn_soon()
        doubtful = any(node.status == "suspected" for node in self.state.nodes.values())
        hidden = any(
            not machine.answers and machine.incarnation and self._is_live(machine)
            for machine in self._machines.values()
        )
        wait_s = self._terms.tick_s if doubtful or hidden else self._terms.calm_tick_s
        self._agenda.after(max(wait_s, self._terms.turn_s), self._tick)

    def _is_live(self, machine: SimulatedMachine) -> bool:
        node = self.state.nodes.get(machine.id)
        return node is not None and node.is_live and node.incarnation == machine.incarnation

    def _turn(self) -> None:
        self._turn_at_s, self._turned_s = None, self._agenda.now_s
        self.count_time()
        self._hear_heartbeats()
        now_s = self._agenda.now_s
        with self.books.thought() as turn:
            actions = next_actions(self.state, now_s)
            turn.has_decided = any(isinstance(action, Record) for action in actions)
        due: list[Action] = []
        for action in actions:
            if isinstance(action, Record):
                self.books.decided(action.event, now_s)
                self.apply(action.event)
            else:
                due.append(action)
        self._begin(due)

    def _hear_heartbeats(self) -> None:
        """Of all whose newest one is not known yet, and matters: they are sent far more often than somebody looks."""
        interval_s, now_s = self.state.health.heartbeat_interval_s, self._agenda.now_s
        stale_s = now_s - self.state.health.suspect_after_s / 2
        seen: list[NodeSeen] = []
        for machine in self._machines.values():
            if not machine.answers or not self._is_live(machine):
                continue
            node = self.state.nodes[machine.id]
            if node.last_seen_s > stale_s and node.status != "suspected":
                continue
            beat_s = machine.last_beat_s(now_s, interval_s)
            if beat_s > node.last_seen_s:
                seen.append(NodeSeen(machine.id, machine.incarnation, beat_s))
        if seen:
            self.apply(NodesSeen(tuple(sorted(seen, key=lambda each: each.now_s))))

    def _begin(self, actions: list[Action]) -> None:
        """Start what is not under way yet; what is no longer asked for may be asked for again later."""
        due: set[Action] = set()
        for action in actions:
            same = identity(action)
            due.add(same)
            if same not in self._under_way:
                self._under_way.add(same)
                self.books.actions[type(action).__name__] += 1
                if self.effects is not None:
                    self.effects.start(action)
        self._under_way &= due
