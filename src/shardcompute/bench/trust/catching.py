"""How soon a cheat is caught: audits are drawn as a cluster draws them, until one finds something. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardcompute.trust.draws import SECRET_BYTES, is_drawn
from shardcompute.trust.reputation import NEW, Finding, after_audit, audit_rate, is_expelled

WITHIN_TOKENS = 1000
_MOST_ANSWERS = 20_000
_MOST_AUDITS = 200


@dataclass(frozen=True, slots=True)
class Catching:
    """Over many trials: audits until caught, tokens until then, and the share that was caught within 1,000 tokens.
    `never`: trials in which it was not caught at all."""

    audits: float
    tokens: float
    within: float
    never: float


Find = Callable[[random.Random], Finding]
"""What an audit of the next answer finds."""


def find_among(caught: Sequence[bool]) -> Find:
    """Answers are like those that were measured."""
    return lambda rng: "failed" if rng.choice(caught) else "passed"


def always(finding: Finding) -> Find:
    return lambda rng: finding


def simulate(find: Find, rate: float, tokens: int, *, trials: int, reputation: float = NEW) -> Catching:
    """A machine that cheats in every answer of so many tokens, each audited at the rate that its reputation asks
    for."""
    rng = random.Random(17)
    audits, used, within, never = [], [], 0, 0
    for _ in range(trials):
        made, answers = _until_caught(find, rate, reputation, rng)
        if answers is None:
            never += 1
            continue
        audits.append(made)
        used.append(answers * tokens)
        within += answers * tokens <= WITHIN_TOKENS
    count = max(len(audits), 1)
    return Catching(sum(audits) / count, sum(used) / count, within / trials, never / trials)


def _until_caught(find: Find, rate: float, reputation: float, rng: random.Random) -> tuple[int, int | None]:
    secret, audits = rng.randbytes(SECRET_BYTES), 0
    for answer in range(1, _MOST_ANSWERS + 1):
        if not is_drawn(secret, answer.to_bytes(4, "little"), audit_rate(rate, reputation)):
            continue
        audits += 1
        reputation = after_audit(reputation, find(rng))
        if is_expelled(reputation):
            return audits, answer
        if audits >= _MOST_AUDITS:
            break
    return audits, None
