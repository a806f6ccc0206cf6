"""Churn of a simulation: machines join, fail with or without a word, leave, rest by day, and come back."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from shardcompute.control import COORDINATOR, next_incarnation
from shardcompute.control import events as happened
from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.coordinator import SimulatedCoordinator
from shardcompute.simulator.effects import CommandEffects
from shardcompute.simulator.machines import HOME, SimulatedMachine
from shardcompute.simulator.pool import PipelinePool
from shardcompute.simulator.scenario import FaultKind, PlannedFault, Scenario

_LEAVING_S = 120.0
"""So long a machine that wants to leave waits to be relieved."""
_SECONDS_PER_PROBE = 0.05
"""Besides the round trips: dialling, and a load."""


class Churn:
    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        machines: Mapping[str, SimulatedMachine],
        coordinator: SimulatedCoordinator,
        pool: PipelinePool,
        rng: random.Random,
    ) -> None:
        self._scenario = scenario
        self._terms = scenario.control
        self._agenda = agenda
        self._machines = machines
        self._coordinator = coordinator
        self._pool = pool
        self._rng = rng
        self.effects: CommandEffects | None = None
        self.failures = 0
        """Machines that were lost, in whatever way."""

    def start(self) -> None:
        for machine in self._machines.values():
            self._agenda.at(machine.joins_s, partial(self.join, machine))
            if machine.day is not None:
                self._plan_day(machine)
        for fault in self._scenario.faults:
            self._agenda.at(fault.at_s, partial(self._strike, fault))

    # Coming

    def join(self, machine: SimulatedMachine) -> None:
        """Its process starts, without layers; what it has on its disk is there."""
        if machine.is_up:
            return
        state, now_s = self._coordinator.state, self._agenda.now_s
        machine.is_up, machine.is_silent, machine.up_since_s = True, False, now_s
        machine.shards = []
        machine.incarnation = next_incarnation(state, machine.id)
        noise = self._rng.lognormvariate(0.0, self._scenario.network.noise)
        self._coordinator.post(
            happened.NodeJoined(
                node=machine.id,
                name=machine.id,
                role="worker",
                address=f"sim://{machine.id}",
                device="cpu",
                memory_bytes=machine.memory_bytes,
                threads=1,
                version="0",
                incarnation=machine.incarnation,
                now_s=now_s,
                seconds_per_byte=machine.seconds_per_byte * noise,
                overhead_s=machine.overhead_s,
                prefill_seconds_per_byte=machine.seconds_per_byte * machine.prefill_factor,
                probed_at_s=1.0,
                cached=machine.cached,
                is_standby=machine.kind.is_standby,
                rest_reason="its owner uses it" if machine.is_resting else "",
                is_at_rest=machine.is_resting,
            )
        )
        self._agenda.after(_SECONDS_PER_PROBE, partial(self._measure_links, machine, machine.incarnation))
        if machine.draw_life is not None:
            self._agenda.after(
                machine.draw_life(machine.rng), partial(self._fail, machine, machine.incarnation)
            )
        self._agenda.after(
            self._terms.served_every_s, partial(self._report_speed, machine, machine.incarnation)
        )

    def _measure_links(self, machine: SimulatedMachine, life: int) -> None:
        """To the coordinator, and to whom it is told to: all that are there, or some of them."""
        effects = self.effects
        if effects is None or not machine.answers or machine.incarnation != life:
            return
        count = self._scenario.network.probed_peers
        known = list(self._machines)
        asked = known if count < 0 else self._rng.sample(known, min(count, len(known)))
        peers = [id for id in asked if id != machine.id and self._is_there(id)]
        self._coordinator.books.messages["command"] += 1
        for peer in (HOME, *peers):
            effects.measure_link(machine.id, peer)

    def _is_there(self, id: str) -> bool:
        node = self._coordinator.state.nodes.get(id)
        return node is not None and node.is_live and self._machines[id].answers

    def _report_speed(self, machine: SimulatedMachine, life: int) -> None:
        """What steps take in service, again and again."""
        if not machine.is_up or machine.incarnation != life:
            return
        serving = any(
            pipeline.is_active and pipeline.uses(machine) for pipeline in self._pool.pipelines.values()
        )
        if serving and machine.answers and self.effects is not None:
            self.effects.report_steps(machine)
        self._agenda.after(self._terms.served_every_s, partial(self._report_speed, machine, life))

    # Going

    def _fail(self, machine: SimulatedMachine, life: int) -> None:
        if not machine.is_up or machine.incarnation != life:
            return
        drawn = machine.rng.random()
        kind: FaultKind = "kill"
        if drawn < machine.kind.leaving_share:
            kind = "leave"
        elif (
            drawn < machine.kind.leaving_share + (1 - machine.kind.leaving_share) * machine.kind.silent_share
        ):
            kind = "silence"
        self.strike(machine, kind, machine.draw_down(machine.rng))

    def _strike(self, fault: PlannedFault) -> None:
        machine = self._victim(fault)
        if machine is None:
            return
        if fault.kind == "slow":
            machine.slowdown *= fault.factor
            self._agenda.after(fault.lasts_s, partial(self._mend, machine, fault.factor))
        else:
            self.strike(machine, fault.kind, fault.lasts_s)

    def _mend(self, machine: SimulatedMachine, factor: float) -> None:
        machine.slowdown /= factor

    def _victim(self, fault: PlannedFault) -> SimulatedMachine | None:
        if fault.machine is not None:
            return list(self._machines.values())[fault.machine]
        chains, stage = self._coordinator.state.live_chains(), fault.stage or 0
        stages = chains[0].stages if chains else ()
        return self._machines[stages[stage].node] if stage < len(stages) else None

    def strike(self, machine: SimulatedMachine, kind: FaultKind, down_s: float) -> None:
        """A machine fails in this way, and is back after a while."""
        if not machine.is_up:
            return
        life = machine.incarnation
        if kind == "leave":
            self._coordinator.post(happened.NodeDrained(machine.id))
            self._agenda.after(_LEAVING_S, partial(self._leave, machine, life))
            self._agenda.after(_LEAVING_S + down_s, partial(self.join, machine))
            return
        self.failures += 1
        if kind == "silence":
            self._coordinator.hear_last_of(machine)
            machine.is_silent = True
            self._lose_frames(machine)
            self._agenda.after(down_s, partial(self._end_silence, machine, life))
            return
        self._stop(machine)
        self._agenda.after(self._terms.notice_ms / 1000, partial(self._notice, machine, life))
        self._agenda.after(down_s, partial(self.join, machine))

    def released(self, machine: SimulatedMachine) -> None:
        """Nothing is left on it, and it was told that it may go."""
        self._stop(machine)

    def _leave(self, machine: SimulatedMachine, life: int) -> None:
        if machine.is_up and machine.incarnation == life:
            self._coordinator.post(happened.NodeLeft(machine.id, life))
            self._stop(machine)

    def _stop(self, machine: SimulatedMachine) -> None:
        if machine.is_up:
            machine.up_s += self._agenda.now_s - machine.up_since_s
        machine.is_up, machine.shards = False, []
        self._lose_frames(machine)

    def _lose_frames(self, machine: SimulatedMachine) -> None:
        for pipeline in self._pool.pipelines.values():
            pipeline.lose_machine(machine)

    def _notice(self, machine: SimulatedMachine, life: int) -> None:
        """A process that ended: its links are reset, and nobody listens any more where it did."""
        now_s, state = self._agenda.now_s, self._coordinator.state
        for peer in _neighbours(machine.id, [chain.nodes for chain in state.live_chains()]):
            if peer == HOME or self._machines[peer].answers:
                broken = happened.LinkBroken(peer, machine.id, now_s)
                self._coordinator.post(broken, is_message=peer != HOME)
        broken = happened.LinkBroken(COORDINATOR, machine.id, now_s)
        self._coordinator.post(broken, is_message=False)
        lost = happened.NodeLost(machine.id, life, "its process has ended", now_s)
        self._coordinator.post(lost, is_message=False)

    def _end_silence(self, machine: SimulatedMachine, life: int) -> None:
        """Its line is back: if it was given up meanwhile, it has to join anew."""
        if not machine.is_up or machine.incarnation != life:
            return
        machine.is_silent = False
        node = self._coordinator.state.nodes.get(machine.id)
        if node is None or not node.is_live or node.incarnation != life:
            self._stop(machine)
            self.join(machine)
            return
        for pipeline in self._pool.pipelines.values():
            pipeline.regain_machine(machine)
        self._coordinator.turn_soon()

    # Days

    def _plan_day(self, machine: SimulatedMachine) -> None:
        """The next change between rest and work."""
        day = machine.day
        if day is None:
            return
        begins_s = day.rests_from * day.length_s + machine.day_shift_s
        ends_s = day.rests_to * day.length_s + machine.day_shift_s
        self._agenda.at(begins_s % day.length_s, partial(self._rest, machine))
        self._agenda.at(ends_s % day.length_s, partial(self._wake, machine))

    def _rest(self, machine: SimulatedMachine) -> None:
        if machine.day is None:
            return
        machine.is_resting = True
        self._say_rest(machine, is_at_rest=False)
        self._agenda.after(machine.day.grace_s, partial(self._say_rest, machine, is_at_rest=True))
        self._agenda.after(machine.day.length_s, partial(self._rest, machine))

    def _wake(self, machine: SimulatedMachine) -> None:
        if machine.day is None:
            return
        machine.is_resting = False
        self._say_rest(machine, is_at_rest=False)
        self._agenda.after(machine.day.length_s, partial(self._wake, machine))

    def _say_rest(self, machine: SimulatedMachine, *, is_at_rest: bool) -> None:
        """What it says of itself; one that is down says it when it joins."""
        if not machine.answers or (is_at_rest and not machine.is_resting):
            return
        reason = "its owner uses it" if machine.is_resting else ""
        self._coordinator.post(happened.NodeRested(machine.id, machine.incarnation, reason, is_at_rest))


def _neighbours(node: str, chains: Sequence[Sequence[str]]) -> list[str]:
    """Who has a link with a machine, in chains."""
    found: list[str] = []
    for nodes in chains:
        for a, b in pairwise((HOME, *nodes, HOME)):
            if node in (a, b):
                found.append(b if a == node else a)
    return sorted(set(found))
