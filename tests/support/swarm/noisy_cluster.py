"""A cluster of pure control under a fake clock, whose measurements are noisy: for counting what it moves in hours."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from shardcompute.control import (
    Action,
    ClusterState,
    Event,
    Model,
    PlacementPolicy,
    Record,
    apply,
    next_actions,
    next_incarnation,
)
from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.actions import identity
from shardcompute.control.sizes import sizes_of
from support.swarm.layout_searcher import search_layout

MIB = 1 << 20
SMALL = Model(
    name="m",
    layer_bytes=(7 * MIB,) * 30,
    embedding_bytes=30 * MIB,
    head_bytes=30 * MIB,
    kv_bytes_per_token_and_layer=768,
    kv_tokens=2048,
    hidden=576,
    context_length=2048,
    weight_form="int8",
    is_head_tied=True,
)
MOVES = (
    happened.ChainPlanned,
    happened.ChainReshaped,
    happened.StandbysChosen,
    happened.DriverPlaced,
)


@dataclass(frozen=True)
class Machine:
    """What a machine truly is; what is measured of it differs."""

    memory_bytes: int = 2000 * MIB
    seconds_per_byte: float = 4e-11
    rtt_s: float = 0.0005
    """To everybody."""


class NoisyCluster:
    """Machines that obey, slowly, and measure themselves with each load; `noise` is the most that a figure is off,
    and each load that goes on beside a measurement slows that by `contention`."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        *,
        seed: int = 0,
        noise: float = 0.3,
        contention: float = 0.0,
        policy: PlacementPolicy | None = None,
        model: Model = SMALL,
    ) -> None:
        self.machines = dict(machines)
        self.state = ClusterState(placing=policy or PlacementPolicy())
        self.model = model
        self.now_s = 100.0
        self.moves: list[tuple[float, Event]] = []
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._noise = noise
        self._contention = contention
        self._under_way: dict[Action, float] = {}
        """Loads, with when they will be done."""
        for name in self.machines:
            self.join(name)
        self.measure_links()

    def tell(self, *events: Event) -> None:
        for event in events:
            self.state = apply(self.state, event)

    def request(self, **changes: Any) -> None:
        self.tell(happened.ModelRequested(self.model, **changes))

    def off(self, value: float, noise: float | None = None) -> float:
        most = self._noise if noise is None else noise
        return value * self._random.uniform(1 - most, 1 + most)

    def join(self, name: str, *, with_shards: bool = False, memory_noise: float = 0.0) -> None:
        """A machine comes, or is back."""
        machine, old = self.machines[name], self.state.nodes.get(name)
        self.tell(
            happened.NodeJoined(
                node=name,
                name=name.upper(),
                role="worker",
                address=f"tcp://{name}",
                device="cpu",
                memory_bytes=int(self.off(machine.memory_bytes, memory_noise)),
                threads=1,
                version="1",
                incarnation=next_incarnation(self.state, name),
                now_s=self.now_s,
                seconds_per_byte=self.off(machine.seconds_per_byte),
                shards=old.shards if old and with_shards else (),
                cached=old.cached if old else (),
                session_namespace=100 + list(self.machines).index(name),
                exactness="onnx-1.31.0/float32/avx2",
            )
        )

    def lose(self, name: str) -> None:
        node = self.state.nodes[name]
        self._under_way = {load: at_s for load, at_s in self._under_way.items() if load.node != name}  # type: ignore[union-attr]
        self.tell(happened.NodeLost(name, node.incarnation, "its process has ended", self.now_s))

    def restart(self) -> None:
        """The coordinator is started again; machines come back with what they hold."""
        self.tell(happened.CoordinatorStarted(self.now_s))
        for name in self.machines:
            self.join(name, with_shards=True, memory_noise=0.02)
        self.measure_links()

    def measure_links(self, share: float = 1.0) -> None:
        """Each link, or some of them by chance."""
        for a, b in combinations(sorted([*self.machines, self.state.driver]), 2):
            if self._random.random() < share:
                ends = [self.machines[end].rtt_s for end in (a, b) if end in self.machines]
                self.tell(happened.LinkMeasured(a, b, self.off(max(ends)), self.off(1e9)))

    def measure_speeds(self, share: float = 1.0) -> None:
        for name in self.machines:
            if self._random.random() < share and self.state.nodes[name].is_live:
                self._measure(name)

    def run(self, seconds: float, step_s: float = 1.0, remeasured_s: float = 0.0) -> None:
        """Let time pass; links and speeds are measured anew about every `remeasured_s` (0: only with loads)."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += step_s
            if remeasured_s:
                self.measure_links(step_s / remeasured_s)
                self.measure_speeds(step_s / remeasured_s)
            self.turn()

    def turn(self) -> None:
        for node in self.state.nodes.values():
            self.tell(happened.NodeSeen(node.id, node.incarnation, self.now_s))
        for load, done_s in list(self._under_way.items()):
            if done_s <= self.now_s:
                del self._under_way[load]
                self._loaded(load)
        actions = next_actions(self.state, self.now_s)
        for action in actions:
            self._do(action)

    @property
    def shape(self) -> list[str]:
        [chain] = self.state.live_chains()
        return [stage.node for stage in chain.stages]

    def moved(self, *kinds: type, since_s: float = 0.0) -> list[Event]:
        return [event for at_s, event in self.moves if at_s >= since_s and isinstance(event, kinds or MOVES)]

    def _do(self, action: Action) -> None:
        match action:
            case Record(event):
                self.counts[type(event).__name__] += 1
                if isinstance(event, MOVES):
                    self.moves.append((self.now_s, event))
                self.tell(event)
            case to_do.LoadShard():
                if identity(action) not in self._under_way:
                    self.counts["LoadShard"] += 1
                    # What is on its disk already takes a second.
                    held = [(c.start, c.stop) for c in self.state.nodes[action.node].cached]
                    moved = sizes_of(self.model).bytes_to_move(action.start, action.stop, held)
                    self._under_way[identity(action)] = self.now_s + 0.5 + moved / 1e8
            case to_do.UnloadShard(node, life, chain, start, stop, tensor):
                self.counts["UnloadShard"] += 1
                self.tell(happened.ShardUnloaded(node, life, chain, start, stop, tensor))
            case to_do.ConnectChain(chain=chain, epoch=epoch):
                self.tell(happened.ChainConnected(chain, epoch))
            case to_do.CopyKv(chain=chain, epoch=epoch):
                stages = tuple(each.assignment for each in action.target)
                self.tell(happened.KvCopied(chain, epoch, stages))
            case to_do.ActivateChain(chain=chain, epoch=epoch):
                self.tell(happened.ChainReady(chain, epoch))
            case to_do.FenceChain(chain, epoch):
                self.tell(happened.ChainFenced(chain, epoch))
            case to_do.SearchLayout():
                self.tell(search_layout(self.state, action, self.now_s))
            case to_do.RetireChain(chain):
                self.tell(happened.ChainReleased(chain))
            case to_do.AttachDriver() | to_do.ShareMemory():
                place = (action.chain, action.epoch, action.driver, action.session_namespace)
                self.tell(happened.DriverAttached(*place, action.kv_tokens))
            case to_do.DetachDriver():
                self.tell(happened.DriverDetached(action.chain, action.driver, action.session_namespace))
            case to_do.ReleaseNode(node, life):
                self.tell(happened.NodeLeft(node, life))

    def _loaded(self, load: Action) -> None:
        assert isinstance(load, to_do.LoadShard)
        self._measure(load.node)
        place = (load.node, load.incarnation, load.chain, load.model, load.start, load.stop)
        self.tell(happened.ShardLoaded(*place, load.size_bytes, load.tensor))

    def _measure(self, name: str) -> None:
        sizes = sizes_of(self.model)
        layer_s = self.machines[name].seconds_per_byte * sizes.work_before[-1] / self.model.layer_count
        # Machines that share cores slow each other down while they load.
        layer_s *= 1 + self._contention * len(self._under_way)
        life = self.state.nodes[name].incarnation
        measured = happened.NodeMeasured(
            node=name, incarnation=life, model=self.model.name, layer_s=self.off(layer_s)
        )
        self.tell(measured)
