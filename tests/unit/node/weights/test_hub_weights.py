"""Weights that stay at the hub: workers read their own ranges there, and the coordinator keeps none of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shardcompute.core.errors import CorruptModelError, SourceError
from shardcompute.core.settings import Secret
from shardcompute.models.spec import Stage, whole
from shardcompute.node.weights import client as weights_client
from shardcompute.node.weights import hub_line
from shardcompute.node.weights.pinned_hashes import PinnedHashes
from shardcompute.node.weights.server import CachedModels, WeightsServer
from shardcompute.weights.card import decode_card, encode_card
from shardcompute.weights.served import prepare_served, shard_source
from shardcompute.weights.shard_cache import ShardCache
from shardcompute.weights.sources.hub_files import HubFile
from shardcompute.weights.sources.rate import RateLimit
from support.gguf.blocks import save_block_gguf
from support.gguf.parts import split_gguf
from support.models import mlx_checkpoint
from support.models.tiny import save_tiny
from support.models.tiny_checkpoint import save_tiny_llama
from support.network.fake_hub import FakeHub, Fault, serving
from support.network.hub_lab import REPO, HubLab, WeightsNode
from support.quantised.checkpoint import quantise_folder

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors in several pieces each, and no proxy on the way to the hub."""
    monkeypatch.setattr(weights_client, "PIECE_BYTES", 4096)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama-biases", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lab(model: Path, tmp_path: Path) -> Iterator[HubLab]:
    with HubLab(model, tmp_path) as opened:
        yield opened


def test_a_worker_reads_its_own_part_at_the_hub(lab: HubLab) -> None:
    stage = Stage(1, 2, lab.checkpoint.spec.layer_count)
    lab.check(lab.tensors(), stage)
    needed = lab.card().stage_bytes(stage)
    assert needed <= lab.hub.sent_bytes < needed + lab.local.files.total_bytes // 10
    assert lab.sent_by_coordinator() == 0
    assert not list((lab.folder / "coordinator").rglob("*"))


def test_what_is_no_part_of_the_source_comes_from_the_coordinator(lab: HubLab) -> None:
    tensors = lab.tensors()
    stored = next(name for name in tensors.entries if name.startswith("@"))
    assert bytes(tensors.read_bytes(stored, 0, 5)) == b"words"
    assert lab.hub.sent_bytes == 0


def test_unreachable_hub_is_replaced_by_the_coordinator(lab: HubLab) -> None:
    lab.check(lab.tensors(hub_url="http://127.0.0.1:9"))
    assert lab.sent_by_coordinator() >= lab.card().stage_bytes(whole(lab.checkpoint.spec))


def test_second_reader_may_ask_the_first(lab: HubLab) -> None:
    lab.check(lab.tensors(cache="first"))
    lab.hub.every["/resolve/"] = Fault(503)
    peer = WeightsNode("peer", WeightsServer(CachedModels(ShardCache(lab.folder / "first"))), lab.on_exit)
    lab.check(lab.tensors(peer.as_peer(), cache="second", offline=True))
    assert sum(peer.server.sent_bytes().values()) > 0


# A source that breaks off, throttles or lies


@pytest.fixture
def mirror(lab: HubLab, model: Path) -> FakeHub:
    """Another host with the same files."""
    other = lab.on_exit.enter_context(serving(FakeHub()))
    other.put_folder(REPO, model)
    return other


def test_answers_that_break_off_are_continued(lab: HubLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_line, "_ADVANCE_BYTES", 500)
    lab.hub.every["/storage/"] = Fault(cut_after=1000)
    lab.check(lab.tensors())
    assert lab.sent_by_coordinator() == 0
    assert lab.hub.sent_bytes < 1.1 * lab.local.files.total_bytes, "nothing came twice"


def test_busy_hub_is_left_alone_for_as_long_as_it_asks(lab: HubLab) -> None:
    lab.hub.fail("/resolve/", *[Fault(429, {"Retry-After": "1"})] * 2, Fault(503))
    began_s = time.monotonic()
    lab.check(lab.tensors())
    assert time.monotonic() - began_s >= 1.0
    assert lab.sent_by_coordinator() == 0


def test_mirror_takes_what_a_busy_hub_does_not_give(lab: HubLab, mirror: FakeHub) -> None:
    lab.hub.every["/resolve/"] = Fault(429, {"Retry-After": "50"})
    lab.check(lab.tensors(hub_mirrors=(mirror.url,)))
    assert mirror.sent_bytes > 0
    assert lab.sent_by_coordinator() == 0


