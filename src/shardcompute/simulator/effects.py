"""Effects of commands in a simulation: how long each takes, and the events that tell of it.

The counterpart of `node/coordinator/executor.py`. Machines carry commands out if they are there; of those that are not
nothing comes back, or that a link broke.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

from shardcompute.control import Action, Model
from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.placement.place import Placement, place_thoroughly
from shardcompute.control.placement.request import placement_request
from shardcompute.control.sizes import shape_of, sizes_of
from shardcompute.control.state import Holding, Shard, new_stages
from shardcompute.simulator.agenda import Agenda
from shardcompute.simulator.coordinator import SimulatedCoordinator
from shardcompute.simulator.machines import HOME, Lines, SimulatedMachine
from shardcompute.simulator.pipeline import StageOnMachine
from shardcompute.simulator.pool import PipelinePool
from shardcompute.simulator.scenario import Scenario

_RETRY_S = 0.2
"""After which a chain that could not be connected is tried again."""
_MBIT = 125_000.0


class CommandEffects:
    def __init__(
        self,
        scenario: Scenario,
        model: Model,
        agenda: Agenda,
        machines: Mapping[str, SimulatedMachine],
        lines: Lines,
        coordinator: SimulatedCoordinator,
        pool: PipelinePool,
        rng: random.Random,
        on_release: Callable[[SimulatedMachine], None],
    ) -> None:
        self._scenario = scenario
        self._terms = scenario.control
        self._model = model
        self._agenda = agenda
        self._machines = machines
        self._lines = lines
        self._coordinator = coordinator
        self._pool = pool
        self._rng = rng
        self._on_release = on_release
        self._serving: Counter[str] = Counter()
        """Loads that each source serves now."""
        self._recovery: dict[str, frozenset[int] | None] = {}

    def start(self, action: Action) -> None:
        match action:
            case to_do.LoadShard():
                self._command(action, action.node, partial(self._load, action))
            case to_do.UnloadShard(node=node):
                self._command(action, node, partial(self._unload, action))
            case to_do.CopyKv(chain=chain, epoch=epoch, stages=stages, target=target):
                # Sessions of a simulation are replayed: what was validated against measurements stays as it was.
                self._count(len(stages) + len(target))
                moved = tuple(each.assignment for each in target)
                self._tell(happened.KvCopied(chain, epoch, moved))
            case to_do.ConnectChain():
                self._connect(action)
            case to_do.ActivateChain():
                self._activate(action)
            case to_do.FenceChain(chain, epoch, nodes):
                self._count(len(nodes))
                self._pool.fence(chain, epoch)
                self._tell(happened.ChainFenced(chain, epoch))
            case to_do.RetireChain(chain):
                self._pool.retire(chain)
                self._tell(happened.ChainReleased(chain))
            case to_do.ProbeLink(node, peer):
                self._command(action, node, partial(self._probe, node, peer))
            case to_do.SearchLayout():
                self._search(action)
            case to_do.ReleaseNode(node, _):
                self._command(action, node, partial(self._release, node))
            case _:
                # Reports to drivers; drivers on other machines are not simulated.
                self._count(1)

    def _count(self, commands: int) -> None:
        """Each is answered."""
        self._coordinator.books.messages["command"] += commands
        self._coordinator.books.messages["reply"] += commands

    def _tell(self, event: happened.Event) -> None:
        """What follows at once, from what the coordinator itself did."""
        self._agenda.after(0.0, partial(self._coordinator.post, event, is_message=False))

    def _command(self, action: Action, node: str, carry_out: Callable[[], None]) -> None:
        """Have a machine do something; one that is not there does not, and is asked again once it is back."""
        self._count(1)
        machine = self._machines[node]
        life = machine.incarnation

        def arrive() -> None:
            if machine.answers and machine.incarnation == life:
                carry_out()
            else:
                self._agenda.after(_RETRY_S, partial(self._coordinator.forget, action))

        self._agenda.after(self._lines.rtt_s(HOME, node) / 2, arrive)

    # Shards

    def _load(self, action: to_do.LoadShard) -> None:
        machine, sizes = self._machines[action.node], sizes_of(self._model)
        held = [(each.start, each.stop) for each in machine.cached]
        missing_bytes = sizes.bytes_to_move(action.start, action.stop, held)
        source, seconds = self._fetch_s(machine, action, missing_bytes)
        self._serving[source] += 1
        life = machine.incarnation

        def loaded() -> None:
            self._serving[source] -= 1
            if not machine.answers or machine.incarnation != life:
                return
            shard = Shard(action.chain, action.model, action.start, action.stop, action.size_bytes)
            machine.shards.append(shard)
            machine.cached = (*machine.cached, Holding(action.model, action.start, action.stop))
            place = (action.chain, action.model, action.start, action.stop)
            self._coordinator.post(happened.ShardLoaded(machine.id, life, *place, action.size_bytes))
            self.report_speed(machine)

        self._agenda.after(seconds + self._terms.open_s, loaded)

    def _fetch_s(
        self, machine: SimulatedMachine, action: to_do.LoadShard, missing_bytes: int
    ) -> tuple[str, float]:
        """From the peer that has most of it, or from the origin where that is quicker; whoever serves several shares
        its line among them."""
        origin = self._terms.origin_mbit * _MBIT / (1 + self._serving[HOME])
        best, rate = HOME, min(origin, machine.line.down_bytes_per_s)
        for source in action.sources[:4]:
            peer = self._machines[source.node]
            share = self._lines.bytes_per_s(peer.id, machine.id) / (1 + self._serving[peer.id])
            if source.start <= action.start and source.stop >= action.stop and share > rate:
                best, rate = peer.id, share
        return best, missing_bytes / rate

    def _unload(self, action: to_do.UnloadShard) -> None:
        machine = self._machines[action.node]
        place = (action.chain, action.start, action.stop, action.tensor)
        machine.shards = [each for each in machine.shards if each.place != place]
        self._coordinator.post(happened.ShardUnloaded(action.node, action.incarnation, *place))

    def report_steps(self, machine: SimulatedMachine) -> None:
        """What steps in service took, as a machine finds it in a window of many."""
        loaded_s = self._layer_s(machine)
        for shard in machine.shards:
            noise = self._rng.lognormvariate(0.0, self._scenario.network.noise)
            self._coordinator.post(
                happened.StageTimed(
                    node=machine.id,
                    incarnation=machine.incarnation,
                    chain=shard.chain,
                    model=shard.model,
                    start=shard.start,
                    stop=shard.stop,
                    loaded_s=loaded_s,
                    layer_s=loaded_s * machine.slowdown * noise,
                    shape=shape_of(self._model),
                    now_s=self._agenda.now_s,
                )
            )

    def _layer_s(self, machine: SimulatedMachine) -> float:
        sizes = sizes_of(self._model)
        return sizes.work_before[-1] / self._model.layer_count * machine.seconds_per_byte

    def report_speed(self, machine: SimulatedMachine) -> None:
        """What an average layer takes, as a machine finds it when it has loaded some."""
        noise = self._rng.lognormvariate(0.0, self._scenario.network.noise)
        layer_s = self._layer_s(machine) * machine.slowdown * noise
        self._coordinator.post(
            happened.NodeMeasured(
                node=machine.id,
                incarnation=machine.incarnation,
                overhead_s=machine.overhead_s,
                model=self._model.name,
                layer_s=layer_s,
                shape=shape_of(self._model),
                prefill_layer_s=layer_s * machine.prefill_factor,
            )
        )

    # Chains

    def _connect(self, action: to_do.ConnectChain) -> None:
        self._count(len(action.stages))
        stages = [self._machines[stage.node] for stage in action.stages]
        ring = [HOME, *(machine.id for machine in stages), HOME]
        told_s = max(self._lines.rtt_s(HOME, machine.id) for machine in stages)
        dialled_s = max(self._lines.rtt_s(a, b) for a, b in pairwise(ring))
        used = new_stages(action.used_stages, [stage.assignment for stage in action.stages])
        # Stages that tell others what they missed come last, after a round of their own.
        rounds = 2 if used else 1
        needed_s = self._terms.connect_ms / 1000 + rounds * (told_s + dialled_s)
        self._agenda.after(needed_s, partial(self._connected, action, stages, used))

    def _connected(
        self,
        action: to_do.ConnectChain,
        stages: list[SimulatedMachine],
        used: frozenset[int] | None,
    ) -> None:
        if all(machine.answers for machine in stages):
            self._recovery[action.chain] = used
            event = happened.ChainConnected(action.chain, action.epoch, action.kv_tokens)
            self._coordinator.post(event, is_message=False)
            return
        is_silent = any(machine.is_silent for machine in stages)
        wait_s = self._terms.answer_timeout_s if is_silent else _RETRY_S
        self._agenda.after(wait_s, partial(self._not_connected, action))

    def _not_connected(self, action: to_do.ConnectChain) -> None:
        """Unless somebody has reported the broken link already, try again in a new epoch."""
        chain = self._coordinator.state.chains.get(action.chain)
        if chain is not None and chain.epoch == action.epoch and not chain.is_interrupted:
            broken = happened.LinkBroken(HOME, action.stages[0].node, self._agenda.now_s)
            self._coordinator.post(broken, is_message=False)

    def _activate(self, action: to_do.ActivateChain) -> None:
        stages = [
            StageOnMachine(self._machines[stage.node], stage.start, stage.stop) for stage in action.stages
        ]
        pipeline = self._pool.pipeline(action.chain)
        pipeline.activate(action.epoch, stages, self._recovery.get(action.chain), self._agenda.now_s)
        self._pool.serve_backlog()
        self._tell(happened.ChainReady(action.chain, action.epoch))

    def _search(self, action: to_do.SearchLayout) -> None:
        """For so many steps as the scenario allows; the coordinator's own search has so many seconds."""
        state, left = self._coordinator.state, self._terms.search_steps
        chain = state.chains.get(action.chain)
        if chain is None or chain.epoch != action.epoch:
            return
        if not left:
            self._tell(happened.LayoutFound(action.chain, action.epoch, (), self._agenda.now_s))
            return

        def should_stop() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        found = place_thoroughly(
            placement_request(state, self._model, self._agenda.now_s, chain=chain), should_stop
        )
        stages = found.assignments if isinstance(found, Placement) else ()
        self._tell(happened.LayoutFound(action.chain, action.epoch, stages, self._agenda.now_s))

    # Nodes and links

    def _probe(self, node: str, peer: str) -> None:
        there = HOME if peer == HOME else self._machines[peer]
        if there == HOME or (isinstance(there, SimulatedMachine) and there.answers):
            self.measure_link(node, peer)
        self._coordinator.post(happened.LinkProbed(node, peer, self._agenda.now_s))

    def measure_link(self, node: str, peer: str) -> None:
        noise = [self._rng.lognormvariate(0.0, self._scenario.network.noise) for _ in range(2)]
        rtt_s, rate = self._lines.rtt_s(node, peer), self._lines.bytes_per_s(node, peer)
        self._coordinator.post(happened.LinkMeasured(node, peer, rtt_s * noise[0], rate * noise[1]))

    def _release(self, node: str) -> None:
        machine = self._machines[node]
        self._coordinator.post(happened.NodeLeft(node, machine.incarnation))
        self._on_release(machine)
