"""Stop strings found in text that arrives in pieces.

The rule, over the text as one stream of characters: the stop string that is complete first ends it; of
several that end at the same character, the longest counts. So the outcome does not depend on how the text was
cut into pieces, and no text is ever awaited after a stop string is complete. Text that could still become
part of a stop string is held back, and nothing else is.

The search is an Aho-Corasick automaton: constant work per character, whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardcompute.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


@dataclass(slots=True)
class _State:
    """A prefix of some stop string: the longest one that the text so far ends with."""

    depth: int
    following: dict[str, int] = field(default_factory=dict)
    fallback: int = 0
    complete: str | None = None
    """The longest stop string that the text ends with here."""


class StopMatcher:
    """Watches one answer. After a match all further text is dropped."""

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        if "" in stop_strings:
            raise UsageError(
                "Invalid 'stop': an empty string would end every answer at once.",
                hint="leave empty strings out of 'stop'",
            )
        self._states = _build_states(stop_strings)
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
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._next(character)
            stop = self._states[self._state].complete
            if stop is not None:
                self._held, self._matched = "", stop
                return StopResult(pending[: end if self._include_stop else end - len(stop)], stop)
        certain = len(pending) - self._states[self._state].depth
        self._held = pending[certain:]
        return StopResult(pending[:certain])

    def finish(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _next(self, character: str) -> int:
        state = self._state
        while state and character not in self._states[state].following:
            state = self._states[state].fallback
        return self._states[state].following.get(character, 0)


def _build_states(stop_strings: Sequence[str]) -> list[_State]:
    states = [_State(depth=0)]
    for stop in stop_strings:
        current = 0
        for character in stop:
            if character not in states[current].following:
                states[current].following[character] = len(states)
                states.append(_State(depth=states[current].depth + 1))
            current = states[current].following[character]
        states[current].complete = stop
    _link_fallbacks(states)
    return states


def _link_fallbacks(states: list[_State]) -> None:
    """Point each state at the longest shorter prefix that its text also ends with, shallow states first."""
    queue = deque(states[0].following.values())
    while queue:
        parent = states[queue.popleft()]
        for character, child in parent.following.items():
            fallback = parent.fallback
            while fallback and character not in states[fallback].following:
                fallback = states[fallback].fallback
            states[child].fallback = states[fallback].following.get(character, 0)
            # A whole stop string is longer than any that ends inside it.
            states[child].complete = states[child].complete or states[states[child].fallback].complete
            queue.append(child)
