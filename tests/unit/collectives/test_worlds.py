"""Forming worlds: who may be which rank, and what happens to those who come late or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shardcompute.collectives import run_ranks
from shardcompute.collectives.worlds import Membership, open_fabric
from shardcompute.core.errors import CollectiveError, LinkError, UsageError
from shardcompute.wire import JoinWorld, Ping, Refused


@pytest.fixture(params=["inproc", "local"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def total(group: Any) -> float:
    return float(group.all_reduce(np.full(3, 10.0**group.rank))[0])


def test_the_ranks_that_are_left_form_a_new_epoch_with_another(connect: Any) -> None:
    first = connect([0, 1, 2])
    first[1].world.fabric.close()
    with pytest.raises(CollectiveError):
        run_ranks([first[0], first[2]], total)
    for group in first:
        group.close()

    second = connect([0, 3, 2], epoch=2)

    assert run_ranks(second, total) == [111.0] * 3
    assert {group.epoch for group in second} == {2}


def test_a_rank_that_does_not_come_is_named(meeting: Any) -> None:
    with pytest.raises(CollectiveError, match="rank 1 did not come") as caught:
        meeting.join(0, [0, 1], timeout_s=0.2)
    assert caught.value.rank == 1
    meeting.listeners[0].close()
    with pytest.raises(CollectiveError, match="rank 0 did not come"):
        meeting.join(1, [0, 1], timeout_s=0.2)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (JoinWorld("w", 4, 1), "formed under epoch 5, not 4"),
        (JoinWorld("w", 6, 1), "formed under epoch 5, not 6"),
        (JoinWorld("v", 5, 1), "not of 'v'"),
        (JoinWorld("w", 5, 2), "is not rank 2"),
        (JoinWorld("w", 5, 0), "is not rank 0"),
        (JoinWorld("w", 5, 900), "is not rank 900"),
        (Ping(1, 0.0), "here ranks of a world meet"),
    ],
)
def test_strangers_are_refused_while_the_right_one_is_waited_for(
    meeting: Any, word: Any, reason: str
) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(meeting.join, 0, [0, 1, 2], 5)
        with meeting.dial(1, 0) as stranger:
            stranger.send(word)
            answer, _ = stranger.receive(10)
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        others = [pool.submit(meeting.join, 1, [0, 1, 2], 5), meeting.join(2, [0, 1, 2], 5)]
        groups = [waiting.result(20), others[0].result(20), others[1]]
    assert run_ranks(groups, total) == [111.0] * 3
    for group in groups:
        group.close()


@pytest.mark.parametrize("kind", ["tcp"])
def test_a_link_that_ends_while_a_world_is_formed_leaves_no_socket_open(meeting: Any) -> None:
    links = {rank: meeting.dial(0, rank) for rank in (1, 2)}
    links[2].close()
    with pytest.raises(LinkError, match="closed here"):
        open_fabric(Membership("w", 1, 0, [meeting.node(each) for each in range(3)]), links)
    assert [link._sock.fileno() for link in links.values()] == [-1, -1]


def test_memberships_that_cannot_be_are_refused() -> None:
    for epoch, rank, nodes in [
        (0, 0, ["a", "b"]),
        (1, 2, ["a", "b"]),
        (1, -1, ["a", "b"]),
        (1, 0, ["a", "a"]),
    ]:
        with pytest.raises(UsageError, match="cannot be"):
            Membership("w", epoch, rank, nodes)
