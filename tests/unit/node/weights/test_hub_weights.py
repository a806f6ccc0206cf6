"""Weights that stay at the hub: workers read their own ranges there, and the coordinator keeps none of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardcompute.core.closing import Closing
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, whole
from shardcompute.node.weights import client as weights_client
from shardcompute.node.weights.client import RemoteTensors, fetch_card
from shardcompute.node.weights.pieces import Supplier
from shardcompute.node.weights.server import CachedModels, WeightsServer
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.served import ServedWeights, prepare_served
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.hub import open_hubs
from shardcompute.weights.sources.reference import HubReference, parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocTransport, Link
from support.models.tiny import save_tiny
from support.network.fake_hub import FakeHub, Fault, serving

REPO = "org/tiny"
WEIGHTS = "model.safetensors"
WORKER = Hello(VERSION_MIN, VERSION_MAX, "worker", "weights", "home")
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors in several pieces each, and no proxy on the way to the hub."""
    monkeypatch.setattr(weights_client, "PIECE_BYTES", 4096)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Node:
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


class Lab(Closing):
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
        self.coordinator = Node("coordinator", WeightsServer({REPO: self.served}), self.on_exit)
        self.hub.sent_bytes = 0

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
            retry_delays_s=(0.0,),
        )
        return self.on_exit.enter_context(tensors)

    def check(self, tensors: RemoteTensors, stage: Stage | None = None) -> None:
        """All of a stage is here, and right."""
        tensors.prefetch(stage or whole(self.checkpoint.spec))
        for name in self.card().stage_tensors(stage or whole(self.checkpoint.spec)):
            size = tensors.entries[name].size_bytes
            assert bytes(tensors.read_bytes(name, 0, size)) == bytes(
                self.local.tensors.read_bytes(name, 0, size)
            )

    def close(self) -> None:
        self.on_exit.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama-biases", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lab(model: Path, tmp_path: Path) -> Iterator[Lab]:
    with Lab(model, tmp_path) as opened:
        yield opened


def test_a_worker_reads_its_own_part_at_the_hub(lab: Lab) -> None:
    stage = Stage(1, 2, lab.checkpoint.spec.layer_count)
    lab.check(lab.tensors(), stage)
    needed = lab.card().stage_bytes(stage)
    assert needed <= lab.hub.sent_bytes < needed + lab.local.files.total_bytes // 10
    assert lab.sent_by_coordinator() == 0
    assert not list((lab.folder / "coordinator").rglob("*"))


def test_what_is_no_part_of_the_source_comes_from_the_coordinator(lab: Lab) -> None:
    tensors = lab.tensors()
    stored = next(name for name in tensors.entries if name.startswith("@"))
    assert bytes(tensors.read_bytes(stored, 0, 5)) == b"words"
    assert lab.hub.sent_bytes == 0


def test_unreachable_hub_is_replaced_by_the_coordinator(lab: Lab) -> None:
    lab.check(lab.tensors(hub_url="http://127.0.0.1:9"))
    assert lab.sent_by_coordinator() >= lab.card().stage_bytes(whole(lab.checkpoint.spec))


def test_second_reader_may_ask_the_first(lab: Lab) -> None:
    lab.check(lab.tensors(cache="first"))
    lab.hub.every["/resolve/"] = Fault(503)
    peer = Node("peer", WeightsServer(CachedModels(ShardCache(lab.folder / "first"))), lab.on_exit)
    lab.check(lab.tensors(peer.as_peer(), cache="second", offline=True))
    assert sum(peer.server.sent_bytes().values()) > 0