def test_token_goes_to_the_hub_alone(lab: HubLab, mirror: FakeHub) -> None:
    lab.check(lab.tensors(hub_token=Secret("hf_mine")))
    asked = {one.headers.get("authorization") for one in lab.hub.requests("/resolve/")}
    assert "Bearer hf_mine" in asked
    assert all("authorization" not in one.headers for one in lab.hub.requests("/storage/"))

    lab.hub.every["/resolve/"] = Fault(429, {"Retry-After": "50"})
    lab.check(lab.tensors(cache="other", hub_mirrors=(mirror.url,), hub_token=Secret("hf_mine")))
    assert {one.headers.get("authorization") for one in mirror.seen} == {None}


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (Fault(shifts=True), "other bytes were given"),
        (Fault(headers={"X-Repo-Commit": "f" * 40}), "is not the file of commit"),
        (Fault(headers={"X-Linked-ETag": f'"{"0" * 64}"'}), "is not the file of commit"),
        (Fault(403), "refuses access"),
        (Fault(404), "has no"),
        (Fault(429, {"Retry-After": "3600"}), "429"),
    ],
    ids=["range", "commit", "hash", "refusal", "absence", "an hour"],
)
def test_source_that_cannot_be_right_is_named_and_replaced(
    lie: Fault, told: str, lab: HubLab, mirror: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.every[WEIGHTS] = lie
    lab.check(lab.tensors(hub_url=mirror.url))
    assert f"no longer read from 127.0.0.1:{mirror.port}" in caplog.text
    assert told in caplog.text
    assert lab.sent_by_coordinator() > 0


def test_changed_etag_is_another_file(
    lab: HubLab, mirror: FakeHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_line, "_RUN_BYTES", 8192)
    mirror.fail("/storage/", Fault(headers={"ETag": '"another"'}))
    lab.check(lab.tensors(hub_url=mirror.url))
    assert "any more" in caplog.text


def test_every_source_is_named_when_all_fail(lab: HubLab, mirror: FakeHub) -> None:
    tensors = lab.tensors(hub_mirrors=(mirror.url,))
    for each in (lab.hub, mirror):
        each.every[WEIGHTS] = Fault(403)
    with pytest.raises(SourceError) as caught:
        tensors.prefetch(whole(lab.checkpoint.spec))
    for name in (f"127.0.0.1:{lab.hub.port}", f"127.0.0.1:{mirror.port}", "coordinator"):
        assert name in caught.value.message


def test_wrong_bytes_are_found_by_the_second_reader(
    lab: HubLab, mirror: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    lab.check(lab.tensors(cache="first"))
    mirror.every["/storage/"] = Fault(flips=True)
    lab.check(lab.tensors(cache="second", hub_url=mirror.url))
    assert "sent wrong bytes" in caplog.text
    assert "second has read bytes of" in caplog.text


def test_first_reader_that_was_lied_to_does_not_decide(
    lab: HubLab, mirror: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.every["/storage/"] = Fault(flips=True)
    lab.tensors(cache="first", hub_url=mirror.url).prefetch(whole(lab.checkpoint.spec))
    lab.check(lab.tensors(cache="second"))
    assert "first has read bytes of" in caplog.text
    assert "second has read bytes of" not in caplog.text


def test_hashes_outlive_the_coordinator(lab: HubLab) -> None:
    pinned = PinnedHashes(lab.folder / "served")
    lab.coordinator.server = WeightsServer({REPO: lab.served}, pinned=pinned)
    lab.check(lab.tensors(cache="first"))
    with (lab.folder / "served" / f"{lab.served.card.fingerprint}.hashes").open("a") as file:
        file.write('0123 "torn')
    lab.coordinator.server = WeightsServer({REPO: lab.served}, pinned=pinned)
    peer = WeightsNode("peer", WeightsServer(CachedModels(ShardCache(lab.folder / "first"))), lab.on_exit)
    lab.check(lab.tensors(peer.as_peer(), cache="second", offline=True))
    assert sum(peer.server.sent_bytes().values()) > 0, "peers give what has a known hash"


def test_fetch_goes_on_where_it_was_cut_off(lab: HubLab) -> None:
    half = Stage(0, 1, lab.checkpoint.spec.layer_count)
    lab.check(lab.tensors(), half)
    before = lab.hub.sent_bytes
    lab.check(lab.tensors())
    assert lab.hub.sent_bytes - before < lab.local.files.total_bytes - lab.card().stage_bytes(half) + 4096


def test_rate_is_kept() -> None:
    now_s = 100.0
    rate = RateLimit(1000, lambda: now_s)
    assert rate.spend(1000) == 0.0
    assert rate.spend(500) == pytest.approx(0.5)
    now_s = 100.5
    assert rate.spend(1000) == pytest.approx(1.0)
    now_s = 200.0
    assert rate.spend(1500) == pytest.approx(0.5)


def test_limited_reader_waits(lab: HubLab) -> None:
    asked: list[int] = []

    class Watched(RateLimit):
        def spend(self, count_bytes: int) -> float:
            asked.append(count_bytes)
            return 0.0001

    lab.rate = Watched(1 << 20)
    lab.check(lab.tensors())
    assert sum(asked) == lab.hub.sent_bytes + lab.sent_by_coordinator()


def test_limited_server_waits_after_what_it_sent(lab: HubLab) -> None:
    waits: list[float] = []
    rate = RateLimit(1000, lambda: 0.0)
    lab.coordinator.server = WeightsServer({REPO: lab.served}, rate=rate, pause=waits.append)
    lab.check(lab.tensors(hub_url="http://127.0.0.1:9"))
    sent = lab.sent_by_coordinator()
    # A second's bytes are free; the rest is waited for, all links together.
    assert max(waits) == pytest.approx((sent - 1000) / 1000)


# Every kind of file


def _gguf(folder: Path) -> Path:
    folder.mkdir()
    return save_block_gguf(folder / "model.gguf", ["Q4_K", "Q8_0"]).parent


def _gguf_parts(folder: Path) -> Path:
    whole_file = save_block_gguf(folder.parent / "whole.gguf", ["Q4_0"])
    folder.mkdir()
    split_gguf(whole_file, 3, folder)
    return folder


def _quantised(folder: Path) -> Path:
    return quantise_folder(save_tiny_llama(folder.parent / "plain"), folder.parent, "gptq4-asymmetric")[0]


def _mlx(folder: Path) -> Path:
    return mlx_checkpoint.quantise_folder(save_tiny_llama(folder.parent / "plain"), folder)[0]


@pytest.mark.parametrize("save", [_gguf, _gguf_parts, _quantised, _mlx])
def test_every_format_is_read_at_the_hub(save: Callable[[Path], Path], tmp_path: Path) -> None:
    with HubLab(save(tmp_path / "model"), tmp_path / "lab") as lab:
        lab.check(lab.tensors())
        assert lab.sent_by_coordinator() == 0


@pytest.mark.parametrize("form", ["int8", "int4", "mixed", "float32"])
def test_worker_converts_to_the_bits_of_the_coordinator(form: str, tmp_path: Path) -> None:
    """Rounding what was read at the hub gives what a coordinator sends that has rounded it."""
    model = save_tiny_llama(tmp_path / "model")
    with HubLab(model, tmp_path / "lab", form) as lab:
        stage = whole(lab.checkpoint.spec)
        tensors = lab.tensors()
        tensors.prefetch(stage)
        sent = prepare_served(lab.local, form, tmp_path / "packed")
        lab.on_exit.callback(sent.tensors.close)
        assert (sent.card.kind == "packed") == (form != "float32")
        ours, theirs = shard_source(lab.card(), tensors, stage), shard_source(sent.card, sent.tensors, stage)
        for layer in range(lab.checkpoint.spec.layer_count):
            for name, place in lab.checkpoint.layout.layers[layer].items():
                if len(place.shape) > 1:
                    _check_equal(ours.matrix(name, layer), theirs.matrix(name, layer))
        _check_equal(ours.matrix("head", None), theirs.matrix("head", None))


def _check_equal(one: object, other: object) -> None:
    assert type(one) is type(other)
    for part in dataclasses.fields(one):  # type: ignore[arg-type]
        a, b = getattr(one, part.name), getattr(other, part.name)
        if hasattr(a, "dtype"):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif dataclasses.is_dataclass(a):
            _check_equal(a, b)
        else:
            assert a == b


# Hostile cards


@pytest.mark.parametrize(
    "change",
    [
        {"repo": "../../etc"},
        {"repo": "org/tiny?x="},
        {"commit": "main"},
        {"files": (HubFile("../../key", 1 << 40),)},
        {"files": (HubFile(WEIGHTS, 10),)},
        {"files": (HubFile(WEIGHTS, 1 << 40, "no hash"),)},
        {"files": ()},
        {"places": {"another": ((0, 0, 0),)}},
        {"places": {"model.norm.weight": ((0, -1, 0),)}},
        {"places": {"model.norm.weight": ((5, 0, 0),)}},
        {"places": {"model.norm.weight": ()}},
        {"places": {"model.norm.weight": ((0, 0, 0), (0, 0, 0))}},
        {"places": {"model.norm.weight": ((0, 0, 7), (0, 0, 10))}},
        {"places": {"model.norm.weight": ((0, 1 << 62, 0),)}},
    ],
    ids=str,
)
def test_card_that_leads_astray_is_refused(change: dict[str, object], lab: HubLab) -> None:
    card = lab.card()
    assert card.source is not None
    wrong = dataclasses.replace(card, source=dataclasses.replace(card.source, **change))
    with pytest.raises(CorruptModelError, match="source of"):
        decode_card(encode_card(wrong))
