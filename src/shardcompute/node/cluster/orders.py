"""Orders: models that somebody asked a running cluster to serve, remembered over restarts."""

from __future__ import annotations

import threading

import msgspec

from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.core.errors import SourceError
from shardcompute.core.kv_types import KvType
from shardcompute.node.cluster.record import ClusterNotes

_NOTE = "models"


class ServedOrder(msgspec.Struct, frozen=True):
    """A model that somebody asked a running cluster to serve, and where it comes from."""

    name: str
    reference: str
    form: str
    chains: int
    via_coordinator: bool = False
    kv_type: KvType | None = None
    """None: what the cluster is started with."""
    adapters: dict[str, str] = {}
    """Folders of the adapters beside it, by name."""
    parallel: Parallelism | None = None
    """How it is to be cut; None: nobody has said."""


class OrderBook:
    """Orders that hold, by the model's name. Methods may be called from any thread."""

    def __init__(self, notes: ClusterNotes) -> None:
        self._notes = notes
        self._lock = threading.Lock()
        orders: list[ServedOrder] = notes.read(_NOTE, _decode, [])
        self._orders = {order.name: order for order in orders}

    def remember(self, order: ServedOrder) -> None:
        """Until it is forgotten."""
        with self._lock:
            self._orders[order.name] = order
            self._keep()

    def forget(self, name: str) -> None:
        with self._lock:
            if self._orders.pop(name, None) is not None:
                self._keep()

    def all(self) -> tuple[ServedOrder, ...]:
        with self._lock:
            return tuple(self._orders.values())

    def _keep(self) -> None:
        self._notes.keep(_NOTE, msgspec.json.encode(list(self._orders.values())))


def _decode(content: bytes) -> list[ServedOrder]:
    try:
        return msgspec.json.decode(content, type=list[ServedOrder])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"The list of models is damaged: {error}") from error
