"""Copies and inventions mixed by the token: what a draft head holds likely, and what the session's text went on with.

A draft's next token is that of P(t) = chance · [t is the copied token] + (1 - chance) · P_head(t). The chance is that
of the match (how long it is, whether several places agree) and of how copies fared in this session lately where the
head would have said something else. Behind a copied token the head goes on, and behind an invented one copies do: a
draft may change between the two at every token, and a token that the head does not know can be copied all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardcompute.decoding.copying.ngram_index import NgramIndex, NgramMatch, token_at
from shardcompute.decoding.filters import COLDEST

Floats = npt.NDArray[np.float32]

_BASE, _BY_DOUBLING, _LONGEST = -2.1, 0.6, 16
_ALL_AGREE, _MOST_AGREE, _FEW_AGREE = 0.3, -0.6, -1.1
_BY_RECORD = 0.6
"""Log-odds of a copy: for a match of one token, for each doubling of its length, for what other places say, and by the
log-odds of those before it. Fitted to answers of the default model to prompts of self-play, greedy and sampled."""
_DECAY, _PRIOR_WINS, _PRIOR_LOSSES = 0.85, 0.8, 1.2
"""A contest counts for so much less with each later one; so many are taken to have gone before."""


@dataclass(frozen=True, slots=True)
class CopyGuess:
    """A token that the text went on with before, and the chance that it does so again."""

    token: int
    chance: float


@dataclass(frozen=True, slots=True)
class _Contest:
    """Where a copy and the head's best token differ. All of `path`, drafted from `start` on, comes before."""

    start: int
    path: tuple[int, ...]
    copied: int
    invented: int


class CopiedText:
    """What can be copied from one session's own tokens, and how copies fared lately."""

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._known: Sequence[int] = ()
        self._contests: list[_Contest] = []
        self._wins = self._losses = 0.0

    def __len__(self) -> int:
        """How many tokens are indexed."""
        return self._index.length

    def follow(self, known: Sequence[int]) -> None:
        """These are the session's tokens now, which begin with those that were known before."""
        for contest in self._contests:
            self._settle(contest, known)
        self._contests.clear()
        self._index.extend(known)
        self._known = known

    def guess(self, assumed: Sequence[int]) -> CopyGuess | None:
        """The token behind the known ones and these, copied from behind the longest earlier match."""
        matches = self._index.matches(self._known, assumed)
        if not matches:
            return None
        best = max(matches)
        following = [token_at(self._known, assumed, (), match.end) for match in matches]
        copied = following[matches.index(best)]
        odds = _match_odds(best, following.count(copied), len(matches)) + self._record_odds()
        return CopyGuess(copied, 1.0 / (1.0 + math.exp(-odds)))

    def contest(self, assumed: Sequence[int], copied: int, invented: int) -> None:
        """Behind these assumed tokens the two would go on differently: who is right is seen with the next `follow`."""
        if copied != invented:
            self._contests.append(_Contest(len(self._known), tuple(assumed), copied, invented))

    def _settle(self, contest: _Contest, known: Sequence[int]) -> None:
        position = contest.start + len(contest.path)
        if position >= len(known) or tuple(known[contest.start : position]) != contest.path:
            return
        token = known[position]
        if token in (contest.copied, contest.invented):
            is_won = token == contest.copied
            self._wins = _DECAY * self._wins + is_won
            self._losses = _DECAY * self._losses + (not is_won)

    def _record_odds(self) -> float:
        before = math.log(_PRIOR_WINS / _PRIOR_LOSSES)
        now = math.log((self._wins + _PRIOR_WINS) / (self._losses + _PRIOR_LOSSES))
        return _BY_RECORD * (now - before)


def _match_odds(match: NgramMatch, agreeing: int, places: int) -> float:
    odds = _BASE + _BY_DOUBLING * math.log2(min(match.length, _LONGEST))
    if places == 1:
        return odds
    if agreeing == places:
        return odds + _ALL_AGREE
    return odds + (_MOST_AGREE if 2 * agreeing >= places else _FEW_AGREE)


class MixedLogits:
    """A draft head's logits, of the tokens `ids`, with a copied token mixed in.

    Only the copied token's logit is another: the mixture is the softmax of what comes of it, at the temperature at
    which a token is drawn (0: taken as 1, the best wins). `places` says where each token is among `ids`, -1: nowhere.
    """

    def __init__(
        self,
        logits: Floats,
        ids: npt.NDArray[np.int32],
        places: npt.NDArray[np.int32],
        copied: CopyGuess | None,
        temperature: float,
    ) -> None:
        self._logits, self._ids, self._places, self._copied = logits, ids, places, copied
        self._temperature = max(temperature, COLDEST) if temperature else 1.0
        scaled = logits / np.float32(self._temperature)
        best = float(scaled.max())
        self._log_sum = best + math.log(float(np.exp(scaled - best).sum()))

    @property
    def invented(self) -> int:
        """The head's own best."""
        return int(self._ids[np.argmax(self._logits)])

    def best(self) -> int:
        copied = self._copied
        if copied is not None and self._mixed_logit(copied) > float(self._logits.max()):
            return copied.token
        return self.invented

    def spread(self, vocab_size: int) -> Floats:
        """Of all tokens; those that are not known have none."""
        spread = np.full(vocab_size, -np.inf, dtype=np.float32)
        spread[self._ids] = self._logits
        if self._copied is not None:
            spread[self._copied.token] = self._mixed_logit(self._copied)
        return spread

    def likelihood(self, token: int) -> float:
        """In the eyes of the mixture."""
        copied = self._copied
        if copied is None:
            return self._invented_likelihood(token)
        own = (1.0 - copied.chance) * self._invented_likelihood(token)
        return own + copied.chance if token == copied.token else own

    def _invented_likelihood(self, token: int) -> float:
        place = int(self._places[token])
        if place < 0:
            return 0.0
        return math.exp(float(self._logits[place]) / self._temperature - self._log_sum)

    def _mixed_logit(self, copied: CopyGuess) -> float:
        """The logit with which the copied token's share of the softmax is that of the mixture."""
        odds = math.log(copied.chance / (1.0 - copied.chance)) + self._log_sum
        place = int(self._places[copied.token])
        if place >= 0:
            odds = float(np.logaddexp(odds, float(self._logits[place]) / self._temperature))
        return self._temperature * odds
