"""Ranks that fail: nobody waits without end, all are told, and what is left forms a new epoch."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest

from shardcompute.collectives import FabricGroup, InprocHub, World, run_ranks, thread_groups
from shardcompute.collectives.deadlines import CallDeadlines
from shardcompute.collectives.fabrics.connection import PeerConnection
from shardcompute.collectives.fabrics.fabric import farewell_frame
from shardcompute.collectives.fabrics.frames import HEAD_BYTES, FrameKind, Operation, pack_head, unpack_head
from shardcompute.collectives.fabrics.socket_fabric import SocketFabric
from shardcompute.core.errors import CollectiveError, LinkError

FLOAT = np.dtype("float32")
ANY_GROUP = thread_groups(2)[0]
SOON = CallDeadlines(least_s=0.1, untried_s=0.1)


def pair(epoch: int = 1) -> tuple[FabricGroup, socket.socket]:
    """A rank of two over a real connection, and the raw other end of it."""
    near, far = socket.socketpair()
    near.setblocking(False)
    fabric = SocketFabric(0, epoch, {1: PeerConnection(1, near)})
    return FabricGroup(World(fabric, CallDeadlines(least_s=0.3, untried_s=0.3))), far


def frame(
    owner: FabricGroup, array: np.ndarray, *, epoch: int = 1, sequence: int = 1, **changes: Any
) -> bytes:
    """What rank 1 would send for the first all-reduce."""
    fields: dict[str, Any] = {
        "kind": FrameKind.ELEMENTS,
        "operation": Operation.ALL_REDUCE,
        "dtype": 1,
        "group": owner._id,
        "epoch": epoch,
        "sequence": sequence,
        "step": 0,
        "rank": 1,
        "shape": array.shape,
        "body_bytes": array.nbytes,
    }
    return pack_head(**(fields | changes)) + array.tobytes()


def test_a_silent_rank_is_given_up_and_all_others_hear_of_it() -> None:
    groups = thread_groups(4)
    for group in groups:
        group.world.deadlines = SOON
    started_s = time.monotonic()

    def work(group: FabricGroup) -> CollectiveError | None:
        if group.rank == 3:
            return None
        with pytest.raises(CollectiveError) as caught:
            group.all_reduce(np.ones(8, FLOAT))
        return caught.value

    errors = run_ranks(groups, work)[:3]

    assert time.monotonic() - started_s < 10
    assert any(error.rank == 3 for error in errors if error)
    assert all(error.rank is not None for error in errors if error)
    assert all(error.operation == "all_reduce" and error.sequence == 1 for error in errors if error)


def test_an_abort_reaches_ranks_in_the_middle_of_a_call() -> None:
    groups = thread_groups(3)

    def work(group: FabricGroup) -> str:
        if group.rank == 1:
            group.abort("its memory ran out")
            return ""
        with pytest.raises(CollectiveError) as caught:
            group.barrier()
        return caught.value.message

    messages = run_ranks(groups, work)

    assert all("rank 1" in each and "its memory ran out" in each for each in (messages[0], messages[2]))


def test_an_error_of_our_own_ends_the_call_for_others() -> None:
    def work(group: FabricGroup) -> None:
        if group.rank == 0:
            raise MemoryError("no room")
        group.all_reduce(np.ones(8, FLOAT))

    with pytest.raises((MemoryError, CollectiveError), match="no room"):
        run_ranks(thread_groups(2), work)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda group: group.all_reduce(np.ones(9, FLOAT)), r"float32\[9\]"),
        (lambda group: group.all_reduce(np.ones(8, np.float16)), r"float16\[8\]"),
        (lambda group: group.all_gather(np.ones(8, FLOAT)), "all_gather"),
        (lambda group: group.split([0, 1]).all_reduce(np.ones(8, FLOAT)), "of group"),
    ],
)
def test_ranks_that_do_different_things_are_told(other: Any, says: str) -> None:
    def work(group: FabricGroup) -> str:
        with pytest.raises(CollectiveError) as caught:
            group.all_reduce(np.ones(8, FLOAT)) if group.rank == 0 else other(group)
        return caught.value.message

    assert any(re.search(says, message) for message in run_ranks(thread_groups(2), work))


def test_a_world_is_formed_again_and_refuses_what_comes_late() -> None:
    hub = InprocHub(2)
    old = thread_groups(2, hub=hub)
    late = old[1].world.fabric
    old[0].abort("rank 1 is stuck")
    new = thread_groups(2, hub=hub, epoch=2)
    # Rank 1's former self wakes up in the middle of its call.
    old[1].world.deadlines = SOON
    with pytest.raises(CollectiveError):
        old[1].all_reduce(np.full(8, 5, FLOAT))

    found = run_ranks(new, lambda group: group.all_reduce(np.full(8, 1 + group.rank, FLOAT)))

    assert [each.tolist() for each in found] == [[3.0] * 8] * 2
    assert new[0].world.fabric.refused_frames >= 1
    assert late.epoch < new[1].epoch
    with pytest.raises(CollectiveError):
        old[0].barrier()


def test_frames_of_an_old_epoch_are_skipped_on_a_connection_too() -> None:
    group, far = pair(epoch=3)
    mine, theirs = np.ones(4, FLOAT), np.full(4, 2, FLOAT)
    far.sendall(
        frame(group, np.full(500, 9, FLOAT), epoch=2)
        + farewell_frame(2, 1, "old")
        + frame(group, theirs, epoch=3)
    )

    assert group.all_reduce(mine).tolist() == [3.0] * 4
    assert group.world.fabric.refused_frames == 2
    group.close()
    far.close()


def test_frames_are_understood_however_they_are_cut() -> None:
    group, far = pair()
    mine, theirs = np.ones(40, FLOAT), np.arange(40, dtype=FLOAT)
    sent = b"".join(frame(group, theirs, sequence=sequence) for sequence in (1, 2, 3))

    def drip() -> None:
        for start in range(0, len(sent), 7):
            far.sendall(sent[start : start + 7])

    thread = threading.Thread(target=drip)
    thread.start()
    for _ in range(3):
        assert group.all_reduce(mine).tolist() == (theirs + 1).tolist()
    thread.join()
    group.close()
    far.close()


def hostile_frames(group: FabricGroup) -> dict[str, bytes]:
    array = np.ones(4, FLOAT)
    good = frame(group, array)
    return {
        "garbage": bytes(range(200)),
        "half a frame": good[: HEAD_BYTES + 3],
        "half a head": good[:20],
        "nothing": b"",
        "another size": frame(group, array, body_bytes=1 << 20),
        "too much": frame(group, array, shape=(1 << 31,), body_bytes=1 << 33),
        "a shape that does not add up": frame(group, array, shape=(3,)),
        "no such type": frame(group, array, dtype=99),
        "no such operation": frame(group, array, operation=99),
        "no such kind": frame(group, array, kind=99),
        "too many dimensions": good[:7] + b"\xff" + good[8:],
        "another rank": frame(group, array, rank=0),
        "another group": frame(group, array, group=12345),
        "another call": frame(group, array, sequence=7),
        "another step": frame(group, array, step=7),
        "a later epoch": frame(group, array, epoch=9),
        "an abort": farewell_frame(1, 1, "so \x1b[31m it ends"),
        "an abort without end": pack_head(FrameKind.ABORT, Operation.FORM, 0, 0, 1, 0, 0, 1, (), 1 << 40),
    }


@pytest.mark.parametrize("name", list(hostile_frames(ANY_GROUP)))
def test_whatever_comes_is_refused_and_named(name: str) -> None:
    group, far = pair()
    far.sendall(hostile_frames(group)[name])
    far.shutdown(socket.SHUT_WR)

    with pytest.raises(CollectiveError, match=r"all_reduce 1 .*on rank 0.*") as caught:
        group.all_reduce(np.ones(4, FLOAT))

    assert "\x1b" not in caught.value.message
    # The peer is told why.
    told = b""
    while chunk := far.recv(65536):
        told += chunk
    assert unpack_head(told[HEAD_BYTES + 16 :][:HEAD_BYTES]).kind == FrameKind.ABORT
    assert b"all_reduce 1" in told
    group.close()
    far.close()


def test_any_head_is_read_or_refused() -> None:
    rng = np.random.default_rng(3)
    for _ in range(3000):
        raw = bytearray(frame(ANY_GROUP, np.ones(4, FLOAT))[:HEAD_BYTES])
        for _ in range(rng.integers(1, 5)):
            raw[rng.integers(0, HEAD_BYTES)] = rng.integers(0, 256)
        try:
            head = unpack_head(raw)
        except LinkError:
            continue
        assert head.body_bytes <= 128 << 20
        assert head.what


def test_a_peer_that_sends_free_shapes_is_bounded() -> None:
    group, far = pair()
    head = frame(group, np.empty(0, FLOAT), operation=Operation.SEND, shape=(1 << 31, 1 << 31), body_bytes=0)
    far.sendall(head)
    with pytest.raises(CollectiveError, match=r"came for an array|over the limit"):
        group.receive(1)
    group.close()
    far.close()


def test_waits_follow_what_calls_have_taken() -> None:
    deadlines = CallDeadlines()
    assert deadlines.timeout_s(8192, 0.001) == pytest.approx(10.008)
    deadlines.took(8192, 0.001)
    assert deadlines.timeout_s(8192, 0.001) == pytest.approx(2.008)
    deadlines.took(8192, 1.0)
    assert deadlines.timeout_s(8192, 0.001) == pytest.approx(8.008)
    assert deadlines.timeout_s(1 << 20, 0.5) == pytest.approx(14.0)
    deadlines.took(8192, 60.0)
    assert deadlines.timeout_s(8192, 0.0) == pytest.approx(30.0)


def test_who_waits_for_work_waits_as_long_as_it_likes() -> None:
    groups = thread_groups(2)
    for group in groups:
        group.world.deadlines = CallDeadlines(least_s=0.01, untried_s=0.01)
    has_begun = threading.Event()

    def work(group: FabricGroup) -> float:
        if group.rank == 0:
            has_begun.wait(10)
            time.sleep(0.1)
            group.broadcast(np.ones(1, FLOAT))
            return 1.0
        has_begun.set()
        return float(group.broadcast(None, timeout_s=20.0)[0])

    assert run_ranks(groups, work) == [1.0, 1.0]


def test_heads_have_the_documented_layout() -> None:
    raw = pack_head(1, 2, 3, 4, 5, 6, 7, 8, (9, 10), 11)
    assert len(raw) == HEAD_BYTES == 64
    assert raw[:8] == b"SCc1\x01\x02\x03\x02"
    assert struct.unpack("<IIIHHQII", raw[8:40]) == (4, 5, 6, 7, 8, 11, 9, 10)
