"""The relays that a node may use: which of them it reaches, by which door, and how far away they are."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardcompute.core.errors import LinkError
from shardcompute.node.reach.offers import MOST_RELAYS, RelayDistance, Relays
from shardcompute.node.reach.punch import PunchPort
from shardcompute.relay.client import RelayDoor, RelayPass

log = logging.getLogger(__name__)
_MEASURE_S = 5.0
_MOST_TRIED = 3
_NEXT_DOOR_S = 0.4


@dataclass(frozen=True, slots=True)
class KnownRelay:
    """A relay by the first of its doors; `url` is the one that we use."""

    name: str
    url: str
    took_s: float
    is_ipv6: bool = False
    """Whether it was reached over that."""

    @property
    def is_plain(self) -> bool:
        return self.url.startswith("tcp://")


_Answers = queue.SimpleQueue[tuple[str, KnownRelay | None]]


class RelayBook:
    """Relays that the coordinator has told of, and the ticket for them. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pass: RelayPass | None = None
        self._known: tuple[KnownRelay, ...] = ()
        self._told: Sequence[Sequence[str]] = ()
        self._measuring = threading.Lock()
        self.is_measured = threading.Event()

    def learn(self, shown: RelayPass, relays: Sequence[Sequence[str]]) -> None:
        """Use this ticket from now on; see in the background which of these relays can be reached."""
        with self._lock:
            self._pass, self._told = shown, relays
        in_background("relays", self._measure)

    @property
    def distances(self) -> Relays:
        """What is told to a peer."""
        with self._lock:
            return tuple(RelayDistance(each.name, each.took_s) for each in self._known)

    def punch_port(self, timeout_s: float) -> PunchPort | None:
        """A port as the nearest relay sees it; None where none can be asked."""
        for relay in self._all():
            if relay.is_plain:
                try:
                    return PunchPort(relay.url, timeout_s, is_ipv6=relay.is_ipv6)
                except LinkError as error:
                    log.info("no port to punch with: %s", error.message)
                return None
        return None

    def in_common(self, ours: Relays, theirs: Relays) -> list[str]:
        """The relays that both reach, the nearest to both together first; the same list at both ends."""
        far = {each.url: each.took_s for each in theirs}
        both = [(each.took_s + far[each.url], each.url) for each in ours if each.url in far]
        return [url for _, url in sorted(both)][:_MOST_TRIED]

    def meet(self, name: str, meeting: bytes, peer: str, timeout_s: float) -> socket.socket:
        """A socket with `peer` at the other end; `LinkError` where it cannot be had."""
        relay = next((each for each in self._all() if each.name == name), None)
        with self._lock:
            shown = self._pass
        if relay is None or shown is None:
            raise LinkError(f"the relay {name} is not known here")
        try:
            door = RelayDoor(relay.url, timeout_s)
        except LinkError:
            # It may be gone: the next link should not have to find that out.
            in_background("relays", self._measure)
            raise
        with door:
            return door.meet(shown, meeting, peer, timeout_s)

    def _all(self) -> tuple[KnownRelay, ...]:
        with self._lock:
            return self._known

    def _measure(self) -> None:
        """Each as soon as it has answered; those that were known stay so until they have not."""
        with self._measuring:
            with self._lock:
                told = {doors[0]: doors for doors in self._told[:MOST_RELAYS] if doors}
                known = {each.name: each for each in self._known if each.name in told}
            answers: _Answers = queue.SimpleQueue()
            for name, doors in told.items():
                in_background(f"relay {name}", partial(_tell, answers, name, doors))
            for _ in told:
                name, found = answers.get()
                known.pop(name, None)
                if found is not None:
                    known[name] = found
                with self._lock:
                    self._known = tuple(sorted(known.values(), key=lambda each: each.took_s))
                if found is not None:
                    self.is_measured.set()
        self.is_measured.set()


def _tell(answers: _Answers, name: str, doors: Sequence[str]) -> None:
    found = None
    try:
        found = _measured(doors)
    finally:
        answers.put((name, found))


def _measured(doors: Sequence[str]) -> KnownRelay | None:
    """By the first door that opens. One that says nothing is not waited for long before the next is tried, too."""
    opened: queue.SimpleQueue[KnownRelay | None] = queue.SimpleQueue()
    is_open = threading.Event()
    for number, url in enumerate(doors):
        in_background(
            f"door {url}", partial(_try_door, doors[0], url, number * _NEXT_DOOR_S, is_open, opened)
        )
    for _ in doors:
        found = opened.get()
        if found is not None:
            return found
    return None


def _try_door(
    name: str,
    url: str,
    after_s: float,
    is_open: threading.Event,
    opened: queue.SimpleQueue[KnownRelay | None],
) -> None:
    found: KnownRelay | None = None
    try:
        if not is_open.wait(after_s):
            with RelayDoor(url, _MEASURE_S) as door:
                is_open.set()
                found = KnownRelay(name, url, door.took_s, ":" in door.local[0])
    except LinkError as error:
        log.info("a relay cannot be reached: %s", error.message)
    finally:
        opened.put(found)


def in_background(name: str, task: Callable[[], None]) -> None:
    threading.Thread(target=task, name=name, daemon=True).start()
