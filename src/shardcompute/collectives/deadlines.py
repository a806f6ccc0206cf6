"""How long a rank waits for others: what lines and peers have taken, with room to spare, and never without end.

Most of a wait is not the line: ranks come to a call at different times, because one computes longer. That time is
learnt by size of array, because more rows mean more to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_ROOM = 8
_FADING = 0.95


@dataclass(slots=True)
class CallDeadlines:
    """8 times what the line takes by measurement, and 8 times the longest that calls of this size took lately: 2
    seconds at least, 10 for a size never tried (first steps compile and read from disk), 30 at most."""

    least_s: float = 2.0
    untried_s: float = 10.0
    most_s: float = 30.0
    _longest_s: dict[int, float] = field(default_factory=dict)

    def timeout_s(self, size_bytes: int, line_s: float) -> float:
        """For a call with so many bytes, which the lines alone carry in `line_s`."""
        longest_s = self._longest_s.get(size_bytes.bit_length())
        apart_s = self.untried_s if longest_s is None else max(self.least_s, _ROOM * longest_s)
        return _ROOM * line_s + min(apart_s, self.most_s)

    def took(self, size_bytes: int, seconds: float) -> None:
        key = size_bytes.bit_length()
        self._longest_s[key] = max(seconds, _FADING * self._longest_s.get(key, 0.0))
