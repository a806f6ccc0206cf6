"""Mutated frames: whatever a peer sends, its link ends or its message is ignored, and nothing else happens."""

from __future__ import annotations

import contextlib
import gc
from itertools import cycle, islice

import psutil
import pytest

from shardcompute.control.events import NodeJoined, decode_event
from shardcompute.core.errors import ShardComputeError
from shardcompute.decoding import validate_sampling
from shardcompute.node.coordinator.validation import validate_join, validate_report
from shardcompute.node.rpc.commands import decode_command, decode_connected
from shardcompute.node.rpc.frames import error_of, head_drafts_of, opening_of, picked_of, work_of
from shardcompute.security import Credentials
from shardcompute.weights.card import decode_card
from shardcompute.wire import Message, StepFailed, StepFrame, StepResult
from shardcompute.wire.codecs import find_codec
from shardcompute.wire.control import CardReply, Command, CommandReply, NodeEvent, Register
from shardcompute.wire.framing import FrameReader
from shardcompute.wire.generations import Generate, unpack_request
from support.network.mutations import LIMITS, FrameMutator, corpus
from support.network.papers import dial_as
from support.swarm.lab import LabSwarm

MEBIBYTE = 1 << 20
VOCABULARY = 256
WARMING = 20_000


def read(content: bytes) -> int:
    """The messages of a stream, each taken for what its receiver takes it; how many there were."""
    reader, place, count = FrameReader(LIMITS), 0, 0
    while place < len(content):
        space = reader.space()
        taken = min(len(space), len(content) - place)
        assert taken > 0
        space[:taken] = content[place : place + taken]
        reader.advance(taken)
        place += taken
        while (found := reader.next_frame()) is not None:
            interpret(*found)
            count += 1
    return count


def interpret(message: Message, body: memoryview) -> None:
    """What the parts of a node make of a message before they act on it."""
    if isinstance(message, StepFrame):
        for segment in message.segments:
            work_of(segment)
        for opened in message.opens:
            validate_sampling(opening_of(opened).sampling, VOCABULARY)
        if message.width:
            find_codec(message.codec).decode(body, message.rows, message.width)
    elif isinstance(message, StepResult):
        picked_of(message)
        head_drafts_of(message)
    elif isinstance(message, StepFailed):
        error_of(message)
    elif isinstance(message, Register | NodeEvent):
        # Links end for these two.
        with contextlib.suppress(ValueError, RecursionError):
            event = decode_event(message.event)
            if isinstance(event, NodeJoined):
                validate_join(event)
            else:
                validate_report(event, "node", "driver", {"node"})
    elif isinstance(message, Command):
        decode_command(message.action)
    elif isinstance(message, CommandReply):
        decode_connected(message.result)
    elif isinstance(message, CardReply):
        decode_card(message.card)
    elif isinstance(message, Generate):
        unpack_request(message.request)


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
    """Nothing but our own errors, and no memory kept."""
    read_mutated(-1 - seed, WARMING)
    gc.collect()
    before = psutil.Process().memory_info().rss
    taken, refused = read_mutated(seed, count)
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert taken > count // 20, "mutations that nothing survives test only the first check"
    assert refused > count // 20
    assert grown < 64 * MEBIBYTE, f"{grown / MEBIBYTE:.0f} MiB are kept after {count} frames"


@pytest.mark.parametrize("seed", [0])
def test_some_mutated_frames(seed: int) -> None:
    check_mutated(seed, 20_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_million_mutated_frames(seed: int) -> None:
    check_mutated(seed, 1_000_000)


def is_whole(content: bytes) -> bool:
    """Whether a link goes on behind it."""
    try:
        return read(content) > 0
    except ShardComputeError:
        return False


def assail(lab: LabSwarm, member: Credentials, seed: int, count: int) -> None:
    """Mutated frames of the served chain to every node, over links of every role, until so many were sent."""
    chain = lab.chain()
    frames = islice(FrameMutator(seed, corpus(chain.id, chain.epoch)), count)
    targets = [(lab.cluster.url, role) for role in ("control", "weights", "probe", "stage")]
    roles = ("stage", "driver", "weights", "generations", "probe")
    targets += [(worker.url, role) for worker in lab.workers for role in roles]
    for url, role in cycle(targets):
        with dial_as(member, url, role) as link:
            # Up to the frame that ends the link: nobody would read what comes behind it.
            for content in islice(frames, 100):
                with contextlib.suppress(OSError):
                    link._sock.sendall(content)
                if not is_whole(content):
                    break
            else:
                if next(frames, None) is None:
                    return


@pytest.mark.usefixtures("outlasts")
def test_mutated_frames_at_a_running_swarm(lab: LabSwarm, member: Credentials) -> None:
    assail(lab, member, 0, 300)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("outlasts")
def test_many_mutated_frames_at_a_running_swarm(lab: LabSwarm, member: Credentials) -> None:
    process = psutil.Process()
    assail(lab, member, 1, 2_000)
    before = process.memory_info().rss, process.num_fds(), process.num_threads()
    assail(lab, member, 2, 20_000)
    lab.wait_until(lambda: process.num_fds() <= before[1] + 20, "links that ended are closed")
    lab.wait_until(lambda: process.num_threads() <= before[2] + 20, "threads of links that ended are gone")
    assert process.memory_info().rss - before[0] < 128 * MEBIBYTE
