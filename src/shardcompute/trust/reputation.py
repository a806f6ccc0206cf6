"""Reputation of machines: it falls fast and grows slowly, and those who have little are audited more."""

from __future__ import annotations

from typing import Literal

Finding = Literal["passed", "failed", "withheld", "disputed"]
"""Of one audit, about one machine. `failed`: what it sent is not what its layers make of what it got. `withheld`: it
could not show what it signed for. `disputed`: it contradicts another, and nobody could say who is right."""

NEW = 0.3
"""Of a machine of which nothing is known."""
EXPELLED_BELOW = 0.1
"""Whoever has less computes nothing for others."""
_GROWTH = 0.05
_HALVED = 0.5
_MOST_TIMES_MORE = 10.0


def after_audit(reputation: float, finding: Finding) -> float:
    if finding == "passed":
        return reputation + _GROWTH * (1.0 - reputation)
    if finding == "failed":
        return 0.0
    return reputation * _HALVED


def is_expelled(reputation: float) -> bool:
    return reputation < EXPELLED_BELOW


def audit_rate(base: float, reputation: float) -> float:
    """The share of a machine's answers that is audited: `base` of those that have passed for long, up to ten times that
    of the others."""
    doubt = (1.0 - min(max(reputation, 0.0), 1.0)) ** 2
    return min(1.0, base * (1.0 + (_MOST_TIMES_MORE - 1.0) * doubt))
