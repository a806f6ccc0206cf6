"""Emulated networks for tests: skipped, with the reason, where this system cannot make them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from shardcompute.sim import EmulatedNetwork, Emulator, load_topology, open_network, why_no_namespaces


@contextlib.contextmanager
def emulated(
    machines: Sequence[str], emulator: Emulator = Emulator.NAMESPACES, topology: str = "lan"
) -> Iterator[EmulatedNetwork]:
    if emulator is Emulator.NAMESPACES and (problem := why_no_namespaces()):
        pytest.skip(f"no emulated network here: {problem}")
    with open_network(load_topology(topology), machines, emulator) as network:
        yield network
