"""Fault injection: blackouts, partitions, flapping lines, lines that collapse, slow machines.

Each is a block: inside it the fault is there, behind it the network is as it was before. Blocks nest; two that overlap
otherwise undo each other's work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from shardcompute.sim.conditions import Change
from shardcompute.sim.network import EmulatedNetwork

_PERIOD_S = 0.1


@contextmanager
def changed(network: EmulatedNetwork, *changes: Change) -> Iterator[None]:
    """The network with these changes."""
    before = network.conditions
    network.change(*changes)
    try:
        yield
    finally:
        network.impose(before)


@contextmanager
def cut_off(network: EmulatedNetwork, *machines: str) -> Iterator[None]:
    """Nobody reaches these machines, nor they anybody (none named: nobody reaches anybody)."""
    with changed(network, Change(machines=machines, is_cut=True)):
        yield


@contextmanager
def partitioned(network: EmulatedNetwork, side: tuple[str, ...]) -> Iterator[None]:
    """The machines of one side reach each other, and so do all others; nothing passes between the sides."""
    others = [machine for machine in network.machines if machine not in side]
    cuts = [Change(between=(ours, theirs), is_cut=True) for ours in side for theirs in others]
    with changed(network, *cuts):
        yield


@contextmanager
def flapping(network: EmulatedNetwork, machine: str, up_s: float, down_s: float) -> Iterator[None]:
    """The line of a machine goes down and comes back, again and again."""

    def flap(over: threading.Event) -> None:
        while not over.is_set():
            with cut_off(network, machine):
                if over.wait(down_s):
                    return
            over.wait(up_s)

    with _meanwhile(flap, f"flap {machine}"):
        yield


@contextmanager
def slowed(pid: int, times: float) -> Iterator[None]:
    """A process of ours that gets only one part in `times` of each tenth of a second."""
    run_s, process = _PERIOD_S / times, psutil.Process(pid)

    def hold_up(over: threading.Event) -> None:
        try:
            while not over.is_set():
                process.suspend()
                over.wait(_PERIOD_S - run_s)
                process.resume()
                over.wait(run_s)
        except psutil.NoSuchProcess:
            return

    with _meanwhile(hold_up, f"slow {pid}"):
        yield


@contextmanager
def _meanwhile(disturb: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Runs beside the block until that is over, which the event tells."""
    over = threading.Event()
    thread = threading.Thread(target=disturb, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
