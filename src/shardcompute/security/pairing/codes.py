"""Pairing codes: the one that is good now, how often it may be tried (once), and how often codes may be wrong.

A code is seven random digits and one that catches slips of the hand before they cost the only try. At most one is good
at a time. Whoever shows a wrong proof has used it up, and after some wrong ones within an hour no more are made: a
guesser has one try in ten million for each code that somebody makes. Strangers hold no memory here, however often they
call.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shardcompute.core.errors import AuthError, QueueFullError, UsageError

CODE_LIFE_S = 300.0
MOST_WRONG = 5
WRONG_SPAN_S = 3600.0
MOST_BEGUN = 30
BEGUN_SPAN_S = 60.0
_DIGITS = 7
# Damm's table: it catches every wrong digit and every two that changed places.
_DAMM = (
    (0, 3, 1, 7, 5, 9, 8, 6, 4, 2),
    (7, 0, 9, 2, 1, 5, 4, 8, 6, 3),
    (4, 2, 0, 6, 8, 7, 1, 3, 5, 9),
    (1, 7, 5, 0, 9, 8, 3, 4, 2, 6),
    (6, 1, 2, 3, 0, 4, 5, 9, 7, 8),
    (3, 6, 7, 4, 2, 0, 9, 5, 8, 1),
    (5, 8, 6, 9, 7, 2, 0, 1, 3, 4),
    (8, 9, 4, 5, 3, 6, 2, 0, 1, 7),
    (9, 4, 3, 8, 6, 1, 7, 2, 0, 5),
    (2, 5, 8, 1, 4, 3, 6, 7, 9, 0),
)


@dataclass(frozen=True, slots=True, eq=False)
class PairingCode:
    """A code that was made; its digits are for the screens of those who pair."""

    digits: str = field(repr=False)
    expires_at_s: float

    @property
    def shown(self) -> str:
        """In two groups, as people read it."""
        return f"{self.digits[:4]} {self.digits[4:]}"


def parse_code(text: str) -> str:
    """The digits of a code that somebody typed; UsageError, without repeating them, if no code looks like this."""
    digits = "".join(each for each in text if not each.isspace() and each != "-")
    if len(digits) != _DIGITS + 1 or not (digits.isascii() and digits.isdigit()) or _check_digit(digits):
        raise UsageError(
            "This is no pairing code: a digit is wrong or missing",
            hint=f"type the {_DIGITS + 1} digits that the cluster's page or `shardcompute pair` shows",
        )
    return digits


class PairingDesk:
    """The code of one cluster. Methods may be called from any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        random_below: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        self._clock = clock
        self._random_below = random_below
        self._lock = threading.Lock()
        self._code: PairingCode | None = None
        self._wrong: deque[float] = deque(maxlen=MOST_WRONG)
        self._begun: deque[float] = deque(maxlen=MOST_BEGUN)

    def open(self) -> PairingCode:
        """A new code, in place of the one before. QueueFullError after too many wrong ones."""
        number = f"{self._random_below(10**_DIGITS):0{_DIGITS}}"
        with self._lock:
            now_s = self._clock()
            if len(self._wrong) == MOST_WRONG and now_s - self._wrong[0] < WRONG_SPAN_S:
                raise QueueFullError(
                    f"Wrong codes were tried {MOST_WRONG} times within an hour: somebody may be guessing",
                    hint="let the machine join with a token: shardcompute token create",
                )
            self._code = PairingCode(f"{number}{_check_digit(number)}", now_s + CODE_LIFE_S)
            return self._code

    def begin(self) -> PairingCode:
        """The code for an exchange that begins. AuthError if none is good now, QueueFullError if too many begin."""
        with self._lock:
            now_s = self._clock()
            code = self._good(now_s)
            if len(self._begun) == MOST_BEGUN and now_s - self._begun[0] < BEGUN_SPAN_S:
                raise QueueFullError("Too many machines try to pair", hint="try again in a minute")
            self._begun.append(now_s)
            return code

    def settle(self, code: PairingCode, *, is_right: bool) -> None:
        """End an exchange, and the code with it: the first proof that is shown decides, and all others are late.

        AuthError unless it was the right one.
        """
        with self._lock:
            now_s = self._clock()
            if self._good(now_s) is not code:
                raise _no_code()
            self._code = None
            if not is_right:
                self._wrong.append(now_s)
        if not is_right:
            raise AuthError("The pairing code is wrong, and is not good any more", hint="make a new code")

    def _good(self, now_s: float) -> PairingCode:
        if self._code is None or now_s >= self._code.expires_at_s:
            self._code = None
            raise _no_code()
        return self._code


def _no_code() -> AuthError:
    return AuthError(
        "The cluster lets nobody pair now, or the code has run out",
        hint="make a new code on its page or with: shardcompute pair",
    )


def _check_digit(digits: str) -> int:
    """0 for digits that end in their own check digit."""
    row = 0
    for each in digits:
        row = _DAMM[row][int(each)]
    return row
