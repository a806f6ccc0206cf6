"""Strangers at an open cluster: they serve inner layers, all audited, rise by record and fall by proof."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardcompute.core.errors import AuthError, ForbiddenError
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.security import Role, parse_token
from shardcompute.trust.distributions import WINDOW
from shardcompute.trust.pools import PoolPolicy
from support.models.requests import greedy, sampled
from support.swarm.lab import SPREAD, Alone, LabSwarm, LabWorker, swarm

from .test_audits import TOKENS, ask, different, skip_a_layer

EAGER = PoolPolicy(promoted_after=1, least_age_s=0.0, per_network=2, most_layers=2, most_share=0.5)


def serve_with_a_stranger(lab: LabSwarm) -> LabWorker:
    """Two machines with a token, and one without; all of them serve."""
    for _ in range(2):
        lab.add_worker(40)
    stranger = lab.add_worker(40, token=parse_token(lab.cluster.access.public_token()))
    lab.wait_until(
        lambda: [node.status for node in lab.state.nodes.values()] == ["ready"] * 3, lambda: lab.describe()
    )
    lab.serve()
    lab.wait_serving(stages=3)
    return stranger


def test_a_stranger_serves_inner_layers_under_full_audit_and_is_promoted(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    one, two, _ = different(alone, 3)
    windows = (len(one) + TOKENS - 1) // WINDOW
    policy = msgspec.structs.replace(EAGER, promoted_after=2 * windows)
    with swarm(tmp_path, tiny, layers=(), placing=SPREAD, pool=policy) as lab:
        stranger = serve_with_a_stranger(lab)
        [first, middle, last] = lab.chain().stages
        assert middle.node == stranger.node, "it has neither the first nor the last layer"
        assert middle.stop - middle.start <= 2
        assert lab.state.nodes[stranger.node].is_on_probation
        assert stranger.node not in {each.node for each in lab.chain().standbys}
        # The second time its beginning is known, and computed all the same: else it could not be audited.
        for request in (greedy(one, TOKENS), greedy(one, TOKENS)):
            assert ask(lab, request).result() == alone.answer(request)
        lab.wait_until(
            lambda: lab.state.pool[stranger.node].standing == "promoted",
            lambda: f"a promotion: {lab.state.pool}",
        )
        assert lab.state.nodes[stranger.node].audits == 2
        assert not lab.state.nodes[stranger.node].is_on_probation
        assert lab.state.nodes[first.node].audits == lab.state.nodes[last.node].audits == 0
        # Without being asked for a receipt nothing is audited now.
        assert lab.ask(sampled(two, 8)) == alone.answer(sampled(two, 8))


def test_a_stranger_that_cheats_is_expelled_and_does_not_come_back(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(), placing=SPREAD, pool=EAGER) as lab:
        cheat = serve_with_a_stranger(lab)
        one, two, _ = different(alone, 3)
        skip_a_layer(cheat, tiny)
        lab.ask(greedy(one, TOKENS))
        lab.wait_until(
            lambda: lab.state.pool[cheat.node].standing == "expelled", lambda: f"expulsion: {lab.state.pool}"
        )
        assert "is not what" in lab.state.pool[cheat.node].reason
        lab.wait_until(lambda: cheat.node in lab.cluster.access.revocations.node_ids, "the revocation")
        lab.wait_serving(stages=2)
        assert lab.ask(greedy(two, TOKENS)) == alone.answer(greedy(two, TOKENS))
        assert all(node.audits_failed == 0 for id, node in lab.state.nodes.items() if id != cheat.node)
        lab.kill(cheat)
        public = parse_token(lab.cluster.access.public_token())
        with pytest.raises(AuthError, match="expelled"):
            join_cluster(public, cheat.folder, Role.WORKER)
        with pytest.raises(ForbiddenError, match="removed"):
            join_cluster(lab.token, cheat.folder, Role.WORKER)
        # A new key takes the network's last place and starts from nothing; after it there is none.
        lab.add_worker(40, token=public)
        with pytest.raises(AuthError, match="of this network"):
            join_cluster(public, tmp_path / "another", Role.WORKER)


def test_a_cluster_that_is_not_open_lets_nobody_in_without_a_token(tmp_path: Path, tiny: Path) -> None:
    with swarm(tmp_path, tiny, layers=()) as lab:
        public = parse_token(lab.cluster.access.public_token())
        with pytest.raises(AuthError, match="token"):
            join_cluster(public, tmp_path / "stranger", Role.WORKER)
        assert not lab.state.pool
