"""A small model, machines that join, and a cluster that does what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
from support.models.plain_model import plain_model
from support.swarm.layout_searcher import search_layout

MODEL = plain_model()


class Cluster:
    """Applies events and answers every command at once; `log` keeps the actions in order."""

    def __init__(self) -> None:
        # Reading a byte takes a second here, so that hops of a millisecond count for nothing.
        # Layouts may move at once: how long they are kept is tested on its own.
        placing = PlacementPolicy(source_bytes_per_s=1e3, least_lifetime_s=0.0)
        self.state = ClusterState(placing=placing)
        self.now_s = 0.0
        self.log: list[Action] = []
        self.failing: set[str] = set()

    def tell(self, *events: Event) -> None:
        for event in events:
            self.state = apply(self.state, event)

    def join(self, node: str, memory_bytes: int = 1000, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "node": node,
            "name": node.upper(),
            "role": "worker",
            "address": f"tcp://{node}:1",
            "device": "cpu",
            "memory_bytes": memory_bytes,
            "threads": 2,
            "version": "0.1.0",
            "incarnation": next_incarnation(self.state, node),
            "now_s": self.now_s,
            "seconds_per_byte": 1.0,
        }
        self.tell(happened.NodeJoined(**{**fields, **changes}))

    def lose(self, node: str) -> None:
        self.tell(happened.NodeLost(node, self.state.nodes[node].incarnation, "died", self.now_s))

    def seen(self) -> None:
        for node in self.state.nodes.values():
            self.tell(happened.NodeSeen(node.id, node.incarnation, self.now_s))

    def answer(self, action: Action) -> None:
        self.log.append(action)
        match action:
            case Record(event):
                self.tell(event)
            case to_do.LoadShard():
                place = (action.node, action.incarnation, action.chain, action.model, action.start)
                if action.node in self.failing:
                    self.tell(happened.ShardFailed(*place, action.stop, "no disk", self.now_s))
                else:
                    loaded = (action.stop, action.size_bytes, action.tensor)
                    self.tell(happened.ShardLoaded(*place, *loaded))
            case to_do.SeedWeights():
                place = (action.node, action.incarnation, action.model, action.start, action.stop)
                self.tell(happened.WeightsSeeded(*place))
            case to_do.UnloadShard(node, life, chain, start, stop, tensor):
                self.tell(happened.ShardUnloaded(node, life, chain, start, stop, tensor))
            case to_do.ConnectChain(chain=chain, epoch=epoch):
                self.tell(happened.ChainConnected(chain, epoch))
            case to_do.CopyKv(chain=chain, epoch=epoch):
                stages = tuple(each.assignment for each in action.target)
                self.tell(happened.KvCopied(chain, epoch, stages))
            case to_do.ActivateChain(chain=chain, epoch=epoch):
                self.tell(happened.ChainReady(chain, epoch))
            case to_do.SearchLayout():
                self.tell(search_layout(self.state, action, self.now_s))
            case to_do.RetireChain(chain):
                self.tell(happened.ChainReleased(chain))
            case to_do.ProbeLink(node, peer):
                self.tell(happened.LinkProbed(node, peer, self.now_s))
            case to_do.FenceChain(chain, epoch):
                self.tell(happened.ChainFenced(chain, epoch))
            case to_do.AttachDriver() | to_do.ShareMemory():
                place = (action.chain, action.epoch, action.driver, action.session_namespace)
                self.tell(happened.DriverAttached(*place, action.kv_tokens))
            case to_do.DetachDriver():
                self.tell(happened.DriverDetached(action.chain, action.driver, action.session_namespace))
            case to_do.ReleaseNode(node, life):
                self.tell(happened.NodeLeft(node, life))

    def settle(self) -> list[Action]:
        """Everything that was done until nothing was left to do but to report."""
        self.log = []
        for _ in range(30):
            self.seen()
            actions = next_actions(self.state, self.now_s)
            if all(isinstance(action, to_do.ReportUnservable) for action in actions):
                return self.log
            for action in actions:
                self.answer(action)
        raise AssertionError("does not come to rest")

    def shape(self, chain: str = "m#1") -> list[tuple[str, int, int]]:
        return [(stage.node, stage.start, stage.stop) for stage in self.state.chains[chain].stages]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def model() -> Model:
    return MODEL


@pytest.fixture
def serving(cluster: Cluster) -> Callable[..., Cluster]:
    """A cluster of machines with these memories, named a, b, …, that serves `MODEL`."""

    def build(*memories: int, chain_count: int = 1) -> Cluster:
        for name, memory_bytes in zip("abcdef", memories, strict=False):
            cluster.join(name, memory_bytes)
        cluster.tell(happened.ModelRequested(MODEL, chain_count))
        cluster.settle()
        return cluster

    return build
