"""Stop strings found in text that arrives in pieces.

The rule, over the text as one stream of characters: the stop string that is complete first ends it; of
several that end at the same character, the longest counts. So the outcome does not depend on how the text was
cut into pieces, and no text is ever awaited after a stop string is complete. Text that could still become
part of a stop string is held back, and nothing else is.

The search is an Aho-Corasick automaton: constant work per character, whatever the number of stop strings. It is built
when text first comes, not when an answer is asked for, and all answers that watch for the same strings share it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from weakref import WeakValueDictionary

from shardcompute.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Watches one answer. After a match all further text is dropped."""

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        if "" in stop_strings:
            raise UsageError(
                "Invalid 'stop': an empty string would end every answer at once.",
                hint="leave empty strings out of 'stop'",
            )
        self._stops = SharedStops.of(tuple(stop_strings))
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        return self._matched

    def push(self, text: str) -> StopResult:
        """Take the next piece; return what is certain by now."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not text:
            return StopResult("")
        automaton = self._stops.automaton
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = automaton.step(self._state, character)
            stop = automaton.complete.get(self._state)
            if stop is not None:
                self._held, self._matched = "", stop
                return StopResult(pending[: end if self._include_stop else end - len(stop)], stop)
        certain = len(pending) - automaton.depths[self._state]
        self._held = pending[certain:]
        return StopResult(pending[:certain])

    def finish(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held


class SharedStops:
    """The automaton of some stop strings, for every answer under way that watches for them."""

    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], SharedStops]] = WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stop_strings = stop_strings

    @classmethod
    def of(cls, stop_strings: tuple[str, ...]) -> SharedStops:
        with cls._sharing:
            known = cls._shared.get(stop_strings)
            if known is None:
                known = cls._shared[stop_strings] = cls(stop_strings)
            return known

    @cached_property
    def automaton(self) -> StopAutomaton:
        return StopAutomaton(self._stop_strings)


class StopAutomaton:
    """A state is a prefix of some stop string: the longest one that the text so far ends with. State 0 is empty."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.depths = array("l", [0])
        """How long each state's prefix is."""
        self.complete: dict[int, str] = {}
        """Where one or more stop strings end, the longest of them."""
        self._following: dict[tuple[int, str], int] = {}
        self._parents: list[tuple[int, str]] = [(0, "")]
        for stop in stop_strings:
            current = 0
            for character in stop:
                current = self._following.get((current, character)) or self._add(current, character)
            self.complete[current] = stop
        self._fallbacks = self._link_fallbacks()

    def step(self, state: int, character: str) -> int:
        """The state behind one more character."""
        following = self._following.get((state, character))
        while following is None and state:
            state = self._fallbacks[state]
            following = self._following.get((state, character))
        return following or 0

    def _add(self, parent: int, character: str) -> int:
        added = self._following[parent, character] = len(self.depths)
        self.depths.append(self.depths[parent] + 1)
        self._parents.append((parent, character))
        return added

    def _link_fallbacks(self) -> array[int]:
        """For each state the longest shorter prefix that its text also ends with, shallow states first."""
        fallbacks = array("l", [0]) * len(self.depths)
        for state in sorted(range(len(self.depths)), key=self.depths.__getitem__):
            parent, character = self._parents[state]
            if self.depths[state] > 1:
                fallback = fallbacks[parent]
                while fallback and (fallback, character) not in self._following:
                    fallback = fallbacks[fallback]
                fallbacks[state] = self._following.get((fallback, character), 0)
            # A whole stop string is longer than any that ends inside it.
            inner = self.complete.get(fallbacks[state])
            if inner is not None and state not in self.complete:
                self.complete[state] = inner
        return fallbacks
