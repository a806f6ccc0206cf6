"""A tensor rank fetches the bytes of its share and no more, wherever from, and believes only what is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardcompute.models.rank_tensors import RankTensors
from shardcompute.models.spec import Stage, whole
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import Exchange, cut_of, split_tensors, tensor_cuts
from shardcompute.node.weights import client as weights_client
from shardcompute.node.weights import hub_line
from shardcompute.node.weights.client import RemoteTensors
from shardcompute.node.weights.server import CachedModels, WeightsServer
from shardcompute.node.weights.share_ranges import ranges_bytes, stage_ranges
from shardcompute.runtime.loaded_share import PretendedGroup
from shardcompute.weights.card import Card
from shardcompute.weights.held import card_column_block
from shardcompute.weights.served import ServedWeights, prepare_served, shard_source
from shardcompute.weights.shard_cache import ShardCache
from support.models.tiny import save_tiny
from support.network.fake_hub import FakeHub, Fault, serving
from support.network.hub_lab import REPO, HubLab, WeightsNode

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors in several pieces each, and nothing read at the hub only to be thrown away."""
    monkeypatch.setattr(weights_client, "PIECE_BYTES", 1000)
    monkeypatch.setattr(hub_line, "_GAP_BYTES", 0)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lab(model: Path, tmp_path: Path) -> Iterator[HubLab]:
    with HubLab(model, tmp_path) as opened:
        yield opened


def rank_of(
    card: Card, rank: int, weights: Sequence[int] = (1, 1), exchange: Exchange = "gather"
) -> TensorRank:
    split = split_tensors(card.spec, weights, block=card_column_block(card), exchange=exchange)
    return TensorRank(card.spec, split, PretendedGroup(rank, len(weights)))


def served_here(lab: HubLab, form: str = "native") -> tuple[ServedWeights, WeightsNode]:
    """The same model from a coordinator that has its files."""
    served = prepare_served(lab.local, form, lab.folder / "packed")
    if served.tensors is not lab.local.tensors:
        lab.on_exit.callback(served.tensors.close)
    return served, WeightsNode("origin", WeightsServer({"tiny": served}), lab.on_exit)


def sent_by(node: WeightsNode) -> int:
    return sum(node.server.sent_bytes().values())


def assert_share_is_right(
    served: ServedWeights, tensors: RemoteTensors, stage: Stage, rank: TensorRank
) -> None:
    card, number = served.card, rank.group.rank
    here = RankTensors(shard_source(card, tensors, stage), card.spec, rank.split, number)
    there = RankTensors(shard_source(card, served.tensors, stage), card.spec, rank.split, number)
    ends = [("embedding", None)] * stage.is_first + [("head", None)] * stage.is_last
    layers = range(stage.start, stage.stop)
    named = [
        (name, layer)
        for layer in layers
        for name, each in card.layout.layers[layer].items()
        if each.shape[1:]
    ]
    for name, layer in [*ends, *named]:
        expected = there.matrix(name, layer).to_dense()
        np.testing.assert_array_equal(here.matrix(name, layer).to_dense(), expected)


