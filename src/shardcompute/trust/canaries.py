"""Canaries: what is asked again and again, whether an answer is the known one, and how far machines have drifted.

A canary is an ordinary request with a seed. Sampling is a pure function of the seed and the next-token distribution, so
that two chains of one class give equal tokens; where distributions differ by a total variation of t, each token differs
with at least that probability, and an answer of n tokens shows it with at least 1 - (1 - t)^n.
Pure: nothing here asks anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct

HALF_LIFE_S = 7 * 86_400.0
_RECENT = 8
_LOOKED_AT = 4
_DIFFERENT = 2
"""Of the newest four, so many have to differ for an alert: one alone is asked again first."""

_OPENINGS = (
    "Please explain {a} to me in a few sentences, as if I had only ever heard of {b}.",
    "Write a short note to a colleague about {a} and why it matters for {b}.",
    "What are the main differences between {a} and {b}? Keep it brief.",
    "I am preparing a talk on {a}. Which three points about {b} should I not leave out?",
    "Tell a short story in which {a} and {b} both play a part.",
    "Summarise what a beginner should know about {a} before reading about {b}.",
    "Give me five questions that an examiner might ask about {a}, and one about {b}.",
    "My neighbour says that {a} is more useful than {b}. How would you answer?",
    "List some common mistakes people make with {a} when they come from {b}.",
    "How would you describe {a} to a child who loves {b}?",
)
_SUBJECTS = (
    "tide tables", "sourdough bread", "binary search", "the Roman calendar", "rain gardens", "bicycle gears",
    "public libraries", "solar panels", "chess openings", "railway signals", "honey bees", "map projections",
    "compound interest", "watercolour painting", "volcanoes", "regular expressions", "jazz harmony", "tax returns",
    "photosynthesis", "origami", "vaccines", "sailing knots", "medieval guilds", "database indexes",
    "marathon training", "translation memory", "fermented tea", "lighthouses", "credit scores", "crossword puzzles",
    "glaciers", "version control", "street markets", "heat pumps", "the printing press", "houseplants", "wind turbines",
    "double-entry bookkeeping", "typefaces", "earthquakes", "model trains", "migratory birds",
)  # fmt: skip


class CanaryPrompt(Struct, frozen=True):
    """What is asked, of one bank: the same for the same secret and number, and for nobody else to foresee."""

    text: str
    temperature: float
    seed: int
    tokens: int


def compose(secret: bytes, number: int) -> CanaryPrompt:
    """One of some seventeen thousand texts, with a seed and a length as clients have them."""
    digest = hashlib.sha256(secret + number.to_bytes(4, "big")).digest()
    numbers = [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 24, 4)]
    first = numbers[1] % len(_SUBJECTS)
    second = (first + 1 + numbers[2] % (len(_SUBJECTS) - 1)) % len(_SUBJECTS)
    text = _OPENINGS[numbers[0] % len(_OPENINGS)].format(a=_SUBJECTS[first], b=_SUBJECTS[second])
    return CanaryPrompt(text, (0.7, 0.8, 1.0)[numbers[3] % 3], numbers[4] % 2**31, 24 + numbers[5] % 41)


def agreement(known: Sequence[int], found: Sequence[int]) -> float:
    """The share of the answer before the first token that differs: what comes after that follows from other text."""
    longest = max(len(known), len(found))
    if not longest:
        return 1.0
    pairs = zip(known, found, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(known), len(found)))
    return same / longest


class DriftEstimate(Struct, frozen=True):
    """Of a chain or a machine, over weeks: which share of its canaries' tokens came too late to agree."""

    level: float = 0.0
    """From 0, all agree, to 1; older ones count less with the time that has passed."""
    weight: float = 0.0
    canaries: int = 0
    differed: int = 0
    recent: tuple[bool, ...] = ()
    """Of the newest, oldest first, which differed."""
    at_s: float = 0.0

    @property
    def is_drifting(self) -> bool:
        return sum(self.recent[-_LOOKED_AT:]) >= _DIFFERENT

    @property
    def is_in_doubt(self) -> bool:
        """The newest differed: the next one is wanted soon."""
        return bool(self.recent) and self.recent[-1] and not self.is_drifting


def observe_canary(known: DriftEstimate, agreed: float, now_s: float) -> DriftEstimate:
    """The estimate after one canary more, of whose answer this share agreed."""
    kept = known.weight * 0.5 ** (max(0.0, now_s - known.at_s) / HALF_LIFE_S)
    off = 1.0 - min(max(agreed, 0.0), 1.0)
    return DriftEstimate(
        level=(known.level * kept + off) / (kept + 1.0),
        weight=kept + 1.0,
        canaries=known.canaries + 1,
        differed=known.differed + (off > 0.0),
        recent=(*known.recent, off > 0.0)[-_RECENT:],
        at_s=now_s,
    )
