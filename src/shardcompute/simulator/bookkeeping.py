"""Books of a simulation: what the control plane was told, said, wrote down and decided, and what that cost.

Counts follow from the scenario and its seed; seconds are CPU time of this computer, and differ from run to run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardcompute.control import Event, encode_event, is_journalled
from shardcompute.control import events as happened
from shardcompute.control.state import ClusterState

_MOVES = (happened.MovePlanned, happened.MoveDropped, happened.ChainReshaped)


@dataclass(slots=True)
class Work:
    """How often something was done, and how long that took here."""

    count: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)


@dataclass(slots=True)
class Turn:
    has_decided: bool = False


@dataclass(slots=True)
class Books:
    messages: Counter[str] = field(default_factory=Counter)
    """Over control links, by kind, in both directions."""
    heartbeats: int = 0
    journal_events: int = 0
    journal_bytes: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    reasons: list[tuple[float, str]] = field(default_factory=list)
    """Why chains moved, and when."""
    planning: Work = field(default_factory=Work)
    """Turns in which something was decided."""
    idling: Work = field(default_factory=Work)
    """Turns in which nothing was."""
    applying: dict[str, Work] = field(default_factory=dict)
    """By kind of event."""
    served_s: float = 0.0
    """In which at least one chain worked."""
    ready_chain_s: float = 0.0
    counted_s: float = 0.0
    most_ready: int = 0

    def applied(self, event: Event) -> None:
        """An event changed the state."""
        if is_journalled(event):
            self.journal_events += 1
            self.journal_bytes += len(encode_event(event)) + 1

    def decided(self, event: Event, now_s: float) -> None:
        self.decisions[type(event).__name__] += 1
        if isinstance(event, _MOVES):
            self.reasons.append((now_s, f"{event.chain}: {event.reason}"))

    @contextmanager
    def thought(self) -> Iterator[Turn]:
        """Time a turn."""
        turn, begun_s = Turn(), time.thread_time()
        yield turn
        (self.planning if turn.has_decided else self.idling).add(time.thread_time() - begun_s)

    @contextmanager
    def changed(self, event: Event) -> Iterator[None]:
        """Time an event."""
        begun_s = time.thread_time()
        yield
        self.applying.setdefault(type(event).__name__, Work()).add(time.thread_time() - begun_s)

    def lived(self, state: ClusterState, seconds: float) -> None:
        """So long the state was this."""
        ready = sum(
            1 for chain in state.live_chains() if chain.status == "ready" and not chain.is_interrupted
        )
        self.counted_s += seconds
        self.served_s += seconds if ready else 0.0
        self.ready_chain_s += ready * seconds
        self.most_ready = max(self.most_ready, ready)
