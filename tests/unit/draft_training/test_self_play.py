"""Sessions that follow their scripts, on a model whose next token is known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shardcompute.core.batch import Segment, logit_row_indices  # noqa: E402
from shardcompute.draft_training.dialogue import ChosenTokens, GivenTokens, Script, SelfPlayDialogue  # noqa: E402
from shardcompute.draft_training.self_play import SelfPlay  # noqa: E402
from shardcompute.draft_training.training_rows import Span, TrainingRows  # noqa: E402

VOCABULARY = 40
HIDDEN = 4
END = frozenset({7})


class CountingModel:
    """After token t it says t + 1; the state behind a token is that token. Sessions are known by what was fed."""

    def __init__(self) -> None:
        self.fed: dict[int, list[int]] = {}
        self.widest = 0

    def step_tensor(self, segments: Sequence[Segment], ids: Any, *, keeps_hidden: bool = False) -> Any:
        row = 0
        self.widest = max(self.widest, len(ids))
        for segment in segments:
            known = self.fed.setdefault(segment.session, [])
            assert len(known) == segment.start, "all that is known is fed, in order and once"
            known += ids[row : row + segment.count].tolist()
            row += segment.count
        last = ids[logit_row_indices(segments)]
        self._states = last[:, None].float().expand(-1, HIDDEN)
        return torch.nn.functional.one_hot((last + 1) % VOCABULARY, VOCABULARY).float() * 50

    def hidden_tensor(self) -> Any:
        return self._states

    def close_session(self, session: int) -> None:
        self.fed.pop(session, None)


def play(
    model: Any, scripts: Iterator[Script], sessions: int = 3, max_rows: int = 100, context: int = 64
) -> SelfPlay:
    return SelfPlay(
        model,
        scripts,
        sessions=sessions,
        context_length=context,
        max_rows=max_rows,
        device=torch.device("cpu"),
        seed=1,
    )


def first_ended(talking: SelfPlay) -> SelfPlayDialogue:
    while not (ended := talking.step()):
        pass
    return ended[0]


def test_a_speech_ends_at_its_stop_which_is_kept_only_at_the_end() -> None:
    script = (
        GivenTokens((3, 4)),
        ChosenTokens(9, END),
        GivenTokens((20, 21)),
        ChosenTokens(9, frozenset({24})),
    )
    ended = first_ended(play(CountingModel(), repeat(script)))
    assert ended == SelfPlayDialogue((3, 4, 5, 6, 20, 21, 22, 23, 24), greedy_from=6)


def test_a_speech_ends_at_its_limit() -> None:
    script = (
        GivenTokens((3,)),
        ChosenTokens(2, END),
        GivenTokens((20,)),
        ChosenTokens(3, END, temperature=0.5),
    )
    assert first_ended(play(CountingModel(), repeat(script))) == SelfPlayDialogue(
        (3, 4, 5, 20, 21, 22, 23), 7
    )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_certainty_leaves_nothing_to_chance(top_p: float) -> None:
    script = (GivenTokens((3,)), ChosenTokens(9, END, temperature=1.0, top_p=top_p))
    assert first_ended(play(CountingModel(), repeat(script))).ids == (3, 4, 5, 6, 7)


def test_chance_has_a_choice_where_the_model_is_unsure() -> None:
    class Unsure(CountingModel):
        def step_tensor(self, *given: Any, **options: Any) -> Any:
            return super().step_tensor(*given, **options) * 0

    for top_p in (1.0, 0.9):
        script = (GivenTokens((3,)), ChosenTokens(30, frozenset(), temperature=1.0, top_p=top_p))
        assert len(set(first_ended(play(Unsure(), repeat(script))).ids)) > 8


def test_a_session_that_repeats_itself_is_ended() -> None:
    class Stuck(CountingModel):
        def step_tensor(self, segments: Sequence[Segment], ids: Any, *, keeps_hidden: bool = False) -> Any:
            return super().step_tensor(segments, ids) * 0 + torch.eye(VOCABULARY)[9]

    script = (GivenTokens((1, 2)), ChosenTokens(1000, END))
    assert len(first_ended(play(Stuck(), repeat(script), context=2000)).ids) < 200


def test_a_context_is_never_exceeded_and_no_step_is_too_large() -> None:
    model = CountingModel()
    talking = play(
        model, repeat((GivenTokens((1,) * 10), ChosenTokens(100, frozenset()))), max_rows=25, context=16
    )
    ended = [each for _ in range(12) for each in talking.step()]
    assert {len(each.ids) for each in ended} == {16}
    assert 10 <= model.widest <= 25
    rest = talking.close()
    assert rest
    assert not model.fed, "nothing is left in memory"


def test_lessons_hold_states_choices_and_what_is_left() -> None:
    dataset = TrainingRows(12, HIDDEN, torch.device("cpu"))
    read = [
        SelfPlayDialogue((3, 4, 5, 6), 2),
        SelfPlayDialogue((10, 11, 30), 3),
        SelfPlayDialogue((1,) * 4, 4),
    ]
    dataset.read(CountingModel(), read, max_rows=6)
    assert not dataset.is_full
    assert dataset.spans == [Span(0, 4, 2), Span(4, 7, 7), Span(7, 11, 11)]
    assert dataset.states[:7, 0].tolist() == [3, 4, 5, 6, 10, 11, 30]
    assert dataset.best[:7].tolist() == [4, 5, 6, 7, 11, 12, 31]
    assert dataset.left[:7].tolist() == [3, 2, 1, 0, 2, 1, 0]
    assert dataset.starts(dataset.spans[:2]).tolist() == [0, 1, 2, 4, 5]
    assert dataset.greedy_starts(dataset.spans, 1).tolist() == [1, 2]
    dataset.read(CountingModel(), read, max_rows=6)
    assert dataset.is_full
    assert dataset.rows == 11


def test_what_is_examined_is_not_learned() -> None:
    dataset = TrainingRows(1000, HIDDEN, torch.device("cpu"))
    dataset.read(CountingModel(), [SelfPlayDialogue((1, 2), 2)] * 40, max_rows=6)
    learned, held_out = dataset.split()
    assert len(held_out) == 8
    assert not set(learned) & set(held_out)
    assert len(learned) + len(held_out) == 40