@pytest.mark.parametrize("form", ["native", "int8", "mixed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_asks_its_origin_for_its_own_rows(lab: HubLab, form: str, rank: int) -> None:
    served, origin = served_here(lab, form)
    stage, share = Stage(0, 2, 3), rank_of(served.card, rank)
    tensors = RemoteTensors(served.card, [origin.as_origin()], ShardCache(lab.folder / "worker"))
    with tensors:
        tensors.prefetch(stage, share)
        fetched = sent_by(origin)
        assert_share_is_right(served, tensors, stage, share)
    ranges = stage_ranges(served.card, stage, share)
    assert sent_by(origin) == fetched == ranges_bytes(ranges), (
        "nothing was left to be fetched when it was read"
    )
    cuts = tensor_cuts(served.card.spec, share.share, "gather")
    for name, place in served.card.layout.stage_tensors(stage):
        rows = cut_of(cuts, name).rows
        for stored in served.card.stored_names(place) if len(place.shape) == 2 else ():
            size = served.card.entries[stored].size_bytes
            assert rows is not None
            own = size if stored.endswith("#columns") else size * (rows[1] - rows[0]) // place.shape[0]
            assert ranges_bytes({stored: ranges[stored]}) == own
    assert fetched < 0.7 * served.card.stage_bytes(stage)


def test_ranks_that_sum_read_whole_what_they_cut_by_columns(lab: HubLab) -> None:
    """Columns do not lie together in a file."""
    card = lab.card()
    ranges = stage_ranges(card, Stage(0, 3, 3), rank_of(card, 1, exchange="reduce"))
    parts = {name: ranges_bytes({name: ranges[name]}) / card.entries[name].size_bytes for name in ranges}
    assert {part for name, part in parts.items() if "o_proj" in name or "down_proj" in name} == {1.0}
    assert {part for name, part in parts.items() if any(own in name for own in ROWS)} == {0.5}


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_ranks_fetch_the_experts_that_they_own(family: str, tmp_path: Path) -> None:
    with HubLab(save_tiny(family, tmp_path / "model"), tmp_path) as lab:
        card, stage = lab.card(), whole(lab.checkpoint.spec)
        assert card.spec.experts is not None
        ranks = [rank_of(card, rank, (3, 1)) for rank in range(2)]
        for rank in ranks:
            before = lab.hub.sent_bytes
            lab.check(lab.tensors(cache=f"rank{rank.group.rank}"), stage, rank)
            needed = ranges_bytes(stage_ranges(card, stage, rank))
            assert needed <= lab.hub.sent_bytes - before < needed + card.stage_bytes(stage) // 20
        experts = [name for name in stage_ranges(card, stage) if "experts" in name and "bias" not in name]
        shares = [stage_ranges(card, stage, rank) for rank in ranks]
        fetched = [ranges_bytes({name: each.get(name, ()) for name in experts}) for each in shares]
        assert sum(fetched) == sum(card.entries[name].size_bytes for name in experts), "each expert once"
        assert fetched[0] == 3 * fetched[1]


def test_a_share_comes_from_the_hub_and_its_hash_is_compared(lab: HubLab) -> None:
    stage = whole(lab.checkpoint.spec)
    share = rank_of(lab.card(), 1)
    needed = ranges_bytes(stage_ranges(lab.card(), stage, share))
    lab.check(lab.tensors(cache="first"), stage, share)
    assert needed <= lab.hub.sent_bytes < needed + lab.local.files.total_bytes // 20
    assert needed < 0.6 * lab.card().stage_bytes(stage)
    assert lab.sent_by_coordinator() == 0
    # Another reader of the same share finds out whether it has read the same.
    lab.check(lab.tensors(cache="second"), stage, share)
    assert lab.sent_by_coordinator() == 0


def test_a_mirror_that_lies_about_a_share_is_found_out(
    lab: HubLab, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = lab.on_exit.enter_context(serving(FakeHub()))
    mirror.put_folder(REPO, model)
    mirror.every["/storage/"] = Fault(flips=True)
    stage, share = whole(lab.checkpoint.spec), rank_of(lab.card(), 0)
    lab.check(lab.tensors(cache="first"), stage, share)
    lab.check(lab.tensors(cache="second", hub_url=mirror.url), stage, share)
    assert "sent wrong bytes" in caplog.text
    assert "second has read bytes of" in caplog.text


@pytest.mark.parametrize("lies", [False, True])
def test_peers_give_what_they_hold_of_a_share(
    lab: HubLab, lies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served, origin = served_here(lab)
    stage, card = Stage(1, 2, 3), served.card
    first, second = ShardCache(lab.folder / "first"), ShardCache(lab.folder / "second")
    with RemoteTensors(card, [origin.as_origin()], first) as tensors:
        tensors.prefetch(stage, rank_of(card, 0))
    if lies:
        _flip_ranges(first)
    peer = WeightsNode("peer", WeightsServer(CachedModels(ShardCache(lab.folder / "first"))), lab.on_exit)
    before = sent_by(origin)
    with RemoteTensors(card, [peer.as_peer(), origin.as_origin()], second) as tensors:
        tensors.prefetch(stage, rank_of(card, 0))
        assert_share_is_right(served, tensors, stage, rank_of(card, 0))
    needed = ranges_bytes(stage_ranges(card, stage, rank_of(card, 0)))
    if lies:
        assert sent_by(origin) - before >= needed // 2
    else:
        assert sent_by(peer) + sent_by(origin) - before == needed
        assert sent_by(peer) > 0
    other = ShardCache(lab.folder / "third")
    with RemoteTensors(card, [peer.as_peer(), origin.as_origin()], other) as tensors:
        tensors.prefetch(stage, rank_of(card, 1))
        assert_share_is_right(served, tensors, stage, rank_of(card, 1))


def test_a_share_that_is_cut_anew_fetches_the_difference(lab: HubLab) -> None:
    served, origin = served_here(lab)
    stage, card, cache = Stage(1, 2, 3), served.card, ShardCache(lab.folder / "worker")
    for weights in ((1, 1), (3, 1)):
        before, share = sent_by(origin), rank_of(card, 0, weights)
        with RemoteTensors(card, [origin.as_origin()], cache) as tensors:
            tensors.prefetch(stage, share)
            assert_share_is_right(served, tensors, stage, share)
        sizes = [
            ranges_bytes(stage_ranges(card, stage, rank_of(card, 0, each))) for each in ((1, 1), weights)
        ]
        needed = sizes[0] if weights == (1, 1) else sizes[1] - sizes[0]
        assert sent_by(origin) - before == needed
    before = sent_by(origin)
    with RemoteTensors(card, [origin.as_origin()], ShardCache(lab.folder / "worker")) as tensors:
        tensors.prefetch(stage, share)
        assert_share_is_right(served, tensors, stage, share)
    assert sent_by(origin) == before, "nothing travels twice, also after a restart"


def _flip_ranges(cache: ShardCache) -> None:
    """Other bytes where a share was found right, each with a hash of its own that fits."""
    for path in cache.folder.rglob("*.*-*"):
        if path.suffix != ".sha256":
            content = bytearray(path.read_bytes()[:-32])
            content[0] ^= 1
            path.write_bytes(content + hashlib.sha256(content).digest())
