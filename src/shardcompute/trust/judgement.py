"""Judgement of an audit: what was signed, what was shown and what others compute, to whom that is held against.

First everybody has to show what they signed for. Then one machine computes the audited layers again from what the stage
before signed to have sent; where it finds something else, a second one decides between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardcompute.trust.reputation import Finding

Comparison = Literal["equal", "near", "far", "unknown"]
"""Of two results: bit by bit, within what honest machines of other kernels differ by, beyond that; or nobody knows how
far honest ones may be apart."""
Outcome = Literal["passed", "failed", "withheld", "disputed", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Blame:
    """A finding about one machine, and why in a sentence."""

    node: str
    finding: Finding
    reason: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """`outcome` is that of the audited stage's rows; `blames` has everybody whose reputation changes for it."""

    outcome: Outcome
    blames: tuple[Blame, ...] = ()


def withheld(node: str, reason: str) -> Judgement:
    """A machine could not show rows that it had signed for a moment ago."""
    return Judgement("withheld", (Blame(node, "withheld", reason),))


def contradiction(sender: str, receiver: str, reason: str) -> Judgement:
    """What one signed as sent is not what the other signed as got: one of the two lies, and no computing says which."""
    blames = tuple(Blame(node, "disputed", reason) for node in (sender, receiver))
    return Judgement("disputed", blames)


def is_fair(comparison: Comparison) -> bool:
    return comparison in ("equal", "near")


def judge(
    audited: str,
    auditor: str,
    comparison: Comparison,
    *,
    arbiter: str = "",
    against_audited: Comparison = "unknown",
    against_auditor: Comparison = "unknown",
) -> Judgement:
    """`comparison`: of what was signed with what the auditor computes. Where these differ and there is an `arbiter`,
    what it computes is compared with both. Without one nobody can say which of the two is wrong."""
    if is_fair(comparison):
        return Judgement("passed", (Blame(audited, "passed", ""),))
    if comparison == "unknown":
        return Judgement("inconclusive")
    reason = f"what it sent is not what {auditor} computes from the same rows"
    if arbiter and is_fair(against_auditor) and not is_fair(against_audited):
        return Judgement("failed", (Blame(audited, "failed", f"{reason}, and {arbiter} agrees"),))
    if arbiter and is_fair(against_audited) and not is_fair(against_auditor):
        wrong = f"it disputed rows of {audited} that {arbiter} computes as well"
        return Judgement("passed", (Blame(audited, "passed", ""), Blame(auditor, "failed", wrong)))
    pair = (
        Blame(audited, "disputed", reason),
        Blame(auditor, "disputed", f"it and {audited} disagree on rows"),
    )
    return Judgement("disputed", pair)
