"""Machines in network namespaces: they reach each other, their network changes, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardcompute.core.errors import BackendError, UsageError
from shardcompute.sim import Change, EmulatedNetwork
from shardcompute.sim.faults import changed, cut_off, flapping, partitioned, slowed
from shardcompute.sim.leftovers import remove_leftovers
from support.network.emulated import emulated

PATIENCE_S = 20.0
NAMESPACES = Path("/run/netns")


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    with emulated(("a", "b", "c"), topology="home-20ms") as network:
        yield network


@contextlib.contextmanager
def connected(network: EmulatedNetwork, a: str, b: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from machine a to machine b."""
    port = network.new_port(b)
    with network.inside(b):
        listener = socket.create_server((network.host(b), port))
    with listener:
        with network.inside(a):
            near = socket.create_connection((network.host(b), port), PATIENCE_S)
        with near:
            far, remote = listener.accept()
            with far:
                far.settimeout(PATIENCE_S)
                assert remote[0] == network.host(a)
                yield near, far


def _hears(receiver: socket.socket, within_s: float) -> bool:
    receiver.settimeout(within_s)
    try:
        return bool(receiver.recv(1))
    except TimeoutError:
        return False
    finally:
        receiver.settimeout(PATIENCE_S)


def test_everything_arrives_even_with_loss_and_jitter(network: EmulatedNetwork) -> None:
    sent = os.urandom(300_000)
    with (
        connected(network, "a", "b") as (near, far),
        changed(network, Change(loss=0.02, jitter_ms=20)),
    ):

        def send() -> None:
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)

        # Buffers need not hold all of it.
        sender = threading.Thread(target=send)
        sender.start()
        received = b"".join(iter(lambda: far.recv(65536), b""))
        sender.join()
    assert received == sent
    assert network.conditions.path("a", "b").loss == 0


def test_nothing_passes_while_cut_off(network: EmulatedNetwork) -> None:
    with connected(network, "a", "b") as (near, far), connected(network, "b", "c") as (other, third):
        with cut_off(network, "a"):
            near.sendall(b"1")
            assert not _hears(far, 0.3)
            other.sendall(b"1")
            assert _hears(third, PATIENCE_S), "the others still reach each other"
        assert _hears(far, PATIENCE_S), "sent again once the way is free"


def test_partition_cuts_between_sides_only(network: EmulatedNetwork) -> None:
    with connected(network, "a", "b") as (near, far), connected(network, "b", "c") as (other, third):
        with partitioned(network, ("a", "b")):
            near.sendall(b"1")
            assert _hears(far, PATIENCE_S)
            other.sendall(b"1")
            assert not _hears(third, 0.3)
        assert _hears(third, PATIENCE_S)


def test_flapping_line_lets_everything_through_in_the_end(network: EmulatedNetwork) -> None:
    before = network.conditions
    with (
        connected(network, "a", "b") as (near, far),
        flapping(network, "b", up_s=0.2, down_s=0.2),
    ):
        for _ in range(5):
            near.sendall(b"1")
            assert _hears(far, PATIENCE_S)
    assert network.conditions == before


def test_unknown_machines_are_named(network: EmulatedNetwork) -> None:
    with pytest.raises(UsageError, match="no machine 'z'"):
        network.change(Change(machines=("z",), is_cut=True))


def test_programs_run_on_their_machine(network: EmulatedNetwork) -> None:
    code = "import socket; s = socket.create_server(('10.213.0.3', 0)); print('here')"
    done = {
        machine: subprocess.run(
            network.command(machine, [sys.executable, "-c", code]),
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for machine in network.machines
    }
    assert done == {"a": "", "b": "", "c": "here\n"}


STAY = ["sh", "-c", "echo here; exec sleep 600"]


def test_closing_removes_machines_and_what_runs_on_them() -> None:
    with emulated(("a", "b")) as network:
        mine = {name for name in os.listdir(NAMESPACES) if name.startswith(f"scnet-{os.getpid()}-")}
        started = subprocess.Popen(network.command("a", STAY), stdout=subprocess.PIPE)
        assert started.stdout is not None
        with started.stdout as output:
            assert output.readline(), "it is there"
    assert started.wait(PATIENCE_S) == -signal.SIGKILL
    gone = {name for name in mine if not (NAMESPACES / name).exists()}
    assert {name for name in mine if name.endswith(("-a", "-b"))} & gone
    with pytest.raises(BackendError, match="closed"):
        network.change(Change(is_cut=True))


CRASH = """
import os, signal, subprocess, sys
from shardcompute.sim import load_topology, open_network
network = open_network(load_topology("lan"), ["a"], "namespaces")
child = subprocess.Popen(network.command("a", sys.argv[1:]), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crash_leaves_nothing_behind(network: EmulatedNetwork) -> None:
    crashed = subprocess.Popen([sys.executable, "-c", CRASH, *STAY], stdout=subprocess.PIPE, text=True)
    assert crashed.stdout is not None
    with crashed.stdout as output:
        left = int(output.readline())
    assert crashed.wait(PATIENCE_S) == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_S
    prefix = f"scnet-{crashed.pid}-"
    while any(name.startswith(prefix) for name in os.listdir(NAMESPACES)) or psutil.pid_exists(left):
        assert time.monotonic() < deadline, os.listdir(NAMESPACES)
        time.sleep(0.05)


def test_leftovers_of_the_dead_are_removed(network: EmulatedNetwork) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(PATIENCE_S)
    leftover = f"scnet-{dead.pid}-0-a"
    subprocess.run(["ip", "netns", "add", leftover], check=True)
    assert leftover in remove_leftovers()
    assert not (NAMESPACES / leftover).exists()
    assert any(name.startswith(f"scnet-{os.getpid()}-") for name in os.listdir(NAMESPACES))


def test_slowed_processes_run_on_afterwards() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    watched = psutil.Process(process.pid)
    with slowed(process.pid, 5):
        deadline = time.monotonic() + PATIENCE_S
        while watched.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
