"""A worker without a model file: its shard comes over links, from whoever has it, and is the shard."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.closing import Closing
from shardcompute.core.errors import (
    CorruptModelError,
    LinkClosedError,
    LinkError,
    SourceError,
    UnknownModelError,
    UsageError,
)
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, whole
from shardcompute.node.weights import client as weights_client
from shardcompute.node.weights import pieces as weight_pieces
from shardcompute.node.weights.client import RemoteTensors, fetch_card, open_remote_shard
from shardcompute.node.weights.pieces import Supplier
from shardcompute.node.weights.server import MAX_REQUEST_BYTES, CachedModels, WeightsServer
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.card import Card
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.formats.tensor_file import TensorFile
from shardcompute.weights.served import ServedWeights, prepare_served
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources import disk
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, Link, Ping, Pong, default_transports
from shardcompute.wire.control import FetchFailed, FetchModel, FetchTensor, Heartbeat, TensorBytes
from support.gguf.blocks import save_block_gguf
from support.gguf.parts import split_gguf
from support.models.tiny import VOCABULARY, save_tiny

OPTIONS = ExecutorOptions(kv_bytes=1 << 22, max_rows=32, context_length=64)
IDS = np.random.default_rng(1).integers(3, VOCABULARY, 12)
WORKER = Hello(VERSION_MIN, VERSION_MAX, "worker", "weights", "home")
COORDINATOR = Hello(VERSION_MIN, VERSION_MAX, "coordinator", "", "home")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = save_tiny("llama-biases", tmp_path_factory.mktemp("tiny"))
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as opened:
        yield opened


@pytest.fixture(scope="module")
def native(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> ServedWeights:
    return prepare_served(checkpoint, "native", tmp_path_factory.mktemp("native"))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors in several pieces each."""
    monkeypatch.setattr(weights_client, "PIECE_BYTES", 4096)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name


@dataclass
class Tap(Closing):
    """A link that counts, and that breaks after `breaks_after` answers."""

    link: Link
    breaks_after: int | None = None
    asked: list[FetchTensor] = field(default_factory=list)
    received_bytes: int = 0
    answers: int = 0

    @property
    def peer(self) -> str:
        return self.link.peer

    def send(self, message: Any, body: Any = ()) -> None:
        if isinstance(message, FetchTensor):
            self.asked.append(message)
        self.link.send(message, body)

    def receive(self, timeout_s: float | None = None) -> Any:
        if self.answers == self.breaks_after:
            self.link.close()
            raise LinkClosedError("the source died")
        message, body = self.link.receive(timeout_s)
        self.answers += 1
        self.received_bytes += len(body)
        return message, body

    def close(self) -> None:
        self.link.close()


@dataclass
class Node:
    """Somebody who serves weights; `taps` are the links that were dialled to it, one after the other."""

    dial_link: Callable[[], Link]
    name: str
    taps: list[Tap] = field(default_factory=list)
    breaks_after: list[int | None] = field(default_factory=list)
    is_dead_after: int | None = None

    def dial(self) -> Any:
        if self.is_dead_after is not None and len(self.taps) >= self.is_dead_after:
            raise LinkError("nobody answers")
        breaks = self.breaks_after[len(self.taps)] if len(self.taps) < len(self.breaks_after) else None
        tap = Tap(self.dial_link(), breaks)
        self.taps.append(tap)
        return tap

    @property
    def received_bytes(self) -> int:
        return sum(tap.received_bytes for tap in self.taps)

    @property
    def asked(self) -> set[str]:
        return {request.tensor for tap in self.taps for request in tap.asked}

    def supplier(self, *, is_origin: bool = True) -> Supplier:
        return Supplier(self.name, self.dial, is_origin)


Start = Callable[..., Node]


