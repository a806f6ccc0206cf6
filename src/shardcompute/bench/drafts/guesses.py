"""Guesses of a draft head behind every token of an answer: what it drafts, and what it thought second and third best.

The answer is the model's own, whatever is guessed: so what any choice of guesses would have brought can be told
afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array, Float32, StoredRows
from shardcompute.core.batch import Segment
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening
from shardcompute.decoding import TokenHistory, build_sampler
from shardcompute.decoding.copying.mixture import CopiedText, MixedLogits
from shardcompute.decoding.drafting import likelihood_of
from shardcompute.decoding.ngram import NgramDrafter

DRAFTED, RANKS, BEHIND = 6, 3, 3
"""Tokens of a draft, guesses at each of its positions, and tokens that are drafted behind a second-best one."""
_BRANCHING = 2
"""So many of the first positions have further guesses behind their second-best."""
_SESSION = 1
_STEP_ROWS = 128
_NO_HISTORY = TokenHistory()


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may follow, last in `path` behind those that it assumes; the rank of each among the guesses at its
    position, 0 the best, and how likely each is in the network's own eyes."""

    path: tuple[int, ...]
    ranks: tuple[int, ...]
    likelihoods: tuple[float, ...]

    @property
    def is_drafted(self) -> bool:
        """Whether it belongs to the draft, the best guess at each position."""
        return not any(self.ranks)


@dataclass(frozen=True, slots=True)
class GuessedAnswer:
    """The tokens of an answer and, behind each of them but the last, what was guessed; and what the text before would
    go on with, copied from where it went on once already (None: nowhere). `mixed` are the drafts of a last stage, which
    mixes the two, however unlikely they become."""

    category: str
    text: str
    tokens: tuple[int, ...]
    guesses: tuple[tuple[Guess, ...], ...]
    copied: tuple[int | None, ...] = ()
    mixed: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """A draft head at work (`runtime.shard.build_draft_network`); `places` says where each token is among those that
    it knows, -1: nowhere."""

    executor: Executor
    embedding: StoredRows
    ids: Array
    places: Array
    embedding_scale: float

    def step(self, start: int, tokens: Sequence[int], states: Sequence[Float32]) -> tuple[Float32, Float32]:
        """Logits and next state behind the last of these rows, each a state and the token that follows it."""
        width = len(states[0])
        inputs: Float32 = np.zeros((len(tokens), 2 * width), dtype=np.float32)
        places = self.places[list(tokens)]
        known = places >= 0
        if known.any():
            rows = self.embedding.read(places[known]).to_dense()
            inputs[known, :width] = rows * np.float32(self.embedding_scale)
        inputs[:, width:] = states
        segment = Segment(_SESSION, start, len(tokens), 1)
        logits = np.array(self.executor.step([segment], inputs, keeps_hidden=True)[0], dtype=np.float32)
        return logits, np.array(self.executor.final_rows()[len(tokens) - 1], dtype=np.float32)


def copy_guesses(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int | None, ...]:
    """The n-gram drafter's first token behind each of an answer's tokens but the last."""
    drafter, opening = NgramDrafter(), Opening(_SESSION, Sampling(), len(prompt))
    known, found = list(prompt), list[int | None]()
    for token in tokens[:-1]:
        known.append(token)
        draft = drafter.propose(_SESSION, known, (), 1, opening)
        found.append(None if draft is None else draft.ids[0])
    return tuple(found)


