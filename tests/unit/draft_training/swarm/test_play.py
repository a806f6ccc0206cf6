"""Self-play through a cluster follows its scripts, ends what goes round in circles, and survives a lost answer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("torch")

from shardcompute.core.errors import BackendError, LinkError
from shardcompute.draft_training.dialogue import DRAWN, GIVEN, GREEDY, ChosenTokens, GivenTokens, Script
from shardcompute.draft_training.swarm.play import PlayedDialogue, SwarmPlay
from shardcompute.draft_training.swarm.taught_model import States

STOP, HIDDEN = 9, 4
GREEDILY = ChosenTokens(200, frozenset({STOP}))


class Counting:
    """Says numbers in order, the stop after so many; its states are its tokens."""

    def __init__(self, stop_after: int = 1000, next_token: Callable[[int], int] = lambda n: 10 + n) -> None:
        self.stop_after = stop_after
        self.next_token = next_token
        self.asked: list[tuple[int, int]] = []
        self.failures: Iterator[bool] = itertools.repeat(False)
        self._lock = threading.Lock()

    def speak(self, prompt: Sequence[int], count: int, speech: ChosenTokens, seed: int) -> list[int]:
        with self._lock:
            self.asked.append((len(prompt), count))
            if next(self.failures):
                raise LinkError("a machine was lost")
        said = [
            self.next_token(n) if n < self.stop_after else STOP
            for n in range(len(prompt), len(prompt) + count)
        ]
        return said[: said.index(STOP) + 1] if STOP in said else said

    def states(self, tokens: Sequence[int]) -> States:
        return np.repeat(np.asarray(tokens, np.float16)[:, None], HIDDEN, axis=1)


def play(
    model: Counting, script: Script, *, context_length: int = 512, count: int = 1
) -> list[PlayedDialogue]:
    played: list[PlayedDialogue] = []

    def keep(each: PlayedDialogue) -> bool:
        played.append(each)
        return len(played) < count

    SwarmPlay(
        model, itertools.repeat(script), context_length=context_length, streams=1, seed=1, pause_s=0.0
    ).run(keep)
    return played


def test_a_stop_is_kept_only_where_nothing_follows() -> None:
    again = GivenTokens((3, 3))
    script = Script("followed", (GivenTokens((1, 2)), GREEDILY, again, GREEDILY))
    model = Counting(stop_after=4)
    (played,) = play(model, script)
    assert played.dialogue.ids.tolist() == [1, 2, 12, 13, 3, 3, STOP]
    assert played.dialogue.origins.tolist() == [GIVEN, GIVEN, GREEDY, GREEDY, GIVEN, GIVEN, GREEDY]
    assert played.states[:, 0].tolist() == played.dialogue.ids.tolist()
    assert played.dialogue.kind == "followed"


def test_an_answer_comes_in_pieces_and_ends_at_its_limit() -> None:
    drawn = ChosenTokens(150, frozenset({STOP}), temperature=0.8)
    model = Counting()
    (played,) = play(model, Script("question", (GivenTokens((1,)), drawn)))
    assert len(played.dialogue.ids) == 151
    assert model.asked == [(1, 64), (65, 64), (129, 22)]
    assert played.dialogue.origins.tolist() == [GIVEN] + [DRAWN] * 150


def test_a_dialogue_ends_where_the_context_does() -> None:
    long = Script("question", (GivenTokens(tuple(range(100))), GREEDILY, GivenTokens((1, 2)), GREEDILY))
    (played,) = play(Counting(), long, context_length=128)
    assert len(played.dialogue.ids) == 128
    (read,) = play(Counting(), long, context_length=64)
    assert set(read.dialogue.origins.tolist()) == {GIVEN}


def test_what_goes_round_in_circles_is_ended() -> None:
    model = Counting(next_token=lambda n: 10 + n % 5)
    (played,) = play(model, Script("question", (GivenTokens((1,)), GREEDILY)))
    assert len(played.dialogue.ids) == 129, "noticed before the third piece"


def test_a_lost_answer_is_left_out_and_only_many_end_the_play() -> None:
    script = Script("question", (GivenTokens((1,)), GREEDILY))
    model = Counting(stop_after=20)
    model.failures = iter([True] * 7 + [False] * 100)
    assert len(play(model, script, count=3)) == 3
    model.failures = itertools.repeat(True)
    with pytest.raises(LinkError, match="lost"):
        play(model, script)


def test_several_at_once_and_what_is_under_way_is_kept() -> None:
    gate = threading.Barrier(3, timeout=20.0)

    class Waiting(Counting):
        def states(self, tokens: Sequence[int]) -> States:
            gate.wait()
            return super().states(tokens)

    played: list[PlayedDialogue] = []

    def keep(each: PlayedDialogue) -> bool:
        played.append(each)
        return False

    script = Script("question", (GivenTokens((1,)), GREEDILY))
    SwarmPlay(
        Waiting(stop_after=8), itertools.repeat(script), context_length=64, streams=3, seed=1, pause_s=0.0
    ).run(keep)
    assert len(played) == 3


def test_other_mistakes_are_not_hidden() -> None:
    class Broken(Counting):
        def states(self, tokens: Sequence[int]) -> States:
            raise BackendError("no states")

    with pytest.raises(BackendError, match="no states"):
        play(Broken(), Script("text", (GivenTokens((1, 2)),)))
