"""What a coordinator finds in its journal when it starts again, however long that has become."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shardcompute.control import ClusterState, HealthPolicy, encode_event
from shardcompute.control import events as happened
from shardcompute.control.events import is_journalled
from shardcompute.node.coordinator.journal import Journal, replay_journal
from support.swarm.fake_cluster import serving_cluster

EMPTY = ClusterState(driver="head")


def written(path: Path, states: list[ClusterState]) -> Journal:
    """A journal in which each of these states is remembered after the other, and a little has happened since."""
    journal = Journal(path)
    for state in states:
        journal.append(encode_event(happened.StateRemembered(state)))
    journal.append(encode_event(happened.NodeDrained("a")))
    return journal


def test_what_the_cluster_is_started_with_counts(tmp_path: Path) -> None:
    now = ClusterState(driver="another", health=HealthPolicy(accusers=5))
    serving = serving_cluster(500, 500).coordinator.state
    with contextlib.closing(written(tmp_path / "journal", [serving])) as journal:
        state = replay_journal(journal, now).state
    assert (state.driver, state.health, state.placing) == ("another", now.health, now.placing)
    assert state.chains == serving.chains


def test_what_cannot_be_read_is_skipped_and_named(tmp_path: Path) -> None:
    with contextlib.closing(written(tmp_path / "journal", [EMPTY])) as journal:
        journal.append(b'{"type":"OfALaterRelease"}')
        replayed = replay_journal(journal, EMPTY)
        assert (replayed.state, replayed.event_count, replayed.unread) == (EMPTY, 3, {3})
        assert replayed.size_bytes == sum(map(len, journal.events()))


def test_states_are_worth_remembering() -> None:
    assert is_journalled(happened.StateRemembered(EMPTY))
