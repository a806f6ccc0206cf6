"""What is claimed of a link that was measured."""

from __future__ import annotations

import pytest

from shardcompute.node.rpc.link_probe import bandwidth

MIB = 1 << 20


def test_bandwidth_leaves_the_round_trip_out() -> None:
    assert bandwidth(MIB, 0.110, 0.010) == pytest.approx(MIB / 0.1)


@pytest.mark.parametrize("sent_s", [2e-4, 3e-4, 0.08])
def test_a_load_as_quick_as_a_ping_is_no_proof_of_endless_bandwidth(sent_s: float) -> None:
    assert bandwidth(MIB, sent_s, 3e-4 if sent_s < 0.01 else 0.09) <= 8 * MIB / sent_s
