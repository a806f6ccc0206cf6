"""Stages that several machines compute together: who takes part, what each holds, and when all of it is there."""

from __future__ import annotations

import pytest

from shardcompute.control import apply, next_actions
from shardcompute.control.actions import ConnectChain, FenceChain, LoadShard
from shardcompute.control.events import (
    ChainFenced,
    ChainReshaped,
    LinkBroken,
    ModelRequested,
    NodeLost,
    ShardFailed,
    ShardLoaded,
)
from shardcompute.control.placement.parallelism import AUTO, Parallelism
from shardcompute.control.sizes import sums_of, weights_part
from shardcompute.control.state import Assignment, Model, RankPlace, RankSeat, covers, is_loaded
from shardcompute.models.tensor_share import split_tensors
from shardcompute.node.admin.dry_run import size_up
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_tiny

from ..conftest import Cluster

SEATS = (RankSeat("a", 2), RankSeat("b", 1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    with open_tiny(save_tiny_llama(tmp_path_factory.mktemp("m") / "tiny")) as checkpoint:
        return size_up(checkpoint, "native", kv_tokens=1024, context_length=512)


@pytest.fixture
def grid(cluster: Cluster, tiny: Model) -> Cluster:
    """A chain of two machines that are to compute all layers together."""
    for node in ("a", "b", "c"):
        cluster.join(node, 1 << 30)
    cluster.tell(ModelRequested(tiny, parallel=AUTO))
    cluster.settle()
    [chain] = cluster.state.live_chains()
    stages = (Assignment("a", 0, tiny.layer_count, SEATS),)
    cluster.tell(ChainReshaped(chain.id, chain.epoch + 1, stages))
    return cluster


def place(rank: int) -> RankPlace:
    return RankPlace(rank, (2, 1), "gather")


def test_each_member_is_told_its_share_and_waited_for(grid: Cluster) -> None:
    loads = {}
    for _ in range(20):
        actions = next_actions(grid.state, grid.now_s)
        loads |= {each.node: each for each in actions if isinstance(each, LoadShard)}
        for each in actions:
            if not isinstance(each, LoadShard | ConnectChain):
                grid.answer(each)
        if len(loads) == 2:
            break
    assert {node: each.tensor for node, each in loads.items()} == {"a": place(0), "b": place(1)}
    [chain] = grid.state.live_chains()
    assert not is_loaded(grid.state, chain, chain.stages[0])
    first, second = (
        ShardLoaded(
            node, grid.state.nodes[node].incarnation, chain.id, chain.model, 0, each.stop, 9, each.tensor
        )
        for node, each in sorted(loads.items())
    )
    grid.tell(first)
    assert not any(isinstance(each, ConnectChain) for each in next_actions(grid.state, grid.now_s))
    grid.tell(second)
    [connect] = [each for each in next_actions(grid.state, grid.now_s) if isinstance(each, ConnectChain)]
    assert [(rank.node, rank.weight) for rank in connect.stages[0].ranks] == [("a", 2), ("b", 1)]
    assert connect.stages[0].assignment == chain.stages[0]


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_member_that_is_lost_interrupts_the_chain(grid: Cluster, lost: str) -> None:
    grid.settle()
    [chain] = grid.state.live_chains()
    assert (chain.status, chain.members) == ("ready", ("a", "b"))
    grid.tell(NodeLost(lost, grid.state.nodes[lost].incarnation, "silent", grid.now_s))
    [chain] = grid.state.live_chains()
    assert chain.is_interrupted
    grid.settle()
    [chain] = grid.state.live_chains()
    assert chain.status == "ready"
    assert lost not in chain.members


def test_a_link_between_ranks_is_a_link_of_the_chain(grid: Cluster) -> None:
    grid.settle()
    grid.tell(LinkBroken("b", "a", grid.now_s))
    [chain] = grid.state.live_chains()
    assert chain.is_interrupted
    assert [(each.a, each.b) for each in grid.state.link_breaks] == [("a", "b")]
    fences = [each for each in next_actions(grid.state, grid.now_s) if isinstance(each, FenceChain)]
    assert {"a", "b"} <= set(fences[0].nodes)
    grid.tell(ChainFenced(chain.id, chain.epoch_to_fence))
    grid.settle()
    [after] = grid.state.live_chains()
    assert (after.stages, after.status) == (chain.stages, "ready")
    assert not grid.state.link_breaks, "it has carried the chain since"


def test_another_share_of_the_same_layers_is_another_shard(grid: Cluster) -> None:
    grid.settle()
    [chain] = grid.state.live_chains()
    node = grid.state.nodes["b"]
    other = RankPlace(1, (1, 1), "gather")
    failed = ShardFailed("b", node.incarnation, chain.id, chain.model, 0, 6, "no", grid.now_s, tensor=other)
    state = apply(grid.state, failed)
    assert state.nodes["b"].shards == node.shards
    assert not state.chains[chain.id].is_interrupted


@pytest.mark.parametrize(
    ("stage", "is_sound"),
    [
        (Assignment("a", 0, 2, SEATS), True),
        (Assignment("b", 0, 2, SEATS), False),
        (Assignment("a", 0, 2, SEATS[:1]), False),
        (Assignment("a", 0, 2, (RankSeat("a", 1), RankSeat("a", 1))), False),
        (Assignment("a", 0, 2, (RankSeat("a", 1), RankSeat("b", 0))), False),
    ],
)
def test_which_stages_can_be(stage: Assignment, is_sound: bool) -> None:
    assert covers((stage,), 2) is is_sound


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (2, 1, 1)])
def test_shares_are_counted_as_they_are_cut(tiny: Model, weights: tuple[int, ...]) -> None:
    """All of them together hold every weight once, and at least each key and value."""
    terms = tiny.tensor
    assert terms is not None
    shares = split_tensors(terms.spec, weights, block=terms.block, exchange="gather").shares
    assert sum(weights_part(terms.spec, share) for share in shares) >= 0.999
    whole = sums_of(tiny, "onnx/cpu").parts(0, tiny.layer_count)
    parts = [
        sums_of(tiny, "onnx/cpu", RankPlace(rank, weights, "gather")).parts(0, tiny.layer_count)
        for rank in range(len(weights))
    ]
    assert all(part.scratch_bytes == whole.scratch_bytes for part in parts)
    assert sum(part.kv_bytes for part in parts) >= whole.kv_bytes
    assert whole.weights_bytes <= sum(part.weights_bytes for part in parts) <= 1.2 * whole.weights_bytes
    assert all(part.weights_bytes < whole.weights_bytes for part in parts)


def test_rows_of_an_embedding_that_stays_in_its_file_are_counted(tiny: Model) -> None:
    """Ranks hold their rows of it in memory."""
    held = sums_of(tiny, "onnx/cpu")
    share = sums_of(tiny, "onnx/cpu", RankPlace(0, (1, 1), "gather"))
    assert held.table_bytes > 0
    assert share.embedding_bytes >= 0.4 * held.table_bytes


def test_an_embedding_that_only_ranks_hold_keeps_nobody_from_being_one(cluster: Cluster, tiny: Model) -> None:
    assert sums_of(tiny, "onnx/cpu").embedding_bytes < sums_of(tiny, "onnx/cpu").table_bytes
    for node in ("a", "b"):
        cluster.join(node, 1 << 30, exactness="onnx-1.0/float32/avx2", holding="onnx/cpu")
    cluster.tell(ModelRequested(tiny, parallel=Parallelism(tp=2)))
    cluster.settle()
    [chain] = cluster.state.live_chains()
    assert len(chain.stages[0].ranks) == 2
