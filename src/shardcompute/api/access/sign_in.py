"""Sign-in of the page: a code that is good once and for an hour, exchanged for a key that lives while it is used.

The code travels in the part of a link that browsers send to nobody (`#…`), so that it is in no log. The key stays in
the tab that asked for it: unlike a cookie it is not sent to other ports of the same machine, and no other site can use
it. Only hashes are kept, in memory.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardcompute.api.errors import RequestError
from shardcompute.security.api_keys import KeyRole, KeySummary

CODE_LIFE_S = 3600.0
SESSION_IDLE_S = 12 * 3600.0
PAGE = KeySummary("page", "signed in by a link", role=KeyRole.OPERATE)
SESSION_PREFIX = "sk-page-"
_RANDOM_BYTES = 24
_MOST_CODES = 64
_MOST_SESSIONS = 256


@dataclass(frozen=True, slots=True)
class SignInCode:
    """Told once."""

    code: str
    life_s: float


class PageSessions:
    """Codes and the sessions that came of them. Methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By digest, the moment at which each ends; oldest first.
        self._codes: dict[bytes, float] = {}
        self._sessions: dict[bytes, float] = {}

    def create_code(self) -> SignInCode:
        code = secrets.token_urlsafe(_RANDOM_BYTES)
        with self._lock:
            _put(self._codes, code, self._clock() + CODE_LIFE_S, _MOST_CODES)
        return SignInCode(code, CODE_LIFE_S)

    def exchange(self, code: str) -> str:
        """The key of a new session; 403 for a code that is unknown, used or too old."""
        with self._lock:
            if not self._take(self._codes, code):
                raise RequestError(
                    "This link has been used, or is older than an hour.",
                    hint="`shardcompute page` on the coordinator's machine prints a new one",
                    code="sign_in_refused",
                    status=403,
                )
            key = SESSION_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
            _put(self._sessions, key, self._clock() + SESSION_IDLE_S, _MOST_SESSIONS)
        return key

    def find(self, key: str) -> KeySummary | None:
        """Who signed in with this key; it is good for another while."""
        with self._lock:
            if not self._take(self._sessions, key):
                return None
            _put(self._sessions, key, self._clock() + SESSION_IDLE_S, _MOST_SESSIONS)
        return PAGE

    def end(self, key: str) -> None:
        with self._lock:
            self._take(self._sessions, key)

    def _take(self, kept: dict[bytes, float], text: str) -> bool:
        """Whether `text` was kept and is still good; it is no more."""
        ends_s = kept.pop(_digest(text), None)
        return ends_s is not None and self._clock() < ends_s


def _put(kept: dict[bytes, float], text: str, ends_s: float, most: int) -> None:
    kept[_digest(text)] = ends_s
    while len(kept) > most:
        del kept[next(iter(kept))]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
