"""Copies that come with a crowd and go with it: every answer is what it would have been, wherever it was computed."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from support.models.requests import mixture
from support.swarm.lab import STILL, Alone, Talk, swarm
from support.swarm.streams import assert_undisturbed, start_streams


def test_a_crowd_brings_a_copy_and_its_end_takes_it_away_from_nobody(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    eager = replace(STILL, most_chains=2, sessions_per_chain=2, crowded_s=0.1, calm_s=0.1)
    with swarm(tmp_path, tiny, layers=(3, 3, 3, 3), stages=2, placing=eager) as lab:
        pool = lab.cluster.pool
        talks: list[Talk] = []

        def crowd_has_come() -> bool:
            """However quickly answers end, there are others."""
            if sum(pool.sessions_of(lab.model).values()) < 5:
                talks.extend(lab.start(request) for request in mixture(alone, 6, 200))
            return len(lab.state.live_chains()) == 2

        lab.wait_until(crowd_has_come, lab.describe)
        lab.wait_until(lambda: len(pool.sessions_of(lab.model)) == 2, "the copy serves")
        assert "answers run or wait" in lab.state.models[lab.model].copies_reason
        talks += start_streams(lab, alone, 4, 30)
        assert_undisturbed(lab, alone, talks)
        lab.wait_until(lambda: len(lab.state.live_chains()) == 1, lab.describe)
        lab.wait_until(lambda: len(pool.sessions_of(lab.model)) == 1, "it is gone")
        assert "has given its last answer" in lab.state.models[lab.model].copies_reason
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20))


def test_a_chain_that_takes_nobody_new_is_sent_nobody(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3, 3, 3), chains=2, stages=2) as lab:
        first, second = (chain.id for chain in lab.state.live_chains())
        lab.cluster.pool.spare({first})
        talks = start_streams(lab, alone, 4, 30)
        assert {view.chain for view in lab.cluster.pool.requests.views()} == {second}
        lab.cluster.pool.spare({first, second})
        talks += start_streams(lab, alone, 2, 30)
        assert_undisturbed(lab, alone, talks)
