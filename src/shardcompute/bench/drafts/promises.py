"""What guesses of several shapes promise: tokens per second of one stream, by what each row and each trip costs. Pure.

A shape says which guesses may travel: the draft alone, also the second-best guess at its first position, at all of its
positions, or a tree with further guesses behind those. For each trip guesses are taken in the order of their chances as
long as that promises more tokens per second. Chances are those that were seen in other answers, for guesses as likely
in the network's eyes. An answer is then travelled through: what held is known afterwards.

A side guess that holds costs its row once more on the next trip: stages keep the draft's rows, not its.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardcompute.bench.drafts.guesses import Guess, GuessedAnswer

DRAFT, FIRST, SECONDS, TREE = "draft", "first", "seconds", "tree"
SHAPES = (DRAFT, FIRST, SECONDS, TREE)
_BINS = 10
_SIDE_MOST = 0.5
"""No guess but the best is likelier than this."""
_PRIOR_WEIGHT = 8.0
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class TripCosts:
    """Seconds of a trip round the ring without rows, and what a row, a drafted token's step of the network, and a
    further segment of the same session add."""

    fixed_s: float
    row_s: float
    draft_s: float = 0.0
    segment_s: float = 0.0


@dataclass(slots=True)
class Chances:
    """How often guesses of a rank and likelihood were right, where all before them were."""

    _tried: dict[tuple[int, int], float] = field(default_factory=dict)
    _held: dict[tuple[int, int], float] = field(default_factory=dict)

    def observe(self, answer: GuessedAnswer) -> None:
        for at, guesses in enumerate(answer.guesses):
            following = answer.tokens[at + 1 :]
            for guess in guesses:
                depth = len(guess.path) - 1
                if any(guess.ranks[:-1]) or guess.path[:-1] != following[:depth] or depth >= len(following):
                    continue
                place = _bin(guess)
                self._tried[place] = self._tried.get(place, 0.0) + 1.0
                self._held[place] = self._held.get(place, 0.0) + (guess.path[-1] == following[depth])

    def of_last(self, guess: Guess) -> float:
        """The chance of a guess, given those that it assumes."""
        place = _bin(guess)
        held = self._held.get(place, 0.0) + _PRIOR_WEIGHT * guess.likelihoods[-1]
        return held / (self._tried.get(place, 0.0) + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class TravelledAnswer:
    """An answer that was travelled through: its tokens behind the first, how long that took, trips and drafted rows."""

    tokens: int
    seconds: float
    trips: int
    rows: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Promise:
    """Of one shape: mean tokens per second over answers, gain against the draft alone with half its 95 % interval, and
    tokens and rows of a trip."""

    rate: float
    gain: float
    gain_half_interval: float
    tokens_per_trip: float
    rows_per_trip: float


def promise_shapes(answers: Sequence[GuessedAnswer], costs: TripCosts) -> dict[str, Promise]:
    """Each answer by the chances that those of the other half were seen to have."""
    answers = [answer for answer in answers if answer.guesses]
    halves = (answers[::2], answers[1::2])
    journeys: dict[str, list[TravelledAnswer]] = {shape: [] for shape in SHAPES}
    for half, others in (halves, halves[::-1]):
        chances = Chances()
        for answer in others:
            chances.observe(answer)
        for shape in SHAPES:
            journeys[shape] += [travel(answer, shape, chances, costs) for answer in half]
    return {shape: _sum_up(journeys[shape], journeys[DRAFT]) for shape in SHAPES}


def travel(answer: GuessedAnswer, shape: str, chances: Chances, costs: TripCosts) -> TravelledAnswer:
    at = trips = rows = owed = 0
    seconds = 0.0
    while at < len(answer.guesses):
        chosen, trip_s = choose_guesses(answer.guesses[at], shape, chances, costs)
        by_path = {guess.path: guess for guess in chosen}
        following = answer.tokens[at + 1 :]
        held = 0
        while held < len(following) and following[: held + 1] in by_path:
            held += 1
        seconds += trip_s + owed * costs.row_s
        trips, rows = trips + 1, rows + len(chosen)
        last = by_path.get(following[:held])
        owed = 0 if last is None or last.is_drafted else held - _drafted_before(last)
        at += held + 1
    return TravelledAnswer(min(at, len(answer.tokens) - 1), seconds, trips, rows)


def choose_guesses(
    guesses: Sequence[Guess], shape: str, chances: Chances, costs: TripCosts
) -> tuple[list[Guess], float]:
    """Those that are worth sending, and the seconds of the trip with them."""
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    for guess in sorted(guesses, key=lambda guess: len(guess.path)):
        worth[guess.path] = worth[guess.path[:-1]] * chances.of_last(guess)
    wanted = [guess for guess in guesses if _fits(guess, shape)]
    wanted.sort(key=lambda guess: (-worth[guess.path], len(guess.path)))
    tokens, seconds = 1.0, costs.fixed_s + costs.row_s
    sent: dict[tuple[int, ...], Guess] = {}
    asked: set[tuple[int, ...]] = set()
    for guess in wanted:
        root = guess.path[:-1]
        if root and root not in sent:
            continue
        more_s = costs.row_s + (0.0 if root in asked else costs.draft_s)
        more_s += costs.segment_s if guess.ranks[-1] else 0.0
        if (tokens + worth[guess.path]) * seconds > tokens * (seconds + more_s):
            tokens, seconds = tokens + worth[guess.path], seconds + more_s
            sent[guess.path] = guess
            asked.add(root)
    return list(sent.values()), seconds


def right_shares(answers: Sequence[GuessedAnswer], depth: int) -> Mapping[int, float]:
    """By rank, how often guesses at a position of the draft were right where all before it was; how many there were
    under -1."""
    right: dict[int, float] = {}
    counted = 0
    for answer in answers:
        for at, guesses in enumerate(answer.guesses):
            following = answer.tokens[at + 1 :]
            if len(following) <= depth:
                continue
            here = [
                guess
                for guess in guesses
                if len(guess.path) == depth + 1
                and not any(guess.ranks[:-1])
                and guess.path[:-1] == following[:depth]
            ]
            counted += bool(here)
            for guess in here:
                right[guess.ranks[-1]] = right.get(guess.ranks[-1], 0.0) + (
                    guess.path[-1] == following[depth]
                )
    return {-1: counted, **{rank: count / counted for rank, count in sorted(right.items())}}


def copied_shares(answers: Sequence[GuessedAnswer]) -> tuple[float, float]:
    """How often the text itself offers another token than the draft's first, and how often that is right then."""
    offered = right = counted = 0
    for answer in answers:
        for guesses, copied, token in zip(answer.guesses, answer.copied, answer.tokens[1:], strict=True):
            counted += 1
            first = next(guess.path[0] for guess in guesses if guess.is_drafted)
            if copied is not None and copied != first:
                offered += 1
                right += copied == token
    return offered / max(counted, 1), right / max(offered, 1)


