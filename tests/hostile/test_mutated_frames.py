"""Mutated frames: whatever a peer sends, its link ends or its message is ignored, and nothing else happens."""

from __future__ import annotations

import gc
import resource
import sys
from itertools import islice

import psutil
import pytest

from shardcompute.core.errors import ShardComputeError
from support.network.mutations import FrameMutator, corpus
from support.network.readers import read

MEBIBYTE = 1 << 20
WARMING = 20_000


def read_mutated(seed: int, count: int) -> tuple[int, int]:
    """How many of so many mutated frames were taken for messages, and how many refused."""
    taken = refused = 0
    for content in islice(FrameMutator(seed, corpus()), count):
        try:
            taken += read(content)
        except ShardComputeError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {content!r} raises {error!r}") from error
    return taken, refused


def check_mutated(seed: int, count: int) -> None:
    """Nothing but our own errors, no memory kept, and at no moment much of it taken."""
    read_mutated(-1 - seed, WARMING)
    gc.collect()
    before = psutil.Process().memory_info().rss
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken, refused = read_mutated(seed, count)
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - highest
    assert taken > count // 20, "mutations that nothing survives test only the first check"
    assert refused > count // 20
    assert grown < 64 * MEBIBYTE, f"{grown / MEBIBYTE:.0f} MiB are kept after {count} frames"
    # In kibibytes, on a Mac in bytes.
    assert peak < 128 * 1024 * (1024 if sys.platform == "darwin" else 1)


@pytest.mark.parametrize("seed", [0])
def test_some_mutated_frames(seed: int) -> None:
    check_mutated(seed, 20_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_million_mutated_frames(seed: int) -> None:
    check_mutated(seed, 1_000_000)
