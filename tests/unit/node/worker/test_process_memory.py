"""What a worker's process takes is told, and what hundreds of sessions leave behind is nothing."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardcompute.backends.kv import HostKv
from shardcompute.control import ClusterState, apply
from shardcompute.control.events import NodeSeen
from shardcompute.core.batch import Segment
from shardcompute.core.generation import Sampling
from shardcompute.core.kv_types import KvShape
from shardcompute.core.process_memory import (
    give_back_large_blocks,
    join_pages,
    release_code,
    resident_bytes,
)
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.admin.view_builder import view_nodes
from shardcompute.node.worker.activation_log import ActivationLog, Chunk
from support.swarm.noisy_cluster import Machine, NoisyCluster

WIDTH = 64


def test_what_sessions_hold_is_bounded_and_gone_when_they_end() -> None:
    """Owned bytes, counted by their owners, over as many requests as a worker was seen to grow with."""
    log = ActivationLog(limit_bytes=200 * WIDTH * 4)
    kv = HostKv(2, KvShape(1, 8), context_length=256, budget_bytes=1 << 20)
    most = 0
    for session in range(1, 541):
        for start in range(0, 60, 20):
            opening = [Opening(session, Sampling(), 60)] if start == 0 else []
            work = [SessionRows(session, start, tuple(range(20)))]
            log.append(work, opening, Chunk("exact", WIDTH, np.zeros((20, WIDTH), dtype=np.float32)))
            segments = [Segment(session, start, 20, 0)]
            kv.budget.check(segments)
            kv.budget.take(segments[0])
        most = max(most, log.used_bytes)
        assert kv.budget.usage().used_bytes <= kv.budget.usage().total_bytes
        if session > 4:
            log.forget(session - 4)
            kv.release(session - 4)
    assert most <= 200 * WIDTH * 4
    for session in range(537, 541):
        log.forget(session)
        kv.release(session)
    assert (log.used_bytes, log.lengths()) == (0, {})
    assert kv.budget.usage().used_bytes == 0


def test_a_node_tells_what_its_process_takes() -> None:
    cluster = NoisyCluster({"a": Machine()})
    life = cluster.state.nodes["a"].incarnation
    state: ClusterState = apply(cluster.state, NodeSeen("a", life, 1.0, 700 << 20))
    assert view_nodes(state, 1.0)[0].resident_bytes == 700 << 20
    assert apply(state, NodeSeen("a", life, 2.0)).nodes["a"].resident_bytes == 700 << 20
    assert resident_bytes() > 10 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library of Linux is told")
def test_the_c_library_takes_the_advice() -> None:
    assert give_back_large_blocks()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_code_that_is_let_go_comes_back_as_it_is_run() -> None:
    def file_bytes() -> int:
        found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    numbers = np.arange(64.0).reshape(8, 8)
    before, product = file_bytes(), numbers @ numbers
    release_code()
    assert file_bytes() < before - (4 << 20)
    assert np.array_equal(numbers @ numbers, product)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_constants_of_libraries_are_let_go_and_what_loading_wrote_is_not() -> None:
    def pages_of(library: str) -> tuple[int, int]:
        """Of its read-only data: KiB of the file, and KiB that were written when it was loaded."""
        part = rf"r--p [^\n]*{library}[^\n]*\n(?:\w+:[^\n]*\n)*?"
        text = Path("/proc/self/smaps").read_text()
        resident, written = (
            sum(int(size) for size in re.findall(rf"{part}{field}:\s+(\d+)", text))
            for field in ("Rss", "Anonymous")
        )
        return resident - written, written

    numbers = np.arange(64.0).reshape(8, 8)
    product, (before, written) = numbers @ numbers, pages_of("_multiarray_umath")
    release_code()
    after, kept = pages_of("_multiarray_umath")
    assert after < before / 2
    assert kept == written
    assert np.array_equal(numbers @ numbers, product)


@pytest.mark.skipif(sys.platform != "linux", reason="the system of Linux is told")
def test_only_memory_that_is_there_is_joined_and_it_keeps_its_numbers() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    full = np.arange(4 << 20, dtype=np.int64)
    sparse = np.frombuffer(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE), dtype=np.uint8)
    sparse[:: 1 << 20] = 1
    before = resident()
    joined = join_pages()
    assert joined % (2 << 20) == 0
    assert resident() - before < 8 << 20
    assert np.array_equal(full, np.arange(4 << 20))
    assert sparse.sum() == 64
