"""Sessions that follow their scripts, on a model whose next token is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shardcompute.core.batch import Segment, logit_row_indices  # noqa: E402
from shardcompute.draft_training.dialogue import (  # noqa: E402
    DRAWN,
    GIVEN,
    GREEDY,
    ChosenTokens,
    GivenTokens,
    Script,
    SelfPlayDialogue,
)
from shardcompute.draft_training.evaluation import DRAFTED, greedy_rows  # noqa: E402
from shardcompute.draft_training.self_play import SelfPlay  # noqa: E402
from shardcompute.draft_training.training_rows import Span, TrainingRows  # noqa: E402

VOCABULARY = 40
HIDDEN = 4
END = frozenset({7})
CPU = torch.device("cpu")


class CountingModel:
    """After token t it says t + 1; the state behind a token has it in its first entry, before it is scaled. Sessions
    are known by what was fed."""

    def __init__(self) -> None:
        self.fed: dict[int, list[int]] = {}
        self.widest = 0

    def logits(self, last: Any) -> Any:
        return torch.nn.functional.one_hot((last + 1) % VOCABULARY, VOCABULARY).float() * 50

    def step_tensor(self, segments: Sequence[Segment], ids: Any, *, keeps_hidden: bool = False) -> Any:
        row = 0
        self.widest = max(self.widest, len(ids))
        for segment in segments:
            known = self.fed.setdefault(segment.session, [])
            assert len(known) >= segment.start, "no row is left out"
            known[segment.start :] = ids[row : row + segment.count].tolist()
            row += segment.count
        self._states = _states(ids)
        return self.logits(ids[logit_row_indices(segments)])

    def final_tensor(self) -> Any:
        return self._states

    def continue_tensor(
        self, starts: Sequence[tuple[int, int]], ids: Any, steps: int, choose: Callable[[Any, Any], Any]
    ) -> None:
        for step in range(steps):
            segments = [Segment(session, start + step, 1, 1) for session, start in starts]
            ids = choose(CountingModel.step_tensor(self, segments, ids), self._states)

    def close_session(self, session: int) -> None:
        self.fed.pop(session, None)


def _states(ids: Any) -> Any:
    states = torch.ones((len(ids), HIDDEN))
    states[:, 0] = ids
    return states


class Played:
    """Self-play with what it handed over."""

    def __init__(
        self, model: Any, scripts: Iterator[Script], sessions: int = 3, max_rows: int = 100, context: int = 64
    ) -> None:
        self.ended: list[SelfPlayDialogue] = []
        self.states: list[Any] = []
        self.play = SelfPlay(
            model,
            scripts,
            self._keep,
            sessions=sessions,
            context_length=context,
            kv_tokens=(context + 100) * sessions,
            max_rows=max_rows,
            hidden=HIDDEN,
            device=CPU,
            seed=1,
        )

    def _keep(self, dialogues: Sequence[SelfPlayDialogue], states: Any) -> None:
        self.ended += dialogues
        self.states.append(states)

    def first(self) -> SelfPlayDialogue:
        while not self.ended:
            self.play.step()
        return self.ended[0]


def script(*turns: GivenTokens | ChosenTokens) -> Iterator[Script]:
    return repeat(Script("test", turns))


def test_a_speech_ends_at_its_stop_which_is_kept_only_at_the_end() -> None:
    played = Played(
        CountingModel(),
        script(
            GivenTokens((3, 4)),
            ChosenTokens(9, END),
            GivenTokens((20, 21)),
            ChosenTokens(9, frozenset({24})),
        ),
    )
    ended = played.first()
    assert ended.ids.tolist() == [3, 4, 5, 6, 20, 21, 22, 23, 24]
    assert ended.origins.tolist() == [GIVEN] * 2 + [GREEDY] * 2 + [GIVEN] * 2 + [GREEDY] * 3
    found = played.states[0][:9].float()
    wanted = _states(torch.from_numpy(ended.ids))
    assert torch.allclose(found[:, 0] / found[:, 1], wanted[:, 0], rtol=1e-2), "the state behind every token"
    assert torch.allclose(found.square().mean(-1), torch.ones(9), atol=1e-2)


def test_a_speech_ends_at_its_limit() -> None:
    ended = Played(
        CountingModel(),
        script(
            GivenTokens((3,)), ChosenTokens(2, END), GivenTokens((20,)), ChosenTokens(3, END, temperature=0.5)
        ),
    ).first()
    assert ended.ids.tolist() == [3, 4, 5, 20, 21, 22, 23]
    assert ended.origins.tolist() == [GIVEN, GREEDY, GREEDY, GIVEN, DRAWN, DRAWN, DRAWN]


def test_what_is_only_read_is_kept_as_it_is() -> None:
    assert Played(CountingModel(), script(GivenTokens((9, 3, 9)))).first().ids.tolist() == [9, 3, 9]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_certainty_leaves_nothing_to_chance(top_p: float) -> None:
    turns = (GivenTokens((3,)), ChosenTokens(9, END, temperature=1.0, top_p=top_p))
    assert Played(CountingModel(), script(*turns)).first().ids.tolist() == [3, 4, 5, 6, 7]


def test_chance_has_a_choice_where_the_model_is_unsure() -> None:
    class Unsure(CountingModel):
        def logits(self, last: Any) -> Any:
            return super().logits(last) * 0

    for top_p in (1.0, 0.9):
        turns = (GivenTokens((3,)), ChosenTokens(30, frozenset(), temperature=1.0, top_p=top_p))
        assert len(set(Played(Unsure(), script(*turns)).first().ids.tolist())) > 8


def test_a_session_that_repeats_itself_is_ended() -> None:
    class Stuck(CountingModel):
        def logits(self, last: Any) -> Any:
            return super().logits(last) * 0 + torch.eye(VOCABULARY)[9]

    turns = (GivenTokens((1, 2)), ChosenTokens(1000, END))
    assert len(Played(Stuck(), script(*turns), context=2000).first().ids) < 200


def test_a_context_is_never_exceeded_and_no_step_is_too_large() -> None:
    model = CountingModel()
    played = Played(
        model, script(GivenTokens((1,) * 10), ChosenTokens(100, frozenset())), max_rows=25, context=16
    )
    for _ in range(4):
        played.play.step()
    assert {len(each.ids) for each in played.ended} == {16}
    assert 10 <= model.widest <= 25
    before = len(played.ended)
    played.play.close()
    assert len(played.ended) > before
    assert not model.fed, "nothing is left in memory"


def test_sessions_wait_where_there_is_no_room_for_them() -> None:
    model = CountingModel()
    played = Played(model, script(GivenTokens((1,)), ChosenTokens(200, frozenset())), sessions=6, context=256)
    played.play._room = 2 * 256  # a script may take 201 tokens and 32 more: two sessions
    played.play.step()
    assert len(model.fed) == 2
    while len(played.ended) < 4:
        played.play.step()
    assert len(model.fed) <= 2


def dialogue(*ids: int, kind: str = "test", origin: int = GREEDY) -> SelfPlayDialogue:
    return SelfPlayDialogue(kind, np.asarray(ids, np.int32), np.full(len(ids), origin, np.uint8))


def test_rows_hold_states_tokens_and_what_follows() -> None:
    dataset = TrainingRows(50, HIDDEN, CPU)
    first, second = dialogue(*range(20)), dialogue(*range(16), origin=GIVEN)
    short = dialogue(1, 2)
    states = _states(torch.from_numpy(np.concatenate([first.ids, short.ids, second.ids])))
    dataset.keep([first, short, second], states)
    assert dataset.spans == [Span(0, 20, "test"), Span(22, 38, "test")]
    [batch] = dataset.batches(dataset.spans, 64)
    assert batch.tokens.shape == (2, 32)
    # The shorter comes first, and the end of each is filled up.
    assert batch.tokens[0, :16].tolist() == list(range(16))
    assert batch.following[1, :19].tolist() == list(range(1, 20))
    assert batch.is_there.sum(1).tolist() == [15, 19]
    assert batch.states[1, :20, 0].tolist() == list(range(20))
    assert greedy_rows(batch).nonzero()[:, 0].tolist() == [1] * (20 - 1 - DRAFTED)
    dataset.keep([first], states[:20])
    assert dataset.is_full
    assert dataset.rows == 38


def test_all_rows_come_in_each_pass_in_another_order() -> None:
    dataset = TrainingRows(2000, HIDDEN, CPU)
    told = [dialogue(*[number] * (16 + number % 5)) for number in range(40)]
    ids = np.concatenate([each.ids for each in told])
    dataset.keep(told, _states(torch.from_numpy(ids)))
    random = np.random.default_rng(1)
    passes = [
        [batch.tokens[:, 0].tolist() for batch in dataset.batches(dataset.spans, 96, random)] for _ in "ab"
    ]
    for order in passes:
        assert sorted(each for batch in order for each in batch) == list(range(40))
        assert max(len(batch) for batch in order) <= 6
    assert passes[0] != passes[1]


def test_what_is_examined_is_not_learned_and_two_kinds_never_are() -> None:
    dataset = TrainingRows(5000, HIDDEN, CPU)
    told = [dialogue(*range(16))] * 40 + [dialogue(*range(16), kind="riddle")] * 3
    dataset.keep(told, _states(torch.from_numpy(np.concatenate([each.ids for each in told]))))
    learned, held_out = dataset.split()
    assert len(held_out) == 8 + 3
    assert not set(learned) & set(held_out)
    assert len(learned) + len(held_out) == 43
    assert {span.kind for span in learned} == {"test"}