def drafts_of(answer: GuessedAnswer) -> tuple[tuple[int, ...], ...]:
    """What the head alone drafts behind each token of an answer but the last."""
    return tuple(
        max((guess.path for guess in guesses if guess.is_drafted), key=len) for guesses in answer.guesses
    )


def held_shares(
    drafts: Sequence[tuple[tuple[int, ...], Sequence[tuple[int, ...]]]], depth: int
) -> tuple[int, float]:
    """Of answers (their tokens, and a draft behind each but the last): how many drafts held as far as this position and
    the answer went on, and how often that position was right then."""
    counted = right = 0
    for tokens, behind in drafts:
        for at, draft in enumerate(behind):
            following = tokens[at + 1 : at + 2 + depth]
            if len(following) == depth + 1 and draft[:depth] == following[:depth]:
                counted += 1
                right += draft[depth] == following[depth]
    return counted, right / max(counted, 1)


def tokens_per_trip(
    drafts: Sequence[tuple[tuple[int, ...], Sequence[tuple[int, ...]]]], drafted: int
) -> float:
    """With so many drafted tokens on every trip, whatever their chances."""
    trips = tokens = 0
    for answer, behind in drafts:
        at = 0
        while at < len(behind):
            following, held = answer[at + 1 :], 0
            while held < min(drafted, len(following)) and behind[at][held] == following[held]:
                held += 1
            at, trips = at + held + 1, trips + 1
        tokens += len(behind)
    return tokens / max(trips, 1)


def _fits(guess: Guess, shape: str) -> bool:
    if guess.is_drafted or shape == TREE:
        return True
    if any(guess.ranks[:-1]) or guess.ranks[-1] != 1:
        return False
    return shape == SECONDS or (shape == FIRST and len(guess.path) == 1)


def _drafted_before(guess: Guess) -> int:
    """So many of its path are the draft's."""
    return next(index for index, rank in enumerate(guess.ranks) if rank)


def _bin(guess: Guess) -> tuple[int, int]:
    most = _SIDE_MOST if guess.ranks[-1] else 1.0
    return guess.ranks[-1], min(int(_BINS * guess.likelihoods[-1] / most), _BINS - 1)


def _sum_up(journeys: Sequence[TravelledAnswer], baseline: Sequence[TravelledAnswer]) -> Promise:
    gains = [own.rate / other.rate - 1 for own, other in zip(journeys, baseline, strict=True)]
    trips = sum(journey.trips for journey in journeys)
    half = _NORMAL_95 * statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    return Promise(
        float(np.mean([journey.rate for journey in journeys])),
        statistics.fmean(gains),
        half,
        sum(journey.tokens for journey in journeys) / trips,
        sum(journey.rows for journey in journeys) / trips,
    )