class AnswerGuesser:
    """Has a model answer, and its draft head guess behind every token."""

    def __init__(self, model: Executor, network: DraftNetwork, sampling: Sampling, vocab_size: int) -> None:
        self._model = model
        self._network = network
        self._sample = build_sampler(sampling)
        self._temperature = sampling.temperature
        self._vocab_size = vocab_size

    def guess(
        self, prompt: Sequence[int], most: int, ends: Collection[int]
    ) -> tuple[tuple[int, ...], tuple[tuple[Guess, ...], ...], tuple[tuple[int, ...], ...]]:
        """The tokens of an answer of at most so many, and what was guessed and drafted behind each but the last."""
        tokens, states = self._answer(prompt, most, ends)
        known = [*prompt, *tokens]
        for start in range(0, len(prompt) - 1, _STEP_ROWS):
            stop = min(start + _STEP_ROWS, len(prompt) - 1)
            self._network.step(start, known[start + 1 : stop + 1], states[start:stop])
        text, guesses, mixed = CopiedText(), list[tuple[Guess, ...]](), list[tuple[int, ...]]()
        for row in range(len(prompt) - 1, len(known) - 2):
            guesses.append(tuple(self._guess_behind(row, known[row + 1], states[row])))
            text.follow(known[: row + 1])
            mixed.append(self._draft_mixed(row, known[row + 1], states[row], text))
        self._network.executor.close_session(_SESSION)
        return tokens, tuple(guesses), tuple(mixed)

    def _draft_mixed(self, row: int, token: int, state: Float32, text: CopiedText) -> tuple[int, ...]:
        """As a last stage drafts behind a true row and the token that follows it."""
        assumed = [token]
        for depth in range(DRAFTED):
            logits, state = self._network.step(row + depth, assumed[-1:], [state])
            copied = text.guess(assumed)
            mixed = MixedLogits(logits, self._network.ids, self._network.places, copied, self._temperature)
            if copied is not None:
                text.contest(assumed, copied.token, mixed.invented)
            assumed.append(self._sample(mixed.spread(self._vocab_size), _NO_HISTORY, row + 2 + depth).id)
        return tuple(assumed[1:])

    def _answer(
        self, prompt: Sequence[int], most: int, ends: Collection[int]
    ) -> tuple[tuple[int, ...], list[Float32]]:
        """With the final states of all rows that were computed."""
        known, states, start = list(prompt), list[Float32](), 0
        while True:
            ids = np.array(known[start : start + _STEP_ROWS], dtype=np.int64)
            logits = self._model.step([Segment(_SESSION, start, len(ids), 1)], ids, keeps_hidden=True)
            states += [np.array(state, dtype=np.float32) for state in self._model.final_rows()[: len(ids)]]
            start += len(ids)
            if start == len(known):
                known.append(self._sample(logits[0], _NO_HISTORY, start).id)
                if known[-1] in ends or len(known) == len(prompt) + most:
                    break
        self._model.close_session(_SESSION)
        return tuple(known[len(prompt) :]), states

    def _guess_behind(self, row: int, token: int, state: Float32) -> Iterator[Guess]:
        """Behind a true row and the token that follows it."""
        root = Guess((), (), ())
        logits, next_state = self._network.step(row, [token], [state])
        for depth in range(DRAFTED):
            found = self._ranked(root, logits, row + 2 + depth)
            yield from found
            if depth < _BRANCHING:
                yield from self._guess_on(row, found[1], next_state)
            if depth + 1 < DRAFTED:
                root = found[0]
                logits, next_state = self._network.step(row + 1 + depth, root.path[-1:], [next_state])

    def _guess_on(self, row: int, guess: Guess, state: Float32) -> Iterator[Guess]:
        """Best guesses behind one that is not the best: `state` is that of the row before it. What is written for them
        is written over by what the draft goes on with."""
        for _ in range(BEHIND):
            depth = len(guess.path)
            logits, state = self._network.step(row + depth, guess.path[-1:], [state])
            guess = self._ranked(guess, logits, row + 2 + depth)[0]
            yield guess

    def _ranked(self, root: Guess, logits: Float32, position: int) -> list[Guess]:
        """The best guesses behind `root` at this position: each is what would be picked, were there not those
        before."""
        spread = np.full(self._vocab_size, -np.inf, dtype=np.float32)
        spread[self._network.ids] = logits
        found = []
        for rank in range(RANKS):
            token = self._sample(spread, _NO_HISTORY, position).id
            spread[token] = -np.inf
            likelihood = likelihood_of(int(self._network.places[token]), logits)
            found.append(Guess((*root.path, token), (*root.ranks, rank), (*root.likelihoods, likelihood)))
        return found
