"""Self-play through a cluster: several dialogues at once, each along a script, as sessions like any other's.

An answer is asked for piece by piece, so that one that goes round in circles is noticed; the cluster still knows what
came before. When a dialogue has ended its states are asked for, all at once: as a prompt, which a swarm computes in a
few steps, while its tokens took one each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardcompute.core.errors import ShardComputeError
from shardcompute.draft_training.dialogue import (
    DRAWN,
    GIVEN,
    GREEDY,
    ChosenTokens,
    GivenTokens,
    Script,
    SelfPlayDialogue,
)
from shardcompute.draft_training.self_play import find_loops
from shardcompute.draft_training.swarm.taught_model import States

log = logging.getLogger(__name__)
_PIECE_TOKENS = 64
_MOST_FAILURES = 8
"""One behind the other, before it is given up. A swarm that lost a machine is itself again after some seconds."""
_FEWEST_TOKENS = 2
_PAUSE_S = 2.0


class SpeakingModel(Protocol):
    """See `taught_model.TaughtModel`. Called from several threads."""

    def speak(self, prompt: Sequence[int], count: int, speech: ChosenTokens, seed: int) -> list[int]: ...

    def states(self, tokens: Sequence[int]) -> States: ...


@dataclass(frozen=True, slots=True)
class PlayedDialogue:
    """What was said in one session, and the final state of each of its tokens."""

    dialogue: SelfPlayDialogue
    states: States


Keep = Callable[[PlayedDialogue], bool]
"""Takes what was played; False: that is enough."""


class SwarmPlay:
    """Plays scripts, `streams` at a time, each up to `context_length` tokens. Scripts must not end."""

    def __init__(
        self,
        model: SpeakingModel,
        scripts: Iterator[Script],
        *,
        context_length: int,
        streams: int,
        seed: int,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._model = model
        self._scripts = scripts
        self._context_length = context_length
        self._streams = streams
        self._seed = seed
        self._pause_s = pause_s
        self._number = 0
        self._is_over = threading.Event()

    def run(self, keep: Keep) -> None:
        """Until `keep`, which is called here, has enough. Raises what dialogues fail with again and again."""
        failures = 0
        with ThreadPoolExecutor(self._streams, thread_name_prefix="dialogue") as pool:
            running = {self._begin(pool) for _ in range(self._streams)}
            try:
                while running and not self._is_over.is_set():
                    ended, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in ended:
                        failures = self._take(each, keep, failures)
                        if not self._is_over.is_set():
                            running.add(self._begin(pool))
                # What is under way is cut short, and kept.
                for each in running:
                    self._take(each, keep, failures)
            finally:
                self._is_over.set()

    def _begin(self, pool: ThreadPoolExecutor) -> Future[PlayedDialogue | None]:
        self._number += 1
        return pool.submit(self._play, next(self._scripts), self._seed + self._number)

    def _take(self, ended: Future[PlayedDialogue | None], keep: Keep, failures: int) -> int:
        """How many have failed one behind the other."""
        try:
            played = ended.result()
        except ShardComputeError as error:
            if failures + 1 >= _MOST_FAILURES:
                raise
            log.warning("a dialogue is left out: %s", error)
            self._is_over.wait(self._pause_s)
            return failures + 1
        if played is not None and not keep(played):
            self._is_over.set()
        return 0

    def _play(self, script: Script, seed: int) -> PlayedDialogue | None:
        """None where nothing came of it."""
        ids: list[int] = []
        origins: list[int] = []
        for index, turn in enumerate(script.turns):
            room = self._context_length - len(ids)
            if room < 1 or self._is_over.is_set():
                break
            if isinstance(turn, GivenTokens):
                given = turn.ids[:room]
                ids += given
                origins += [GIVEN] * len(given)
                continue
            is_final = index + 1 == len(script.turns)
            said, goes_on = self._speak(ids, turn, min(turn.limit, room), seed, is_final=is_final)
            ids += said
            origins += [GREEDY if turn.temperature == 0 else DRAWN] * len(said)
            if not goes_on:
                break
        if len(ids) < _FEWEST_TOKENS:
            return None
        dialogue = SelfPlayDialogue(script.kind, np.asarray(ids, np.int32), np.asarray(origins, np.uint8))
        return PlayedDialogue(dialogue, self._model.states(ids))

    def _speak(
        self, before: Sequence[int], speech: ChosenTokens, most: int, seed: int, *, is_final: bool
    ) -> tuple[list[int], bool]:
        """What is said up to a stop, which is kept only where nothing follows, and whether the dialogue goes on."""
        said: list[int] = []
        while len(said) < most:
            if self._is_over.is_set() or _is_looping([*before, *said]):
                return said, False
            count = min(_PIECE_TOKENS, most - len(said))
            piece = self._model.speak([*before, *said], count, speech, seed)
            said += piece
            if said and said[-1] in speech.stops:
                return (said if is_final else said[:-1]), True
            if len(piece) < count:
                return said, False
        return said, True


def _is_looping(ids: Sequence[int]) -> bool:
    """Whether a text has begun to repeat itself: that goes on for ever, and teaches nothing."""
    known = np.asarray([ids], np.int32)
    return bool(find_loops(known, np.zeros(1, np.int64), np.asarray([len(ids)]))[0])