@pytest.fixture(params=["inproc", "tcp"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts nodes that serve models, each with a thread per link."""
    transports = default_transports()
    with ExitStack() as stack:

        def make(models: Any, name: str = "coordinator", **options: Any) -> Node:
            url = f"inproc://{name}" if request.param == "inproc" else "tcp://127.0.0.1:0"
            listener = transports.listen(url, COORDINATOR)
            server = WeightsServer(models)
            links: list[Link] = []

            def accept() -> None:
                threads = []
                while True:
                    try:
                        link = listener.accept()
                    except LinkClosedError:
                        break
                    links.append(link)
                    threads.append(threading.Thread(target=server.serve, args=(link,)))
                    threads[-1].start()
                for each in links:
                    each.close()
                for thread in threads:
                    thread.join()

            thread = threading.Thread(target=accept)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.close)
            return Node(lambda: transports.dial(listener.address, WORKER), name, **options)

        yield make


@dataclass
class Odd:
    """A `TensorFile` that does to each read what `change` says."""

    file: TensorFile
    change: Callable[[str, int, memoryview], memoryview]
    metadata: Any = None

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def entries(self) -> Any:
        return self.file.entries

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        return self.change(name, offset, self.file.read_bytes(name, offset, length))

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        raise AssertionError("a server reads bytes")

    def close(self) -> None:
        self.file.close()


def _flipped(content: memoryview) -> memoryview:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return memoryview(changed)


def _run(executor: Executor, stage: Stage, inputs: Any) -> Float32:
    out = executor.step([Segment(1, 0, len(inputs), len(inputs))], inputs)
    return np.array(out)


def _local(checkpoint: Checkpoint, form: str, stages: list[Stage]) -> list[Float32]:
    """The output of each stage, loaded from the files."""
    outputs, inputs = [], IDS
    for stage in stages:
        executor = open_shard(checkpoint, stage=stage, backend="numpy", form=form, options=OPTIONS)
        inputs = _run(executor, stage, inputs)
        outputs.append(inputs)
    return outputs


def _remote(card: Card, stage: Stage, tensors: RemoteTensors, inputs: Any) -> Float32:
    return _run(open_remote_shard(card, stage, tensors, backend="numpy", options=OPTIONS), stage, inputs)


def _assert_all_right(tensors: RemoteTensors, served: ServedWeights, stage: Stage) -> None:
    for name in served.card.stage_tensors(stage):
        assert tensors.read_rows(name) == served.tensors.read_rows(name), name


# The shard is the shard


@pytest.mark.parametrize("form", ["native", "int8", "int4", "mixed"])
@pytest.mark.parametrize("has_cache", [True, False])
def test_stages_from_afar_give_the_same_logits_bit_for_bit(
    checkpoint: Checkpoint, start: Start, tmp_path: Path, form: str, has_cache: bool
) -> None:
    served = prepare_served(checkpoint, form, tmp_path / "served")
    origin = start({"tiny": served})
    card = fetch_card(origin.dial, "tiny")
    assert card == served.card
    stages = [Stage(0, 2, 3), Stage(2, 3, 3)]
    inputs: Any = IDS
    for stage, expected in zip(stages, _local(checkpoint, form, stages), strict=True):
        cache = ShardCache(tmp_path / f"{stage.start}") if has_cache else None
        with RemoteTensors(card, [origin.supplier()], cache) as tensors:
            inputs = _remote(card, stage, tensors, inputs)
        np.testing.assert_array_equal(inputs, expected)
    served.tensors.close() if form != "native" else None


def test_the_cpu_engine_loads_what_travelled(checkpoint: Checkpoint, start: Start, tmp_path: Path) -> None:
    served = prepare_served(checkpoint, "int8", tmp_path)
    stage = whole(checkpoint.spec)
    local = open_shard(checkpoint, stage=stage, backend="onnx", form="int8", options=OPTIONS)
    origin = start({"tiny": served})
    with RemoteTensors(served.card, [origin.supplier()], ShardCache(tmp_path / "shards")) as tensors:
        remote = open_remote_shard(served.card, stage, tensors, backend="onnx", options=OPTIONS)
    np.testing.assert_array_equal(_run(remote, stage, IDS), _run(local, stage, IDS))
    remote.close()
    local.close()
    served.tensors.close()


# Only what is needed, only once


@pytest.mark.parametrize("has_cache", [True, False])
def test_only_the_shards_bytes_travel(
    native: ServedWeights, start: Start, tmp_path: Path, has_cache: bool
) -> None:
    origin = start({"tiny": native})
    card = native.card
    told: list[tuple[int, int]] = []
    stage = Stage(1, 2, 3)
    cache = ShardCache(tmp_path) if has_cache else None
    with RemoteTensors(card, [origin.supplier()], cache, progress=lambda *done: told.append(done)) as tensors:
        _remote(card, stage, tensors, np.zeros((3, card.spec.hidden), np.float32))
    assert origin.received_bytes == card.stage_bytes(stage)
    assert origin.asked == set(card.stage_tensors(stage))
    assert told[-1] == (card.stage_bytes(stage), card.stage_bytes(stage))
    assert told == sorted(told)


def test_bytes_that_arrive_slowly_are_told_of_between_two_percents(
    native: ServedWeights, start: Start, tmp_path: Path
) -> None:
    """Of a layer so large that a percent of it takes long."""
    origin, now_s = start({"tiny": native}), [0.0]
    told: list[int] = []
    with RemoteTensors(
        native.card,
        [origin.supplier()],
        ShardCache(tmp_path),
        progress=lambda done, _: told.append(done),
        clock=lambda: now_s[0],
    ) as tensors:
        tensors._total_bytes = 1 << 40
        for seconds in (1.0, 4.0, 1.0, 5.0, 60.0):
            now_s[0] += seconds
            tensors._count(1000)
        now_s[0] += 60.0
        tensors._count(0)
    assert told == [1000, 3000, 4000, 5000]


def test_a_split_gguf_travels_by_layers_also_from_peers(start: Start, tmp_path: Path) -> None:
    """Tensors of a layer lie in several parts; whoever fetches it neither knows nor pays for that."""
    parts = split_gguf(
        save_block_gguf(tmp_path / "tiny.gguf", ["Q2_K", "IQ3_S"], layers=3), 3, tmp_path / "parts"
    )
    with open_checkpoint(resolve(parse_reference(str(parts[0])), Settings(tmp_path))) as checkpoint:
        served = prepare_served(checkpoint, "native", tmp_path / "served")
        origin = start({"tiny": served})
        stage, cache = Stage(1, 2, 3), ShardCache(tmp_path / "peer")
        rows = np.zeros((3, served.card.spec.hidden), np.float32)
        with RemoteTensors(served.card, [origin.supplier()], cache) as tensors:
            found = _remote(served.card, stage, tensors, rows)
        assert origin.received_bytes == served.card.stage_bytes(stage)
        executor = open_shard(checkpoint, stage=stage, backend="numpy", options=OPTIONS)
        np.testing.assert_array_equal(found, _run(executor, stage, rows))
        peer = start(CachedModels(cache), "peer")
        suppliers = [peer.supplier(is_origin=False), origin.supplier()]
        with RemoteTensors(served.card, suppliers, ShardCache(tmp_path / "new")) as tensors:
            tensors.prefetch(stage)
            _assert_all_right(tensors, served, stage)
        assert peer.received_bytes > 0


def test_what_was_fetched_is_not_fetched_again(native: ServedWeights, start: Start, tmp_path: Path) -> None:
    origin = start({"tiny": native})
    stage = Stage(0, 2, 3)
    for _ in range(2):
        with RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path)) as tensors:
            tensors.prefetch(stage)
            _assert_all_right(tensors, native, stage)
    assert len(origin.taps) == 1
    assert origin.received_bytes == native.card.stage_bytes(stage)
    (held,) = ShardCache(tmp_path).holdings()
    assert (held.model, held.start, held.stop) == (native.card.model, 0, 2)


def test_a_fetch_that_was_killed_goes_on_where_it_stopped(
    native: ServedWeights, start: Start, tmp_path: Path
) -> None:
    stage = whole(native.card.spec)
    origin = start({"tiny": native}, breaks_after=[25], is_dead_after=1)
    with (
        RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path), retry_delays_s=()) as tensors,
        pytest.raises(SourceError, match=r"nobody|died"),
    ):
        tensors.prefetch(stage)
    cached = origin.received_bytes
    assert 0 < cached < native.card.stage_bytes(stage)
    again = start({"tiny": native}, "again")
    told: list[int] = []
    with RemoteTensors(
        native.card, [again.supplier()], ShardCache(tmp_path), progress=lambda done, _: told.append(done)
    ) as tensors:
        tensors.prefetch(stage)
        _assert_all_right(tensors, native, stage)
    assert again.received_bytes == native.card.stage_bytes(stage) - cached
    assert told[0] <= cached < told[-1] == native.card.stage_bytes(stage)


def test_a_damaged_file_is_fetched_again(native: ServedWeights, start: Start, tmp_path: Path) -> None:
    origin = start({"tiny": native})
    stage = Stage(1, 2, 3)
    with RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path)) as tensors:
        tensors.prefetch(stage)
    path = max(tmp_path.rglob("*-*"), key=lambda path: path.stat().st_size)
    path.write_bytes(_flipped(memoryview(path.read_bytes())))
    before = origin.received_bytes
    with RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path)) as tensors:
        tensors.prefetch(stage)
        _assert_all_right(tensors, native, stage)
    assert origin.received_bytes - before == path.stat().st_size - 32
    assert ShardCache(tmp_path).holdings()


def test_a_full_disk_means_streaming_and_one_warning(
    checkpoint: Checkpoint,
    native: ServedWeights,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    origin = start({"tiny": native})
    stage = whole(native.card.spec)
    room = iter([1 << 40] * 20)
    monkeypatch.setattr(disk, "_free_bytes", lambda folder: next(room, 0))
    with (
        caplog.at_level(logging.WARNING),
        RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path)) as tensors,
    ):
        logits = _remote(native.card, stage, tensors, IDS)
    np.testing.assert_array_equal(logits, _local(checkpoint, "native", [stage])[0])
    assert len([record for record in caplog.records if "not kept on disk" in record.message]) == 1


def test_a_folder_that_cannot_be_written_means_streaming(
    native: ServedWeights, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shards").write_text("a file where a folder should be")
    origin = start({"tiny": native})
    with RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path / "shards")) as tensors:
        tensors.prefetch(Stage(1, 2, 3))
        _assert_all_right(tensors, native, Stage(1, 2, 3))
    assert "not kept on disk" in caplog.text


# Sources that fail or lie


def test_a_link_that_breaks_is_dialled_again(native: ServedWeights, start: Start, tmp_path: Path) -> None:
    origin = start({"tiny": native}, breaks_after=[7, 5])
    stage = whole(native.card.spec)
    with RemoteTensors(
        native.card, [origin.supplier()], ShardCache(tmp_path), retry_delays_s=(0.0, 0.0)
    ) as tensors:
        tensors.prefetch(stage)
        _assert_all_right(tensors, native, stage)
    assert len(origin.taps) == 3


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("is_origin", [True, False])
def test_a_source_that_dies_in_the_middle_is_replaced(
    native: ServedWeights, start: Start, tmp_path: Path, has_cache: bool, is_origin: bool
) -> None:
    dying = start({"tiny": native}, "dying", breaks_after=[3], is_dead_after=1)
    steady = start({"tiny": native}, "steady")
    stage = whole(native.card.spec)
    suppliers = [dying.supplier(is_origin=is_origin), steady.supplier()]
    cache = ShardCache(tmp_path) if has_cache else None
    with RemoteTensors(native.card, suppliers, cache, retry_delays_s=()) as tensors:
        tensors.prefetch(stage)
        _assert_all_right(tensors, native, stage)
    assert dying.received_bytes + steady.received_bytes >= native.card.stage_bytes(stage)


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_source_that_hangs_holds_nobody_up(
    native: ServedWeights, start: Start, tmp_path: Path, has_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pieces, "OVERDUE_S", 0.05)
    monkeypatch.setattr(weight_pieces, "_REPLY_TIMEOUT_S", None)
    released = threading.Event()

    def hang(name: str, offset: int, content: memoryview) -> memoryview:
        released.wait()
        return content

    hanging = start({"tiny": ServedWeights(native.card, Odd(native.tensors, hang))}, "hanging")
    steady = start({"tiny": native}, "steady")
    stage = whole(native.card.spec)
    suppliers = [hanging.supplier(is_origin=False), steady.supplier()]
    cache = ShardCache(tmp_path) if has_cache else None
    try:
        with RemoteTensors(native.card, suppliers, cache) as tensors:
            tensors.prefetch(stage)
            _assert_all_right(tensors, native, stage)
        assert hanging.asked, "it was asked, and has not answered"
        assert hanging.received_bytes == 0
    finally:
        released.set()


def test_nobody_left_is_an_error_that_says_why(native: ServedWeights, start: Start) -> None:
    origin = start({"tiny": native}, is_dead_after=0)
    with (
        RemoteTensors(native.card, [origin.supplier()], retry_delays_s=(0.0,)) as tensors,
        pytest.raises(SourceError, match="nobody answers"),
    ):
        tensors.read_rows("model.norm.weight")


def test_what_nobody_has_is_an_error_that_says_why(
    native: ServedWeights, start: Start, tmp_path: Path
) -> None:
    def lose(name: str, offset: int, content: memoryview) -> memoryview:
        raise SourceError(f"{name} is lost")

    origin = start({"tiny": ServedWeights(native.card, Odd(native.tensors, lose))})
    peer = start(CachedModels(ShardCache(tmp_path / "nothing")), "peer")
    suppliers = [origin.supplier(), peer.supplier(is_origin=False)]
    with RemoteTensors(native.card, suppliers, ShardCache(tmp_path / "new")) as tensors:
        with pytest.raises(SourceError, match="cannot be fetched from anyone"):
            tensors.prefetch(Stage(1, 2, 3))
        with pytest.raises(SourceError, match=r"norm\.weight is lost"):
            tensors.read_bytes("model.norm.weight", 4, 4)


def test_peers_serve_what_they_hold_and_the_origin_the_rest(
    native: ServedWeights, start: Start, tmp_path: Path
) -> None:
    origin = start({"tiny": native})
    cache = ShardCache(tmp_path / "peer")
    with RemoteTensors(native.card, [origin.supplier()], cache) as tensors:
        tensors.prefetch(Stage(1, 2, 3))
    peer = start(CachedModels(cache), "peer")
    assert fetch_card(peer.dial, native.card.model) == native.card
    sizes = {name: native.card.entries[name].size_bytes for name in native.card.layer_tensors(1)}

    def only_whole(name: str, offset: int, content: memoryview) -> memoryview:
        """Enough for hashes and small tensors: the pieces of large ones must come from the peer."""
        if len(content) < sizes[name]:
            raise SourceError("lost")
        return content

    lost = start({"tiny": ServedWeights(native.card, Odd(native.tensors, only_whole))}, "lost")
    suppliers = [peer.supplier(is_origin=False), lost.supplier()]
    with RemoteTensors(native.card, suppliers, ShardCache(tmp_path / "new")) as tensors:
        tensors.prefetch(Stage(1, 2, 3))
        _assert_all_right(tensors, native, Stage(1, 2, 3))
    assert peer.received_bytes >= sum(size for size in sizes.values() if size > 4096) > 0
    both = [peer.supplier(is_origin=False), origin.supplier()]
    with RemoteTensors(native.card, both, ShardCache(tmp_path / "other")) as tensors:
        tensors.prefetch(Stage(0, 3, 3))
        _assert_all_right(tensors, native, Stage(0, 3, 3))


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_lying_peer_is_found_out_and_not_asked_again(
    native: ServedWeights,
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    has_cache: bool,
) -> None:
    has_lied = threading.Event()

    def lie(name: str, offset: int, content: memoryview) -> memoryview:
        has_lied.set()
        return _flipped(content)

    def wait(name: str, offset: int, content: memoryview) -> memoryview:
        assert has_lied.wait(30)
        return content

    liar = start({"tiny": ServedWeights(native.card, Odd(native.tensors, lie))}, "liar")
    origin = start({"tiny": ServedWeights(native.card, Odd(native.tensors, wait))})
    stage = whole(native.card.spec)
    cache = ShardCache(tmp_path) if has_cache else None
    suppliers = [liar.supplier(is_origin=False), origin.supplier()]
    with caplog.at_level(logging.WARNING), RemoteTensors(native.card, suppliers, cache) as tensors:
        tensors.prefetch(stage)
        _assert_all_right(tensors, native, stage)
        assert "liar sent wrong bytes" in caplog.text
        asked = sum(len(tap.asked) for tap in liar.taps)
        tensors.prefetch(stage)
        tensors.read_rows("model.norm.weight")
        assert sum(len(tap.asked) for tap in liar.taps) == asked


def test_an_honest_peer_is_kept_when_another_lies(
    native: ServedWeights, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, threading.Event] = {"liar": threading.Event(), "honest": threading.Event()}

    def when_both_were_asked(who: str, change: Callable[[memoryview], memoryview]) -> ServedWeights:
        def read(name: str, offset: int, content: memoryview) -> memoryview:
            if who in asked:
                asked[who].set()
            assert all(event.wait(30) for event in asked.values())
            return change(content)

        return ServedWeights(native.card, Odd(native.tensors, read))

    liar = start({"tiny": when_both_were_asked("liar", _flipped)}, "liar")
    honest = start({"tiny": when_both_were_asked("honest", lambda content: content)}, "honest")
    origin = start({"tiny": when_both_were_asked("origin", lambda content: content)})
    suppliers = [liar.supplier(is_origin=False), honest.supplier(is_origin=False), origin.supplier()]
    stage = whole(native.card.spec)
    with (
        caplog.at_level(logging.WARNING),
        RemoteTensors(native.card, suppliers, ShardCache(tmp_path)) as tensors,
    ):
        tensors.prefetch(stage)
        _assert_all_right(tensors, native, stage)
    assert "honest sent" not in caplog.text
    assert "liar sent" in caplog.text


def test_bytes_that_are_wrong_at_the_origin_are_an_error(
    native: ServedWeights, start: Start, tmp_path: Path
) -> None:
    is_ill = threading.Event()
    is_ill.set()

    def damage(name: str, offset: int, content: memoryview) -> memoryview:
        """Pieces are wrong, the whole, which is hashed, is right: memory or disk plays tricks."""
        is_piece = len(content) < native.card.entries[name].size_bytes
        return _flipped(content) if is_piece and is_ill.is_set() else content

    origin = start({"tiny": ServedWeights(native.card, Odd(native.tensors, damage))})
    with RemoteTensors(native.card, [origin.supplier()], ShardCache(tmp_path)) as tensors:
        with pytest.raises(CorruptModelError, match="SHA-256"):
            tensors.prefetch(Stage(1, 2, 3))
        is_ill.clear()
        tensors.prefetch(Stage(1, 2, 3))
        _assert_all_right(tensors, native, Stage(1, 2, 3))


@pytest.mark.parametrize("lies", [False, True], ids=["honest", "lying"])
def test_holders_that_the_hash_table_names_are_asked_when_nobody_else_has_it(
    native: ServedWeights, start: Start, tmp_path: Path, lies: bool
) -> None:
    """The origin knows hashes and cannot read its file any more, and the peer that it named is gone."""
    spoiled = {"is": False}

    def unreadable(name: str, offset: int, content: memoryview) -> memoryview:
        if spoiled["is"]:
            raise SourceError("the disk is gone")
        return content

    def lying(name: str, offset: int, content: memoryview) -> memoryview:
        return memoryview(bytes(len(content))) if lies else content

    origin = start({"m": ServedWeights(native.card, Odd(native.tensors, unreadable))})
    with RemoteTensors(native.card, [origin.supplier()]) as tensors:
        for name in native.card.entries:
            tensors.read_bytes(name, 0, native.card.entries[name].size_bytes)
    spoiled["is"] = True
    peer = start({}, "peer", is_dead_after=0)
    holder = start({"m": ServedWeights(native.card, Odd(native.tensors, lying))}, "holder")
    asked: list[int] = []

    def more() -> list[Supplier]:
        asked.append(1)
        return [holder.supplier(is_origin=False)]

    with RemoteTensors(
        native.card,
        [peer.supplier(is_origin=False), origin.supplier()],
        ShardCache(tmp_path),
        more=more,
        retry_delays_s=(0.0,),
    ) as tensors:
        stage = Stage(0, 1, native.card.spec.layer_count)
        if lies:
            with pytest.raises((SourceError, CorruptModelError)):
                tensors.prefetch(stage)
        else:
            tensors.prefetch(stage)
            assert holder.received_bytes > 0
    assert asked == [1]


def test_an_origin_is_required(native: ServedWeights) -> None:
    with pytest.raises(UsageError, match="origin"):
        RemoteTensors(native.card, [Supplier("peer", lambda: pytest.fail("dialled"))])


# The server believes nothing


@pytest.fixture
def link(native: ServedWeights, start: Start) -> Iterator[Link]:
    with start({"tiny": native}).dial() as opened:
        yield opened


def _ask(link: Link, message: Any) -> Any:
    link.send(message)
    return link.receive(30)[0]


def test_unknown_models_and_tensors_are_refused(native: ServedWeights, link: Link) -> None:
    assert isinstance(_ask(link, FetchModel(1, "other")), FetchFailed)
    assert isinstance(_ask(link, FetchTensor(2, "other", "model.norm.weight", 0, 4)), FetchFailed)
    failed = _ask(link, FetchTensor(3, "tiny", "model.other", 0, 4))
    assert (failed.number, "model.other" in failed.reason) == (3, True)


def test_ranges_are_checked(native: ServedWeights, link: Link) -> None:
    size = native.card.entries["model.norm.weight"].size_bytes
    for offset, length in [(0, size + 1), (size, 1), (1 << 62, 1), (0, MAX_REQUEST_BYTES + 1)]:
        assert isinstance(
            _ask(link, FetchTensor(0, "tiny", "model.norm.weight", offset, length)), FetchFailed
        )
    whole_tensor = _ask(link, FetchTensor(1, "tiny", "model.norm.weight", 0, size))
    assert (whole_tensor.size, whole_tensor.sha256) == (size, b"")


def test_a_hash_is_computed_once(native: ServedWeights, start: Start) -> None:
    reads: list[int] = []

    def count(name: str, offset: int, content: memoryview) -> memoryview:
        reads.append(offset)
        return content

    node = start({"tiny": ServedWeights(native.card, Odd(native.tensors, count))})
    with node.dial() as link:
        first = _ask(link, FetchTensor(0, native.card.fingerprint, "model.norm.weight", 0, 0))
        again = _ask(link, FetchTensor(1, native.card.fingerprint, "model.norm.weight", 0, 0))
        assert len(first.sha256) == 32
        assert first.sha256 == again.sha256
        assert len(reads) == 1
        part = _ask(link, FetchTensor(2, "tiny", "model.norm.weight", 8, 0, b"", 16))
        content = bytes(native.tensors.read_bytes("model.norm.weight", 8, 16))
        assert part == TensorBytes(2, 0, hashlib.sha256(content).digest())
        assert _ask(link, FetchTensor(3, "tiny", "model.norm.weight", 8, 0, b"", 16)).sha256 == part.sha256
        assert len(reads) == 2


def test_a_link_for_weights_is_for_weights(link: Link) -> None:
    assert _ask(link, Ping(5, 1.5)) == Pong(5, 1.5)
    link.send(Heartbeat(1))
    with pytest.raises(LinkError):
        link.receive(30)


def test_a_model_that_is_not_served_has_no_card(native: ServedWeights, start: Start) -> None:
    with pytest.raises(UnknownModelError, match="other"):
        fetch_card(start({"tiny": native}).dial, "other")


def test_a_server_counts_what_it_sent_and_to_whom(native: ServedWeights) -> None:
    name, entry = next(iter(native.card.entries.items()))
    server = WeightsServer({"m": native})
    requests: list[Any] = [FetchTensor(1, "m", name, 0, 8), FetchTensor(2, "m", name, 0, 0)]
    requests += [FetchTensor(3, "m", "no such tensor", 0, 8), FetchTensor(4, "m", name, 8, 8)]

    class Scripted:
        peer = "worker"

        def receive(self) -> tuple[Any, memoryview]:
            if not requests:
                raise LinkClosedError("over")
            return requests.pop(0), memoryview(b"")

        def send(self, message: Any, body: Any = ()) -> None:
            assert entry.size_bytes >= 16

        def __enter__(self) -> Scripted:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    server.serve(Scripted())  # type: ignore[arg-type]
    assert server.sent_bytes() == {"worker": 16}
