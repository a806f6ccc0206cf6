"""A running swarm under mutated frames: links end, messages are ignored, and it answers as before."""

from __future__ import annotations

import contextlib
from itertools import cycle, islice

import psutil
import pytest

from shardcompute.security import Credentials
from support.network.mutations import FrameMutator, corpus
from support.network.papers import dial_as
from support.network.readers import is_whole
from support.swarm.lab import LabSwarm

MEBIBYTE = 1 << 20


def assail(lab: LabSwarm, member: Credentials, seed: int, count: int) -> None:
    """Mutated frames of the served chain to every node, over links of every role, until so many were sent."""
    chain = lab.chain()
    frames = islice(FrameMutator(seed, corpus(chain.id, chain.epoch)), count)
    targets = [(lab.cluster.url, role) for role in ("control", "weights", "probe", "stage")]
    roles = ("stage", "driver", "weights", "generations", "probe", "finetune")
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
