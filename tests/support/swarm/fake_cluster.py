"""A cluster without sockets: the control room's own state, everything it asks for done at once, real books.

Has what `node.admin.admin.ClusterAdmin` needs of a `node.cluster.Cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardcompute.control import (
    Action,
    ClusterState,
    Event,
    PlacementPolicy,
    Record,
    apply,
    next_actions,
)
from shardcompute.control import actions as to_do
from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.state import UnusedDevice
from shardcompute.control.transitions.node_transitions import next_incarnation
from shardcompute.node.cluster import ServedOrder
from shardcompute.node.cluster.ledger.keeper import LedgerKeeper
from shardcompute.node.cluster.ledger.meters import MeterReadings
from shardcompute.node.cluster.served_files import ServedFiles
from shardcompute.node.cluster.teaching import DraftHeadTeaching
from shardcompute.node.coordinator.journal import RecordStatus
from shardcompute.node.coordinator.shared import KnownCoordinator
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.service import ServedModel, ServiceLoad
from shardcompute.node.telemetry.quota import QuotaLedger
from shardcompute.node.telemetry.request_log import RequestLog
from shardcompute.security import KeyBook, KeySummary, Role, TokenBook, TokenSummary
from shardcompute.security.pairing.codes import PairingCode, PairingDesk
from shardcompute.wire import StageTiming
from support.models.plain_model import plain_model
from support.swarm.layout_searcher import search_layout

NOW_S = 1_000.0
MODEL = plain_model(name="org/tiny")


class FakeCoordinator:
    """Applies what is posted; `settle` carries out everything that follows."""

    def __init__(self) -> None:
        # Reading a byte takes a second here, so that hops of a millisecond count for nothing.
        self.state = ClusterState(
            driver="head", placing=PlacementPolicy(source_bytes_per_s=1e3, least_lifetime_s=0.0)
        )
        self._listeners: list[Callable[[ClusterState], None]] = []

    def listen(self, listener: Callable[[ClusterState], None]) -> None:
        self._listeners.append(listener)

    def post(self, event: Event) -> None:
        self.state = apply(self.state, event)
        for listener in self._listeners:
            listener(self.state)

    def settle(self) -> None:
        for _ in range(30):
            for node in self.state.nodes.values():
                self.post(happened.NodeSeen(node.id, node.incarnation, NOW_S))
            actions = next_actions(self.state, NOW_S)
            if all(isinstance(action, to_do.ReportUnservable) for action in actions):
                return
            for action in actions:
                self._carry_out(action)
        raise AssertionError("does not come to rest")

    def _carry_out(self, action: Action) -> None:
        match action:
            case Record(event):
                self.post(event)
            case to_do.LoadShard():
                place = (action.node, action.incarnation, action.chain, action.model, action.start)
                self.post(happened.ShardLoaded(*place, action.stop, action.size_bytes))
            case to_do.UnloadShard(node, life, chain, start, stop):
                self.post(happened.ShardUnloaded(node, life, chain, start, stop))
            case to_do.ConnectChain(chain=chain, epoch=epoch):
                self.post(happened.ChainConnected(chain, epoch))
            case to_do.CopyKv(chain=chain, epoch=epoch):
                stages = tuple(each.assignment for each in action.target)
                self.post(happened.KvCopied(chain, epoch, stages))
            case to_do.ActivateChain(chain=chain, epoch=epoch):
                self.post(happened.ChainReady(chain, epoch))
            case to_do.SearchLayout():
                self.post(search_layout(self.state, action, NOW_S))
            case to_do.RetireChain(chain):
                self.post(happened.ChainReleased(chain))
            case to_do.ProbeLink(node, peer):
                self.post(happened.LinkProbed(node, peer, NOW_S))
            case to_do.FenceChain(chain, epoch):
                self.post(happened.ChainFenced(chain, epoch))
            case to_do.AttachDriver() | to_do.ShareMemory():
                place = (action.chain, action.epoch, action.driver, action.session_namespace)
                self.post(happened.DriverAttached(*place, action.kv_tokens))
            case to_do.DetachDriver():
                self.post(happened.DriverDetached(action.chain, action.driver, action.session_namespace))
            case to_do.ReleaseNode(node, life):
                self.post(happened.NodeLeft(node, life))


class FakeSwarm:
    def __init__(self) -> None:
        self.requests = RequestLog(clock=lambda: NOW_S)
        self.busy = ServiceLoad(0, 0, 0.0)
        self.unopened: set[str] = set()
        self.running: dict[str, int] = {}
        self.paused: dict[str, str] = {}
        self.newest: dict[str, Sequence[StageTiming]] = {}

    def load(self) -> ServiceLoad:
        return self.busy

    def models(self) -> Sequence[ServedModel]:
        """Those that are open; nobody asks these for more than whether they see."""
        return ()

    def draft_heads(self) -> dict[str, str]:
        return {}

    def serves(self, model: str) -> bool:
        return model not in self.unopened

    def answering(self, model: str) -> int:
        return self.running.get(model, 0)

    def pause(self, model: str, successor: str) -> None:
        self.paused[model] = successor

    def resume(self, model: str) -> None:
        del self.paused[model]

    def chains_of(self, model: str) -> set[str]:
        return set()

    def timings(self) -> dict[str, Sequence[StageTiming]]:
        return self.newest


OLD_CARD = UnusedDevice("cuda:1", "Old Card", "its driver is too old", "update its driver", 2 << 30)
H200: dict[str, Any] = {
    "device": "cuda:0",
    "backend": "torch",
    "device_label": "NVIDIA H200",
    "device_bytes": 140 << 30,
    "unused_devices": (OLD_CARD,),
}
"""What a node says of a GPU on which it computes, and of one on which it cannot."""


class FakeAccess:
    """Real books, on no record."""

    def __init__(self) -> None:
        self._tokens = TokenBook()
        self._keys = KeyBook()
        self.pairing = PairingDesk()

    def listen_to_joins(self, listener: Callable[[str, str, str], None]) -> None:
        self.tell_of_join = listener

    def tokens_used_by(self, node: str) -> tuple[str, ...]:
        return self._tokens.used_by(node, 0.0)

    def create_token(
        self,
        *,
        life_s: float = 86_400.0,
        max_uses: int | None = None,
        roles: Collection[Role] = (Role.WORKER, Role.DRIVER),
    ) -> str:
        self._tokens, token = self._tokens.create(
            addresses=["127.0.0.1:7421"],
            fingerprint="ab" * 32,
            cluster="home",
            now_s=0.0,
            roles=roles,
            life_s=life_s,
            max_uses=max_uses,
        )
        return token.encode()

    def watch_pairing(self, listener: Callable[[str, bool], None]) -> None:
        self.paired = listener

    def open_pairing(self) -> PairingCode:
        return self.pairing.open()

    def tokens(self) -> tuple[TokenSummary, ...]:
        return self._tokens.summaries(0.0)

    def revoke_token(self, token_id: str) -> None:
        self._tokens = self._tokens.revoke(token_id)

    def create_key(self, label: str, **options: Any) -> str:
        self._keys, key = self._keys.create(label=label, now_s=NOW_S, **options)
        return key

    def keys(self) -> tuple[KeySummary, ...]:
        return self._keys.summaries()

    def find_key(self, key: str) -> KeySummary | None:
        return self._keys.find(key, now_s=NOW_S)

    def revoke_key(self, key_id: str) -> None:
        self._keys = self._keys.revoke(key_id)

    @property
    def key_book(self) -> KeyBook:
        return self._keys


class FakeCluster:
    name = "home"
    node = "head"
    url = "tcp://127.0.0.1:7420"
    join_port = 7421
    canaries: Any = None

    def __init__(self) -> None:
        self.options = SimpleNamespace(kv_tokens=10, kv_type="float32", context_length=64)
        self.coordinator = FakeCoordinator()
        self.pool = FakeSwarm()
        self.revoked: list[str] = []
        self.record_status = RecordStatus()
        self.ledger = LedgerKeeper(None, "", lambda: (), MeterReadings)
        self.served: list[tuple[str, str, int]] = []
        self.kv_types: list[str | None] = []
        self.shapes: list[Parallelism | None] = []
        self.orders: list[ServedOrder] = []
        self.sent_bytes: dict[str, int] = {}
        self.known_coordinators: tuple[KnownCoordinator, ...] = ()
        self.access = FakeAccess()
        self.quota = QuotaLedger()
        self.draft_heads = DraftHeadTeaching(
            ServedFiles(Path("nowhere")),
            self.pool,  # type: ignore[arg-type]
            self.coordinator,  # type: ignore[arg-type]
            Peer(self.node, self.url),
            None,
        )
        """Of no model: none was opened here."""

    def listen_to_usage(self, count: Callable[..., None]) -> None:
        self.count_usage = count

    def watch_record(self, listener: Callable[[RecordStatus], None]) -> None:
        self.tell_of_record = listener

    def coordinators(self) -> tuple[KnownCoordinator, ...]:
        return self.known_coordinators

    def weights_sent_bytes(self) -> dict[str, int]:
        return self.sent_bytes

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
            "incarnation": next_incarnation(self.coordinator.state, node),
            "now_s": NOW_S,
            "seconds_per_byte": 1.0,
        }
        self.coordinator.post(happened.NodeJoined(**{**fields, **changes}))

    def serve(
        self,
        checkpoint: Any,
        *,
        form: str,
        chains: int = 1,
        kv_type: str | None = None,
        parallel: Parallelism | None = None,
        progress: object = None,
    ) -> None:
        self.served.append((checkpoint.name, form, chains))
        self.kv_types.append(kv_type)
        self.shapes.append(parallel)

    def remember(self, order: ServedOrder) -> None:
        self.orders.append(order)

    def files_of(self, model: str) -> None:
        """Nothing was opened here."""

    def remembered(self) -> tuple[ServedOrder, ...]:
        return tuple(self.orders)

    def drop(self, model: str) -> None:
        self.coordinator.post(happened.ModelDropped(model))

    def keep_layout(self, model: str, is_kept: bool) -> None:
        self.coordinator.post(happened.LayoutKept(model, is_kept))

    def drain(self, node: str) -> None:
        self.coordinator.post(happened.NodeDrained(node))

    def revoke_node(self, node: str) -> bool:
        self.revoked.append(node)
        self.coordinator.post(happened.NodeLeft(node, self.coordinator.state.nodes[node].incarnation))
        return not self.record_status.waiting


def serving_cluster(*memories: int, chains: int = 1) -> FakeCluster:
    """Machines a, b, … with these memories that serve `MODEL`."""
    cluster = FakeCluster()
    for name, memory_bytes in zip("abcdef", memories, strict=False):
        cluster.join(name, memory_bytes)
    cluster.coordinator.post(happened.ModelRequested(MODEL, chains))
    cluster.coordinator.settle()
    return cluster
