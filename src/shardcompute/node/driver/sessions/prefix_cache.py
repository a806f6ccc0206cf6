"""Prefix cache: ended sessions whose KV is kept, so that a prompt that begins like one of them need not be computed
from its start. Pure bookkeeping: whoever keeps this tells the chain what to forget.

Least recently used ones are given up first. Only whoever asks with the same scope shares: how fast an answer comes
must not tell one user what another has asked. Placeholders of pictures are the same tokens whatever is seen, so that
pictures are compared too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from shardcompute.core.generation import GenerationRequest
from shardcompute.core.pictures import PictureSpan
from shardcompute.core.steps import Prefix
from shardcompute.node.driver.sessions.session import Session, round_to_pages

SHORTEST = 32
"""Fewer tokens are computed as fast as they are copied."""
Ids = npt.NDArray[np.int64]
Seen = tuple[tuple[PictureSpan, str], ...]
"""Where a prompt's pictures lie, and their digests."""


@dataclass(frozen=True, slots=True)
class _Parked:
    scope: tuple[str, str, str]
    ids: Ids
    pictures: Seen = ()

    @property
    def held_tokens(self) -> int:
        return round_to_pages(len(self.ids))


class PrefixStore:
    """What is kept of ended sessions, by their numbers."""

    def __init__(self) -> None:
        self._parked: OrderedDict[int, _Parked] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def held_tokens(self) -> int:
        return sum(parked.held_tokens for parked in self._parked.values())

    def park(self, session: Session) -> bool:
        """Keep an ended session; False if it is not worth it."""
        length = min(session.sent, len(session.known))
        if length < SHORTEST or not session.is_opened:
            return False
        self._parked[session.id] = _Parked(
            session.request.prefix_scope, _array(session.known[:length]), _seen(session.request)
        )
        return True

    def find(self, session: Session, running: Iterable[Session]) -> Prefix | None:
        """The longest beginning that the session shares with one that is kept, or that is running."""
        # The last known token is always computed: its row picks the next one.
        wanted, seen = _array(session.known[:-1]), _seen(session.request)
        best: Prefix | None = None
        for number, parked in self._parked.items():
            if parked.scope == session.request.prefix_scope:
                # One that is wholly used up can be taken over as it is.
                length = _uncut(seen, parked.pictures, _common(wanted, parked.ids))
                is_moved = length == len(parked.ids)
                best = _longer(best, Prefix(number, length, is_moved))
        for other in running:
            if (
                other.is_opened
                and other.id != session.id
                and other.request.prefix_scope == session.request.prefix_scope
            ):
                computed = _array(other.known[: min(other.sent, len(other.known))])
                length = _uncut(seen, _seen(other.request), _common(wanted, computed))
                best = _longer(best, Prefix(other.id, length))
        if best is None:
            return None
        if best.is_moved:
            del self._parked[best.source]
        elif best.source in self._parked:
            self._parked.move_to_end(best.source)
        return best

    def kept_tokens(self, request: GenerationRequest, running: Iterable[Session]) -> int:
        """How much of a prompt's beginning `find` would find; nothing is taken for that."""
        wanted, seen = _array(request.prompt[:-1]), _seen(request)
        shared = [
            _uncut(seen, parked.pictures, _common(wanted, parked.ids))
            for parked in self._parked.values()
            if parked.scope == request.prefix_scope
        ]
        shared += [
            _uncut(
                seen,
                _seen(other.request),
                _common(wanted, _array(other.known[: min(other.sent, len(other.known))])),
            )
            for other in running
            if other.is_opened and other.request.prefix_scope == request.prefix_scope
        ]
        longest = max(shared, default=0)
        return longest if longest >= SHORTEST else 0

    def evict(self) -> int | None:
        """Give up the one that was used longest ago; its number, None if there is none."""
        return self._parked.popitem(last=False)[0] if self._parked else None

    def clear(self) -> list[int]:
        """Give up all of them."""
        sessions = list(self._parked)
        self._parked.clear()
        return sessions


def _longer(best: Prefix | None, other: Prefix) -> Prefix | None:
    if other.length < SHORTEST or (best is not None and best.length >= other.length):
        return best
    return other


def _seen(request: GenerationRequest) -> Seen:
    return tuple((picture.span, picture.digest) for picture in request.pictures)


def _uncut(mine: Seen, others: Seen, length: int) -> int:
    """So many of the first `length` tokens, which are equal, stand for the same: placeholders of other pictures, or of
    parts of one, do not."""
    for own, other in zip_longest(mine, others):
        if own != other:
            length = min(length, *(each[0].start for each in (own, other) if each is not None))
    for span, _ in mine:
        if span.start < length < span.stop:
            return span.start
    return length


def _array(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, dtype=np.int64)


def _common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.nonzero(a[:length] != b[:length])[0]
    return int(different[0]) if len(different) else length
