"""A model at a hub, a coordinator that serves it from there, and whoever else serves weights over links."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from shardcompute.core.closing import Closing
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, whole
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.node.weights.client import RemoteTensors, fetch_card
from shardcompute.node.weights.pieces import Supplier
from shardcompute.node.weights.server import WeightsServer
from shardcompute.node.weights.share_ranges import stage_ranges
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.quantised.folded_file import stored_file
from shardcompute.weights.served import ServedWeights, prepare_served
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.hub import open_hubs
from shardcompute.weights.sources.rate import RateLimit
from shardcompute.weights.sources.reference import HubReference, parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocTransport, Link
from support.network.fake_hub import FakeHub, serving

REPO = "org/tiny"
WORKER = Hello(VERSION_MIN, VERSION_MAX, "worker", "weights", "home")
RETRY_DELAYS_S = (0.0, 0.01, 0.01)


@dataclass
class WeightsNode:
    """Somebody who serves weights to others over links."""

    name: str
    server: WeightsServer
    on_exit: ExitStack
    transport: InprocTransport = field(default_factory=InprocTransport)

    def __post_init__(self) -> None:
        hello = Hello(VERSION_MIN, VERSION_MAX, self.name, "", "home")
        self.listener = self.on_exit.enter_context(self.transport.listen(f"inproc://{self.name}", hello))

    def dial(self, hello: Hello = WORKER) -> Link:
        link = self.transport.dial(f"inproc://{self.name}", hello)
        threading.Thread(target=self.server.serve, args=(self.listener.accept(),), daemon=True).start()
        return link

    def as_origin(self, worker: str = "worker") -> Supplier:
        hello = Hello(VERSION_MIN, VERSION_MAX, worker, "weights", "home")
        return Supplier(self.name, lambda: self.dial(hello), is_origin=True)

    def as_peer(self) -> Supplier:
        return Supplier(self.name, self.dial)


class HubLab(Closing):
    """A model at a hub, and a coordinator that serves it from there."""

    def __init__(self, model: Path, folder: Path, form: str = "native") -> None:
        self.folder = folder
        self.on_exit = ExitStack()
        self.hub = self.on_exit.enter_context(serving(FakeHub()))
        self.hub.put_folder(REPO, model)
        self.settings = Settings(folder / "coordinator", hub_url=self.hub.url)
        self.local = self.on_exit.enter_context(
            open_checkpoint(resolve(parse_reference(str(model)), Settings(folder)))
        )
        files = resolve(HubReference(REPO), self.settings, fetch="lazy")
        self.checkpoint = self.on_exit.enter_context(open_checkpoint(files))
        self.served: ServedWeights = prepare_served(
            self.checkpoint, form, folder / "served", attachments={"vocabulary": b"words"}
        )
        self.coordinator = WeightsNode("coordinator", WeightsServer({REPO: self.served}), self.on_exit)
        self.hub.sent_bytes = 0
        self.rate: RateLimit | None = None

    def card(self) -> Card:
        return fetch_card(self.coordinator.dial, REPO)

    def sent_by_coordinator(self) -> int:
        return sum(self.coordinator.server.sent_bytes().values())

    def tensors(self, *peers: Supplier, cache: str | None = "worker", **changes: object) -> RemoteTensors:
        settings = Settings(self.folder, **{"hub_url": self.hub.url, **changes})  # type: ignore[arg-type]
        hubs = [self.on_exit.enter_context(hub) for hub in open_hubs(settings)]
        tensors = RemoteTensors(
            self.card(),
            [*peers, self.coordinator.as_origin(cache or "worker")],
            None if cache is None else ShardCache(self.folder / cache),
            hubs=hubs,
            rate=self.rate,
            retry_delays_s=RETRY_DELAYS_S,
        )
        return self.on_exit.enter_context(tensors)

    def check(
        self, tensors: RemoteTensors, stage: Stage | None = None, rank: TensorRank | None = None
    ) -> None:
        """All of a stage, or of a rank's share of it, is here, and right."""
        stage, local = stage or whole(self.checkpoint.spec), stored_file(self.local.tensors)
        tensors.prefetch(stage, rank)
        for name, spans in stage_ranges(self.card(), stage, rank).items():
            for start, stop in spans:
                part = tensors.read_bytes(name, start, stop - start)
                assert bytes(part) == bytes(local.read_bytes(name, start, stop - start))

    def close(self) -> None:
        self.on_exit.close()
