"""A worker's shards come into its memory one after the other, and never more than fit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from shardcompute.control.state import RankPlace, Shard
from shardcompute.core.errors import BackendError, CapacityError, DeviceMemoryError, LinkError
from shardcompute.core.settings import Settings
from shardcompute.models.draft_head import DRAFT_HEAD, encode_draft_head
from shardcompute.models.vocabulary import Vocabulary, encode_vocabulary
from shardcompute.node.rpc.commands import LoadLayers, Peer, TakeDraftHead
from shardcompute.node.weights.server import WeightsServer
from shardcompute.node.worker.shard_loader import MeasuredShard, ShardLoader, ShardOptions
from shardcompute.node.worker.stages.stage_server import StageServer
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.served import VOCABULARY, ServedWeights, attach, prepare_served
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, InprocTransport, Link
from support.models.draft_heads import random_draft_head
from support.models.full_device import FullDevice, loading_onto
from support.models.tiny import save_tiny

ORIGIN = Peer("coordinator", "inproc://coordinator")
OPTIONS = ShardOptions(1 << 30, 1, "onnx", "cpu", room_timeout_s=0.0)
PATIENCE_S = 30.0
WORDS = encode_vocabulary(Vocabulary((b"a", b"</s>"), frozenset({1}), frozenset({1})))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedWeights]:
    folder = save_tiny("llama-biases", tmp_path_factory.mktemp("tiny"))
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as checkpoint:
        yield prepare_served(checkpoint, "native", tmp_path_factory.mktemp("native"))


class Lab:
    """A loader, the stages that it fills, and a coordinator that serves one model."""

    def __init__(
        self, served: ServedWeights, folder: Path, options: ShardOptions, on_exit: ExitStack
    ) -> None:
        self.now_s = 0.0
        self.model = served.card.model
        self.is_away = False
        self.stages = StageServer("worker", self._refuse, lambda node: None)
        on_exit.callback(self.stages.close)
        self._transport = InprocTransport()
        self._server = WeightsServer({self.model: served})
        listener = self._transport.listen(
            ORIGIN.url, Hello(VERSION_MIN, VERSION_MAX, ORIGIN.node, "", "home")
        )
        self._listener = on_exit.enter_context(listener)
        self.loader = ShardLoader(self.stages, ShardCache(folder), self._dial, options, lambda: self.now_s)
        on_exit.callback(self.loader.close)

    def command(self, chain: str, start: int = 0, stop: int = 1) -> LoadLayers:
        return LoadLayers(
            chain=chain,
            model=self.model,
            start=start,
            stop=stop,
            kv_tokens=64,
            context_length=64,
            sources=[ORIGIN],
        )

    def load(self, chain: str) -> MeasuredShard | None:
        return self.loader.load(self.command(chain), lambda fraction: None)

    def recover(self, spare_bytes: int) -> None:
        """So much is free until all is offered again."""
        while (wait_s := self.loader.measure_in_s()) is not None:
            self.now_s += wait_s
            self.loader.measured(spare_bytes)

    def held(self) -> tuple[Shard, ...]:
        with self.loader.held() as shards:
            return shards

    def _dial(self, peer: Peer) -> Link:
        if self.is_away:
            raise LinkError("nobody answers")
        link = self._transport.dial(peer.url, Hello(VERSION_MIN, VERSION_MAX, "worker", "weights", "home"))
        threading.Thread(target=self._server.serve, args=(self._listener.accept(),), daemon=True).start()
        return link

    def _refuse(self, peer: Peer) -> Link:
        raise LinkError("not in this test")


@pytest.fixture
def on_exit() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def size_bytes(served: ServedWeights, tmp_path: Path) -> int:
    """What one layer takes, with its KV."""
    with ExitStack() as stack:
        lab = Lab(served, tmp_path / "measure", OPTIONS, stack)
        lab.load("m#0")
        return lab.held()[0].size_bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_is_measured_alone_and_told_from_the_whole(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack, size_bytes: int, rank: int
) -> None:
    lab = Lab(served, tmp_path, OPTIONS, on_exit)
    tensor = RankPlace(rank, (1, 1))
    command = replace_fields(lab.command("m#1", stop=2), tensor=tensor)
    whole = lab.loader.load(lab.command("m#1", stop=2), lambda fraction: None)
    share = lab.loader.load(command, lambda fraction: None)
    assert whole is not None
    assert share is not None
    # What a whole layer takes is told, of which a part was measured.
    assert share.speed.layer_s > share.speed.stage.row_s / 2
    first, second = lab.held()
    assert (first.tensor, second.tensor) == (None, tensor)
    assert second.size_bytes < first.size_bytes
    assert (command.place in lab.stages.shards()) is (rank == 0), "the others follow"
    assert len(lab.stages.kv_usages()) == 2
    lab.loader.unload(command.place)
    assert len(lab.stages.kv_usages()) == 1


def test_a_draft_head_is_taken_by_a_last_stage_that_can(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack
) -> None:
    spec = served.card.spec
    head = encode_draft_head(random_draft_head(spec))
    lab = Lab(attach(served, {VOCABULARY: WORDS, DRAFT_HEAD: head}), tmp_path / "with", OPTIONS, on_exit)
    lab.loader.load(lab.command("m#1", stop=spec.layer_count - 1), lambda fraction: None)
    command = lab.command("m#1", spec.layer_count - 1, spec.layer_count)
    with pytest.raises(BackendError, match="no last stage"):
        lab.loader.take_draft_head(take(command))
    lab.loader.load(command, lambda fraction: None)
    for _ in range(2):
        lab.loader.take_draft_head(take(command))
        (report,) = lab.loader.draft_heads()
        assert report.size_bytes > 0, "in the place of the one before"
    with pytest.raises(BackendError, match="no last stage"):
        lab.loader.take_draft_head(take(lab.command("m#1", stop=spec.layer_count - 1)))
    without = Lab(attach(served, {VOCABULARY: WORDS}), tmp_path / "without", OPTIONS, on_exit)
    without.loader.load(command, lambda fraction: None)
    with pytest.raises(BackendError, match="has no draft head"):
        without.loader.take_draft_head(take(command))


def test_without_room_a_draft_head_is_not_taken_and_that_is_said(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack
) -> None:
    spec = served.card.spec
    head = encode_draft_head(random_draft_head(spec))
    lab = Lab(attach(served, {VOCABULARY: WORDS, DRAFT_HEAD: head}), tmp_path, OPTIONS, on_exit)
    command = lab.command("m#1", spec.layer_count - 1, spec.layer_count)
    lab.loader.load(command, lambda fraction: None)
    lab.loader.shrink(0)
    with pytest.raises(BackendError, match="no memory is left"):
        lab.loader.take_draft_head(take(command))


def take(command: LoadLayers) -> TakeDraftHead:
    return TakeDraftHead(chain=command.chain, start=command.start, stop=command.stop, origin=ORIGIN)


def test_layers_are_loaded_once(served: ServedWeights, tmp_path: Path, on_exit: ExitStack) -> None:
    lab = Lab(served, tmp_path, OPTIONS, on_exit)
    heard: list[float] = []
    assert lab.loader.load(lab.command("m#1"), heard.append) is not None
    assert heard[-1] == 1.0
    assert lab.load("m#1") is None, "it is there already"
    assert [(shard.chain, shard.start, shard.stop) for shard in lab.held()] == [("m#1", 0, 1)]
    assert list(lab.stages.shards()) == [("m#1", 0, 1, None)]
    lab.loader.unload(("m#1", 0, 1, None))
    assert lab.held() == ()
    assert lab.stages.shards() == {}


def test_what_does_not_fit_is_refused(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack, size_bytes: int
) -> None:
    lab = Lab(served, tmp_path, replace(OPTIONS, memory_bytes=2 * size_bytes - 1), on_exit)
    lab.load("m#1")
    with pytest.raises(CapacityError, match="do not fit"):
        lab.load("m#2")
    assert [shard.chain for shard in lab.held()] == ["m#1"]


def test_a_shard_waits_for_another_to_go(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack, size_bytes: int
) -> None:
    options = replace(OPTIONS, memory_bytes=2 * size_bytes - 1, room_timeout_s=PATIENCE_S)
    lab = Lab(served, tmp_path, options, on_exit)
    lab.load("m#1")
    thread = threading.Thread(target=lab.load, args=("m#2",))
    thread.start()
    lab.loader.unload(("m#1", 0, 1, None))
    thread.join(PATIENCE_S)
    assert [shard.chain for shard in lab.held()] == ["m#2"]


def test_closing_ends_the_wait_for_a_coordinator(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack
) -> None:
    lab = Lab(served, tmp_path, OPTIONS, on_exit)
    lab.is_away = True
    lab.loader.close()
    with pytest.raises(LinkError, match="nobody answers"):
        lab.load("m#1")


def test_memory_that_runs_out_while_loading_is_freed_and_no_longer_offered(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack, size_bytes: int
) -> None:
    lab = Lab(served, tmp_path, OPTIONS, on_exit)
    lab.load("m#1")
    device = FullDevice(lambda step: True)
    with (
        loading_onto(lambda cache: device),
        pytest.raises(DeviceMemoryError, match="memory ran out"),
    ):
        lab.load("m#2")
    assert device.closed == len(device.loads) == 2, "it is tried once more after caches were freed"
    assert [shard.chain for shard in lab.held()] == ["m#1"], "nothing of it stays"
    assert list(lab.stages.shards()) == [("m#1", 0, 1, None)]
    assert size_bytes <= lab.loader.memory_bytes < 2 * size_bytes
    with pytest.raises(CapacityError, match="do not fit"):
        lab.load("m#2")


def test_memory_that_is_free_at_the_second_try_is_all_right(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack
) -> None:
    lab = Lab(served, tmp_path, OPTIONS, on_exit)
    device = FullDevice(is_full_for=lambda start, stop: len(device.loads) == 1)
    with loading_onto(lambda cache: device):
        assert lab.load("m#1") is not None
    assert lab.loader.memory_bytes == OPTIONS.memory_bytes


def test_each_shortage_takes_more_of_what_is_offered(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack, size_bytes: int
) -> None:
    lab = Lab(served, tmp_path, OPTIONS, on_exit)
    offered = []
    for _ in range(3):
        lab.load("m#1")
        given_up = lab.loader.give_up(("m#1", 0, 1, None))
        assert given_up is not None
        offered.append(lab.loader.memory_bytes / size_bytes)
        lab.recover(spare_bytes=OPTIONS.memory_bytes)
        assert lab.loader.is_offering_all
    assert lab.loader.give_up(("m#1", 0, 1, None)) is None
    assert lab.held() == ()
    assert offered == pytest.approx([0.85, 0.7225, 0.614125], rel=1e-3)


def test_what_is_held_counts_as_free_when_an_offer_recovers(
    served: ServedWeights, tmp_path: Path, on_exit: ExitStack, size_bytes: int
) -> None:
    lab = Lab(served, tmp_path, replace(OPTIONS, memory_bytes=3 * size_bytes), on_exit)
    lab.load("m#1")
    lab.loader.shrink(2 * size_bytes)
    lowered_bytes = lab.loader.memory_bytes
    for _ in range(10):
        wait_s = lab.loader.measure_in_s()
        assert wait_s is not None
        lab.now_s += wait_s
        assert not lab.loader.measured(lowered_bytes - size_bytes), "no more is free than is offered"
    lab.recover(spare_bytes=2 * size_bytes)
    lab.load("m#2")
    lab.load("m#3")
    assert len(lab.held()) == 3


def test_stages_that_nobody_asks_give_memory_back(served: ServedWeights, on_exit: ExitStack) -> None:
    rested = threading.Event()

    class Resting:
        def rest(self) -> None:
            rested.set()

        def close(self) -> None:
            pass

    stages = StageServer("worker", lambda peer: pytest.fail("dialled"), lambda node: None, rest_s=0.01)
    on_exit.callback(stages.close)
    stages.add(("m#0", 0, 1, None), Resting())  # type: ignore[arg-type]
    assert not rested.wait(0.05), "before anything has come in there is nothing to give back"
    stages.limit_logs(0)
    assert rested.wait(PATIENCE_S)
