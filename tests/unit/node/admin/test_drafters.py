"""Which drafters a chain has, in words that say why one is not at work."""

from __future__ import annotations

import pytest

from shardcompute.control import events as happened
from shardcompute.control.state import Chain, HeldDraftHead
from shardcompute.node.admin.drafters import DrafterView, view_drafters
from shardcompute.node.admin.incidents import Incidents, view_health
from support.swarm.fake_cluster import NOW_S, FakeCluster, serving_cluster

ROUTER = {"acceptance_head": 0.613, "share_head": 0.8, "share_plain": 0.2}


def told(cluster: FakeCluster, chain: Chain, *heads: HeldDraftHead) -> None:
    """The last stage's next heartbeat."""
    last = cluster.coordinator.state.nodes[chain.stages[-1].node]
    cluster.coordinator.post(
        happened.NodeSeen(last.id, last.incarnation, NOW_S, resident_bytes=1, draft_heads=heads)
    )


def head_of(
    cluster: FakeCluster, chain: Chain, router: dict[str, float], problem: str | None = ""
) -> DrafterView | None:
    views = view_drafters(cluster.coordinator.state, chain, router, problem=problem)
    assert views[0].drafter == "ngram"
    return next((each for each in views if each.drafter == "head"), None)


@pytest.fixture
def cluster() -> FakeCluster:
    return serving_cluster(1000, 1000)


@pytest.fixture
def chain(cluster: FakeCluster) -> Chain:
    (chain,) = cluster.coordinator.state.live_chains()
    return chain


def test_a_model_without_one_has_none(cluster: FakeCluster, chain: Chain) -> None:
    assert head_of(cluster, chain, {}, problem=None) is None


def test_what_was_not_told_yet_is_being_loaded(cluster: FakeCluster, chain: Chain) -> None:
    view = head_of(cluster, chain, {})
    assert view is not None
    assert view.state == "loading"


def test_one_at_work_says_how_it_fares(cluster: FakeCluster, chain: Chain) -> None:
    told(cluster, chain, HeldDraftHead(chain.id, 12 << 20))
    view = head_of(cluster, chain, ROUTER)
    assert view is not None
    assert (view.state, view.accepted_share, view.rounds_share) == ("at work", 0.61, 0.8)
    name = cluster.coordinator.state.nodes[chain.stages[-1].node].name
    assert view.text == f"head: at work on {name} (12.0 MiB), in 80% of rounds, 61% of its tokens right"


def test_one_that_should_be_and_is_not_says_why(cluster: FakeCluster, chain: Chain) -> None:
    told(cluster, chain, HeldDraftHead(chain.id, problem="no memory is left for it"))
    view = head_of(cluster, chain, ROUTER)
    assert view is not None
    assert view.state == "missing"
    assert view.text.endswith(": no memory is left for it")
    health = view_health(cluster.coordinator.state, Incidents(), {}, NOW_S)
    assert health.drafters == {(chain.id, "ngram"): "at work", (chain.id, "head"): "missing"}


def test_of_other_chains_nothing_is_said(cluster: FakeCluster, chain: Chain) -> None:
    told(cluster, chain, HeldDraftHead("another", 5))
    assert head_of(cluster, chain, {}, problem=None) is None


def test_one_that_nobody_can_read_says_so_before_any_stage_does(cluster: FakeCluster, chain: Chain) -> None:
    view = head_of(cluster, chain, {}, problem="head.draft is left out: it is cut off")
    assert view is not None
    assert (view.state, view.text) == ("missing", "head: missing: head.draft is left out: it is cut off")
