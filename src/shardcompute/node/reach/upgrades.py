"""Upgrades: links through a relay, tried again on better ways for as long as they are open."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from shardcompute.core.errors import LinkError
from shardcompute.node.reach.switching_link import SwitchingLink
from shardcompute.wire import Link
from shardcompute.wire.messages import PathSwitched
from shardcompute.wire.socket_link import SocketLink

log = logging.getLogger(__name__)
LASTING_ROLES = frozenset({"stage", "driver", "generations", "weights"})
"""Of links that are worth it. Those of ranks are detached from their sockets, probes are over in a moment."""
_PREFIX = "upgrade "
_WAITS_S = (2.0, 30.0, 120.0, 600.0)
_CHOICE_S = 10.0
Redial = Callable[[str, str], Link]
"""A link with a node in this role, on any way but a relay. Raises LinkError."""


def upgrade_role(meeting: bytes) -> str:
    """The role in which a better way to the end of this link is dialled."""
    return _PREFIX + meeting.hex()


@dataclass(slots=True)
class _Due:
    link: weakref.ref[SwitchingLink]
    role: str
    tries: int
    at_s: float


class Upgrades:
    """Both ends register a link; the one that dialled it tries, and says on the better way that it is the one: of
    several that came about at once, both must take the same. Methods may be called from any thread."""

    def __init__(self, redial: Redial) -> None:
        self._redial = redial
        self._changed = threading.Condition()
        self._links: weakref.WeakValueDictionary[str, SwitchingLink] = weakref.WeakValueDictionary()
        self._due: list[_Due] = []
        self._is_running = False

    def dialled(self, link: SocketLink, role: str, meeting: bytes) -> Link:
        """The link to use, which will move to a better way once there is one."""
        if role not in LASTING_ROLES:
            return link
        switching = self._register(link, meeting)
        due = _Due(weakref.ref(switching), upgrade_role(meeting), 0, time.monotonic() + _WAITS_S[0])
        with self._changed:
            self._due.append(due)
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="upgrades", daemon=True).start()
        return switching

    def answered(self, link: SocketLink, meeting: bytes) -> Link:
        """The same, at the other end."""
        return self._register(link, meeting) if link.role in LASTING_ROLES else link

    def is_expected(self, role: str, node: str) -> bool:
        """Whether this node may dial a better way for a link."""
        link = self._links.get(role) if role.startswith(_PREFIX) else None
        return link is not None and link.peer == node and not link.is_closed

    def take(self, link: Link) -> bool:
        """Whether this link is a better way for another; then it is that one's, or closed."""
        if not link.role.startswith(_PREFIX):
            return False
        former = self._links.get(link.role)
        if former is None or former.peer != link.peer or not isinstance(link, SocketLink):
            link.close()
        else:
            threading.Thread(target=_move_if_chosen, args=(former, link), name="upgrade", daemon=True).start()
        return True

    def _register(self, link: SocketLink, meeting: bytes) -> SwitchingLink:
        switching = SwitchingLink(link)
        self._links[upgrade_role(meeting)] = switching
        return switching

    def _run(self) -> None:
        """Try what is due, until there is nothing left to try."""
        while True:
            with self._changed:
                self._due = [each for each in self._due if (link := each.link()) and not link.is_closed]
                if not self._due:
                    self._is_running = False
                    return
                soonest = min(self._due, key=lambda each: each.at_s)
                wait_s = soonest.at_s - time.monotonic()
                if wait_s > 0:
                    # Not for as long as that may be: links end meanwhile.
                    self._changed.wait(min(wait_s, 30.0))
                    continue
            if self._try(soonest):
                with self._changed:
                    self._due.remove(soonest)
            else:
                soonest.tries += 1
                soonest.at_s = time.monotonic() + _WAITS_S[min(soonest.tries, len(_WAITS_S) - 1)]

    def _try(self, due: _Due) -> bool:
        link = due.link()
        if link is None:
            return True
        try:
            better = self._redial(link.peer, due.role)
        except LinkError as error:
            log.debug("no better way to %s: %s", link.peer, error.message)
            return False
        if not isinstance(better, SocketLink):
            better.close()
            return True
        try:
            better.send(PathSwitched())
        except LinkError as error:
            log.debug("a better way to %s was lost again: %s", link.peer, error.message)
            better.close()
            return False
        return _move(link, better)


def _move_if_chosen(link: SwitchingLink, better: SocketLink) -> None:
    """Several ways may come through at once: whoever tries says on which of them it goes on, and closes the others."""
    try:
        message, _ = better.receive(_CHOICE_S)
    except (LinkError, TimeoutError):
        message = None
    if isinstance(message, PathSwitched):
        _move(link, better)
    else:
        better.close()


def _move(link: SwitchingLink, better: SocketLink) -> bool:
    try:
        if link.replace(better):
            link.remark = ""
            log.info("the link with %s goes on on the rung %r", link.peer, better.rung)
            return True
    except LinkError as error:
        log.info("the link with %s was lost while it moved: %s", link.peer, error.message)
        link.close()
    return False
