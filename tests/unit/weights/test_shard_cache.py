"""Fetched weights on disk: ranges, resumption, damage, a full disk."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError, UsageError
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.weights.card import Card, make_card
from shardcompute.weights.formats.tensor_file import TensorEntry
from shardcompute.weights.shard_cache import CachedShard, CachedTensors, Held, ShardCache
from shardcompute.weights.sources import disk
from support.models.networks import plain_spec

LAYERS = 4
CONTENT = {
    name: np.random.default_rng(index).bytes(16 * 4 * 4)
    for index, name in enumerate(["embedding", "norm", *(f"layers.{i}.q" for i in range(LAYERS))])
}


def _card(model: str = "tiny", content: str = "weights", adapters: tuple[str, ...] = ()) -> Card:
    entries = {name: TensorEntry(name, "F32", (16, 4), 0, len(raw)) for name, raw in CONTENT.items()}
    places = {name: TensorPlace(name, (16, 4)) for name in entries}
    for adapter in adapters:
        stored = f"@adapter/{adapter}/0/{32 * '0'}"
        entries[stored] = TensorEntry(stored, "U8", (3,), 0, 3)
    model_places = {
        "embedding": places["embedding"],
        "norm": places["norm"],
        "head": places["embedding"],
    }
    layers = tuple({"q": places[f"layers.{i}.q"]} for i in range(LAYERS))
    return make_card(model, plain_spec(LAYERS), Layout(model_places, layers), entries, content=content)


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "shards")


@pytest.fixture
def shard(cache: ShardCache) -> CachedShard:
    return cache.open(_card())


def _reopened(cache: ShardCache) -> CachedShard:
    """As another process finds it."""
    return ShardCache(cache.folder).open(_card())


def _fill(shard: CachedShard, *names: str) -> None:
    for name in names:
        shard.write(name, 0, CONTENT[name])
        shard.mark_verified(name, hashlib.sha256(CONTENT[name]).digest())


def test_ranges_come_back_and_gaps_are_told(cache: ShardCache, shard: CachedShard) -> None:
    raw = CONTENT["norm"]
    shard.write("norm", 100, raw[100:140])
    shard.write("norm", 10, raw[10:20])
    assert shard.missing("norm", 0, 256) == [(0, 10), (20, 100), (140, 256)]
    for found in (shard, _reopened(cache)):
        assert found.missing("norm", 12, 120) == [(20, 100)]
        assert found.read("norm", 105, 30) == raw[105:135]
        assert found.read("norm", 15, 10) is None
        assert found.missing("norm", 110, 130) == []


def test_a_read_crosses_ranges_also_overlapping_ones(shard: CachedShard) -> None:
    raw = CONTENT["norm"]
    for start, stop in [(0, 64), (32, 100), (100, 256)]:
        shard.write("norm", start, raw[start:stop])
    assert shard.read("norm", 0, 256) == raw
    assert shard.read("norm", 40, 100) == raw[40:140]
    assert shard.sha256("norm") == hashlib.sha256(raw).digest()


def test_a_tensor_with_a_hole_has_no_hash(shard: CachedShard) -> None:
    shard.write("norm", 0, CONTENT["norm"][:200])
    assert shard.sha256("norm") is None


def test_ranges_outside_the_tensor_are_refused(shard: CachedShard) -> None:
    with pytest.raises(CorruptModelError):
        shard.write("norm", 250, bytes(7))
    with pytest.raises(CorruptModelError):
        shard.read("norm", 250, 7)


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_flipped_byte_makes_the_range_missing(cache: ShardCache, shard: CachedShard, position: int) -> None:
    _fill(shard, "norm")
    (path,) = shard.folder.glob("*.0-256")
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    found = _reopened(cache)
    assert found.is_verified("norm")
    assert found.read("norm", 100, 4) is None
    assert not found.is_verified("norm")
    assert found.missing("norm", 0, 256) == [(0, 256)]
    assert not path.exists()


def test_a_range_cut_short_by_a_crash_is_missing(cache: ShardCache, shard: CachedShard) -> None:
    shard.write("norm", 0, CONTENT["norm"])
    (path,) = shard.folder.glob("*.0-256")
    path.write_bytes(path.read_bytes()[:100])
    assert _reopened(cache).missing("norm", 0, 256) == [(0, 256)]


def test_a_range_that_vanishes_while_open_is_missing(shard: CachedShard) -> None:
    shard.write("norm", 0, CONTENT["norm"])
    assert shard.read("norm", 0, 4) == CONTENT["norm"][:4]
    for path in shard.folder.glob("*.0-256"):
        path.unlink()
    assert shard.read("norm", 0, 4) is None


def test_bytes_that_come_later_were_not_checked_before(cache: ShardCache, shard: CachedShard) -> None:
    _fill(shard, "norm")
    for path in shard.folder.glob("*.0-256"):
        path.unlink()
    found = _reopened(cache)
    found.write("norm", 0, bytes(256))
    assert not found.missing("norm", 0, 256)
    assert not found.is_verified("norm")


def test_what_was_dropped_is_gone(cache: ShardCache, shard: CachedShard) -> None:
    _fill(shard, "norm", "embedding")
    shard.drop("norm")
    found = _reopened(cache)
    assert found.missing("norm", 0, 256) == [(0, 256)]
    assert not found.is_verified("norm")
    assert found.is_verified("embedding")


def test_holdings_are_contiguous_layers_found_right(cache: ShardCache, shard: CachedShard) -> None:
    assert cache.holdings() == ()
    _fill(shard, "layers.0.q", "layers.1.q", "layers.3.q")
    shard.write("layers.2.q", 0, CONTENT["layers.2.q"])  # all there, but nobody checked it
    print_of = shard.card.fingerprint
    expected = (Held("tiny", print_of, 0, 2), Held("tiny", print_of, 3, 4))
    assert cache.holdings() == ShardCache(cache.folder).holdings() == expected
    shard.mark_verified("layers.2.q", hashlib.sha256(CONTENT["layers.2.q"]).digest())
    assert cache.holdings() == (Held("tiny", print_of, 0, 4),)


def test_other_adapters_leave_what_is_here_of_the_weights(cache: ShardCache, shard: CachedShard) -> None:
    _fill(shard, *CONTENT)
    stored = f"@adapter/wild/0/{32 * '0'}"
    for reopened in (cache, ShardCache(cache.folder)):
        adapted = reopened.open(_card(adapters=("wild",)))
        assert adapted.card.fingerprint == shard.card.fingerprint
        assert all(adapted.is_verified(name) for name in CONTENT)
        assert [(held.start, held.stop) for held in adapted.holdings()] == [(0, LAYERS)]
        adapted.drop(stored)
        assert adapted.missing(stored, 0, 3) == [(0, 3)]
        adapted.write(stored, 0, b"abc")
        adapted.mark_verified(stored, hashlib.sha256(b"abc").digest())
        assert reopened.find(shard.card.fingerprint) is adapted
    plain = cache.open(_card())
    assert stored not in plain.card.entries
    assert cache.open(_card(adapters=("wild",))).is_verified(stored), "it was taken away and is back"


def test_models_do_not_mix_and_can_be_evicted(cache: ShardCache, shard: CachedShard) -> None:
    other = cache.open(_card("tuned", "other weights"))
    _fill(shard, "layers.0.q")
    assert other.missing("layers.0.q", 0, 256) == [(0, 256)]
    _fill(other, "layers.1.q")
    before = cache.size_bytes
    freed = cache.evict(shard.card.fingerprint)
    assert freed > 256
    assert cache.size_bytes == before - freed
    assert [held.model for held in cache.holdings()] == ["tuned"]
    assert cache.evict(shard.card.fingerprint) == 0
    assert cache.open(_card()).missing("layers.0.q", 0, 256) == [(0, 256)]


@pytest.mark.parametrize("name", ["", "..", "../models", "a" * 63, "A" * 64])
def test_only_fingerprints_are_evicted(cache: ShardCache, name: str) -> None:
    with pytest.raises(UsageError):
        cache.evict(name)


def test_strangers_in_the_folder_are_left_alone(cache: ShardCache, shard: CachedShard) -> None:
    _fill(shard, "layers.0.q")
    (cache.folder / "notes.txt").write_text("mine")
    (shard.folder / "junk.0-9").write_bytes(b"junk")
    damaged = cache.folder / ("f" * 64)
    damaged.mkdir()
    (damaged / "card").write_bytes(b"no card")
    assert [held.start for held in ShardCache(cache.folder).holdings()] == [0]


def test_a_cache_that_was_never_used_is_empty(cache: ShardCache) -> None:
    assert (cache.holdings(), cache.size_bytes, cache.shards()) == ((), 0, ())
    assert not cache.folder.exists()


def test_a_disk_with_little_room_is_left_alone(shard: CachedShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_free_bytes", lambda folder: 1 << 20)
    with pytest.raises(DiskFullError):
        shard.write("norm", 0, CONTENT["norm"])
    assert shard.missing("norm", 0, 256) == [(0, 256)]
    assert not list(shard.folder.glob("*.0-256*"))


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(
    shard: CachedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(DiskFullError):
        shard.write("norm", 0, CONTENT["norm"])
    assert shard.missing("norm", 0, 256) == [(0, 256)]
    assert not list(shard.folder.glob("*.0-256*"))


def test_peers_are_given_checked_tensors_only(cache: ShardCache, shard: CachedShard) -> None:
    tensors = CachedTensors(shard)
    shard.write("norm", 0, CONTENT["norm"])
    with pytest.raises(SourceError, match="norm"):
        tensors.read_bytes("norm", 0, 16)
    _fill(shard, "norm")
    assert tensors.read_bytes("norm", 16, 16) == CONTENT["norm"][16:32]
    assert tensors.read_rows("norm", 2, 4) == CONTENT["norm"][32:64]
    assert tensors.read_rows("norm") == CONTENT["norm"]
    with pytest.raises(CorruptModelError):
        tensors.read_rows("norm", 2, 17)
    tensors.close()
