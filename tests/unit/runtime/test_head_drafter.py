"""Drafts of the last stage: where they begin, where they end, and what is remembered of sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardcompute.backends.kv import PageBudget
from shardcompute.backends.matrix import Array, DenseMatrix, HeldRows
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.core.steps import Draft, Opening, Picked, SessionRows
from shardcompute.runtime.head_drafter import HeadDrafter, HeadDraftLimits
from shardcompute.runtime.tail import Tail

VOCABULARY, HIDDEN, CONTEXT = 40, 4, 256
KNOWN = np.arange(1, 30, dtype=np.int32)
"""Token 0, and those from 30 on, are not known to the network."""
Shown = tuple[int, int]
"""A row: the token that is embedded, and the state, which is its position."""


class CountingNetwork:
    """After token t it expects t + 1, `sureness` sure of it. An embedding is the token's number, a state its row's
    position; what it holds of each session is what it was shown."""

    def __init__(self, sureness: float = 0.9, pages: int = 64) -> None:
        self.sureness = sureness
        self.steps: list[list[Segment]] = []
        self.held: dict[int, list[Shown]] = {}
        self.budget = PageBudget(1, pages, CONTEXT)
        self._states: Array = np.zeros((0, HIDDEN))

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        assert keeps_hidden
        assert inputs.shape == (count_rows(segments), 2 * HIDDEN)
        self.budget.check(segments)
        self.steps.append(list(segments))
        row, wanted = 0, []
        for segment in segments:
            self.budget.take(segment)
            rows = self.held.setdefault(segment.session, [])
            del rows[segment.start :]
            own = inputs[row : row + segment.count]
            rows += [(int(each[0]), int(each[HIDDEN])) for each in own]
            row += segment.count
            wanted += (
                [each[0] for each in rows[len(rows) - segment.logit_rows :]] if segment.logit_rows else []
            )
        self._states = inputs[:, HIDDEN:] + 1
        logits = np.full((len(wanted), len(KNOWN)), np.log((1 - self.sureness) / (len(KNOWN) - 1)))
        for at, token in enumerate(wanted):
            logits[at, np.searchsorted(KNOWN, token % len(KNOWN) + 1)] = np.log(self.sureness)
        return logits.astype(np.float32)

    def final_rows(self) -> Array:
        return self._states

    def adopt(self, source: int, target: int, length: int, *, is_moved: bool = False) -> None:
        self.budget.adopt(source, target, length, is_moved=is_moved)
        self.held[target] = self.held[source][:length]
        if is_moved:
            del self.held[source]

    def close_session(self, session: int) -> None:
        self.budget.release(session)
        self.held.pop(session, None)

    def close(self) -> None:
        self.steps.clear()


class Drafting:
    """A drafter over such a network, with the tail that picks as it is told."""

    def __init__(self, network: CountingNetwork | None = None, **limits: float) -> None:
        self.network = network or CountingNetwork()
        embedding = np.repeat(KNOWN[:, None], HIDDEN, axis=1).astype(np.float32)
        self.drafter = HeadDrafter(
            self.network,  # type: ignore[arg-type]
            KNOWN,
            HeldRows(DenseMatrix(embedding)),
            HeadDraftLimits(CONTEXT, **{"most": 8, **limits}),  # type: ignore[arg-type]
            vocab_size=VOCABULARY,
        )
        self.tail = Tail()

    def open(self, *sessions: int, sampling: Sampling | None = None) -> None:
        self.tail.open(Opening(each, sampling or Sampling(temperature=0.0), 1) for each in sessions)

    def take(self, *parts: tuple[SessionRows, Sequence[int]]) -> list[Draft]:
        """A step of these rows, of which these tokens were picked; then what is drafted."""
        work, picked, states = [], [], []
        for part, tokens in parts:
            first = part.start + len(part.ids) - part.logit_rows
            work.append(part)
            self.tail.follow(part)
            picked += [
                Picked(part.session, first + i, TokenChoice(token), is_scored=bool(part.targets))
                for i, token in enumerate(tokens)
            ]
            positions = np.arange(part.start, part.start + len(part.ids))
            states.append(np.repeat(positions[:, None], HIDDEN, axis=1).astype(np.float32))
        given = np.concatenate(states)
        self.drafter.remember(work, picked, given)
        given[:] = -1  # the next step's are written there
        return self.drafter.draft(work, self.tail)


def prompt(session: int, *ids: int, start: int = 0, drafted: int = 0) -> SessionRows:
    return SessionRows(session, start, ids, 1, head_draft_tokens=drafted)


@pytest.fixture
def drafting() -> Drafting:
    drafting = Drafting()
    drafting.open(7)
    return drafting


def test_drafts_follow_the_picked_token(drafting: Drafting) -> None:
    assert drafting.take((prompt(7, 3, 5, 8, drafted=4), [10])) == [Draft(7, 4, (11, 12, 13, 14), 3)]
    # All true rows with the first step; then one row for each token but the last.
    assert [[each.count for each in step] for step in drafting.network.steps] == [[3], [1], [1], [1]]
    assert drafting.network.held[7] == [(5, 0), (8, 1), (10, 2), (11, 3), (12, 4), (13, 5)]


def test_drafts_go_on_from_the_last_draft_that_held_and_overwrite_the_others(drafting: Drafting) -> None:
    drafting.take((prompt(7, 3, 5, drafted=3), [10]))
    # Rows: the known token, then drafts 11, 12 and 20; the last one is not what was picked.
    part = SessionRows(7, 2, (10, 11, 12, 20), 4, head_draft_tokens=2)
    assert drafting.take((part, [11, 12, 15, 21])) == [Draft(7, 6, (16, 17), 3)]
    assert drafting.network.held[7] == [(5, 0), (10, 1), (11, 2), (12, 3), (15, 4), (16, 5)]
    assert drafting.take((SessionRows(7, 5, (15,), 1, head_draft_tokens=1), [2])) == [Draft(7, 7, (3,), 3)]
    assert drafting.network.held[7] == [(5, 0), (10, 1), (11, 2), (12, 3), (15, 4), (2, 5)]


def test_a_prompt_in_pieces_is_one_text(drafting: Drafting) -> None:
    drafting.take(
        (SessionRows(7, 0, tuple(range(1, 21))), []),
    )
    drafting.take((SessionRows(7, 20, (21, 22)), []))
    assert not drafting.network.steps
    assert drafting.take((prompt(7, 23, start=22, drafted=1), [5]))
    shown = [*((token, token - 2) for token in range(2, 24)), (5, 22)]
    assert drafting.network.held[7] == shown


def test_many_rows_are_shown_at_once_and_in_bounded_steps() -> None:
    drafting = Drafting(step_rows=16)
    drafting.open(7)
    drafting.take((SessionRows(7, 0, tuple(i % 20 + 1 for i in range(50))), []))
    assert [each.count for step in drafting.network.steps for each in step] == [16, 16, 16]
    assert drafting.take((prompt(7, 9, start=50, drafted=1), [4]))
    assert [position for _, position in drafting.network.held[7]] == list(range(51))


def test_a_token_other_than_the_picked_one_is_shown_instead(drafting: Drafting) -> None:
    drafting.take((prompt(7, 3, 5, drafted=2), [10]))
    drafting.take((prompt(7, 20, start=2, drafted=1), [4]))
    assert drafting.network.held[7] == [(5, 0), (20, 1), (4, 2)]


def test_a_session_that_goes_back_or_leaves_rows_out_is_followed(drafting: Drafting) -> None:
    drafting.take((prompt(7, 3, 5, 6, 7, drafted=2), [10]))
    drafting.take((prompt(7, 9, start=1, drafted=1), [2]))
    assert drafting.network.held[7] == [(5, 0), (2, 1)]
    drafting.tail.follow(SessionRows(7, 2, (2, 2, 2, 2)))
    drafting.take((prompt(7, 8, start=6, drafted=1), [3]))
    assert drafting.network.held[7] == [(5, 0), (2, 1), (3, 6)]
    drafting.take((prompt(7, 4, start=3, drafted=1), [6]))
    assert drafting.network.held[7] == [(5, 0), (2, 1), (6, 3)]


def test_sessions_are_drafted_for_side_by_side_and_only_where_asked() -> None:
    drafting = Drafting()
    drafting.open(1, 2, 3)
    parts = [(prompt(1, 3, drafted=1), [5]), (prompt(2, 3), [6]), (prompt(3, 3, 4, drafted=3), [7])]
    found = drafting.take(*parts)
    assert [(each.session, each.ids) for each in found] == [(1, (6,)), (3, (8, 9, 10))]
    steps = [[(each.session, each.count) for each in step] for step in drafting.network.steps]
    assert steps == [[(1, 1), (3, 2)], [(3, 1)], [(3, 1)]]
    # What nobody drafted behind is remembered all the same.
    assert drafting.take((prompt(2, 6, start=1, drafted=1), [9]))
    assert drafting.network.held[2] == [(6, 0), (9, 1)]


def test_sessions_that_share_a_beginning_share_its_memory(drafting: Drafting) -> None:
    drafting.take((prompt(7, 3, 5, 6, 7, drafted=2), [10]))
    drafting.drafter.adopt(7, 8, 2)
    drafting.open(8)
    drafting.tail.follow(SessionRows(8, 0, (3, 5)))
    drafting.take((prompt(8, 20, start=2, drafted=1), [21]))
    # The row where they part was shown with the first one's token, and its state is gone.
    assert drafting.network.held[8] == [(5, 0), (6, 1), (21, 2)]
    drafting.drafter.adopt(7, 9, 4)
    drafting.open(9)
    drafting.tail.follow(SessionRows(9, 0, (3, 5, 6, 7)))
    drafting.take((prompt(9, 20, start=4, drafted=1), [21]))
    assert drafting.network.held[9] == [(5, 0), (6, 1), (7, 2), (20, 3), (21, 4)]
    drafting.drafter.adopt(7, 6, 3, is_moved=True)
    assert drafting.network.held[6] == [(5, 0), (6, 1), (7, 2)]
    assert sorted(drafting.drafter.sessions()) == [6, 8, 9]


def test_what_a_session_begins_with_may_not_have_been_shown_yet(drafting: Drafting) -> None:
    drafting.take((SessionRows(7, 0, (3, 5, 6, 7)), []))
    drafting.drafter.adopt(7, 8, 3)
    drafting.drafter.adopt(5, 9, 3)
    drafting.open(8, 9)
    for session in (8, 9):
        drafting.tail.follow(SessionRows(session, 0, (3, 5, 6)))
        drafting.take((prompt(session, 11, start=3, drafted=1), [12]))
    assert drafting.network.held[8] == [(5, 0), (6, 1), (11, 2), (12, 3)]
    assert drafting.network.held[9] == [(12, 3)]


def test_an_ended_session_is_forgotten(drafting: Drafting) -> None:
    drafting.take((prompt(7, 3, 5, drafted=2), [10]))
    drafting.drafter.close_session(7)
    assert not drafting.network.held
    assert not drafting.drafter.sessions()
    assert drafting.drafter.indexed_tokens == 0


def test_where_memory_is_short_the_quietest_session_begins_anew() -> None:
    drafting = Drafting(CountingNetwork(pages=2))
    drafting.open(1, 2, 3)
    for session in (1, 2, 1, 3):
        start = drafting.tail.length(session)
        assert drafting.take((prompt(session, 3, start=start, drafted=1), [5]))
    assert sorted(drafting.network.held) == [1, 3]
    assert drafting.take((prompt(2, 5, start=1, drafted=1), [6]))
    assert drafting.network.held[2] == [(6, 1)]


def test_a_session_too_long_for_the_memory_is_only_not_drafted_for() -> None:
    drafting = Drafting(CountingNetwork(pages=1), step_rows=16)
    drafting.open(1)
    drafting.take((SessionRows(1, 0, tuple(i % 20 + 1 for i in range(100))), []))
    assert drafting.take((prompt(1, 3, start=100, drafted=1), [5]))
    assert len(drafting.network.held[1]) < 64


def test_a_draft_ends_where_it_is_more_likely_wrong() -> None:
    for sureness, ids in ((0.5, [(4, 5)]), (0.1, [])):
        drafting = Drafting(CountingNetwork(sureness), confidence=0.2)
        drafting.open(7)
        assert [each.ids for each in drafting.take((prompt(7, 9, drafted=8), [3]))] == ids


def test_a_token_that_is_not_known_is_shown_as_nothing(drafting: Drafting) -> None:
    drafting.take((prompt(7, 3, 35, drafted=1), [36]))
    assert drafting.network.held[7] == [(0, 0), (0, 1)]


def test_the_context_bounds_drafts(drafting: Drafting) -> None:
    tokens = tuple(range(1, 21)) * 12
    found = drafting.take((prompt(7, *tokens, *range(1, 13), drafted=8), [1]))
    assert found[0].start + len(found[0].ids) <= CONTEXT


def test_prompts_that_are_scored_are_not_drafted_on(drafting: Drafting) -> None:
    part = SessionRows(7, 0, (3, 5), 2, (5, 4), head_draft_tokens=4)
    assert drafting.take((part, [5, 4])) == []
    drafting.take((prompt(7, 9, start=2, drafted=1), [10]))
    assert drafting.network.held[7] == [(5, 0), (9, 1), (10, 2)]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.9, seed=3), Sampling(temperature=0.0, repetition_penalty=1.5)]
)
def test_the_tail_knows_afterwards_what_it_knew_before(sampling: Sampling) -> None:
    one, other = Drafting(), Drafting()
    logits = np.random.default_rng(2).standard_normal((2, VOCABULARY)).astype(np.float32)
    work, firsts = SessionRows(7, 3, (4, 9), 2, head_draft_tokens=5), []
    for each in (one, other):
        each.open(7, sampling=sampling)
        each.tail.follow(SessionRows(7, 0, (1, 2, 3)))
        firsts.append(each.tail.pick([work], logits))
    one.drafter.remember([work], firsts[0], np.zeros((2, HIDDEN), dtype=np.float32))
    one.drafter.draft([work], one.tail)
    assert firsts[0] == firsts[1]
    assert one.tail.length(7) == other.tail.length(7)
    following = SessionRows(7, 4, (firsts[0][0].choice.id,), 1)
    assert one.tail.pick([following], logits[:1]) == other.tail.pick([following], logits[:1])


def test_biases_and_penalties_count_for_drafts() -> None:
    drafting = Drafting(confidence=0.0)
    drafting.open(7, sampling=Sampling(temperature=0.0, logit_bias={11: -100.0}))
    found = drafting.take((prompt(7, 3, drafted=1), [10]))
    assert found[0].ids != (11,)


REPEATED = (3, 17, 9, 25, 11, 2)
"""Behind none of these does the network expect the next one."""


def repeating(sureness: float, sampling: Sampling | None = None) -> Drafting:
    drafting = Drafting(CountingNetwork(sureness), confidence=0.0, drawn_confidence=0.0)
    drafting.open(7, sampling=sampling)
    return drafting


def test_text_that_repeats_is_copied_and_the_network_sees_the_copies() -> None:
    drafting = repeating(0.2)
    found = drafting.take((prompt(7, *REPEATED, *REPEATED[:3], drafted=2), [25]))
    assert found[0].ids == (11, 2)
    assert [token for token, _ in drafting.network.held[7]][-2:] == [25, 11]


def test_a_sure_network_is_believed_and_an_unsure_one_is_not() -> None:
    # The last three tokens went on with 25 before; the network expects 10.
    drafted = {}
    for sureness in (0.2, 0.99):
        found = repeating(sureness).take((prompt(7, *REPEATED, *REPEATED[:2], drafted=1), [9]))
        drafted[sureness] = found[0].ids
    assert drafted == {0.2: (25,), 0.99: (10,)}


def test_a_draft_changes_between_copying_and_inventing() -> None:
    # What is not known to the network, as 30, can be copied.
    tokens = (3, 17, 30, 25, 4, 19, 8, 6)
    found = repeating(0.2).take((prompt(7, *tokens, 12, 3, drafted=3), [17]))
    assert found[0].ids == (30, 25, 4)
    # Behind 21 and 22, which never occurred, the network invents 23; that is followed by 1 wherever it occurred.
    found = repeating(0.2).take((prompt(7, 22, 23, 1, 7, 22, 23, 1, 7, 5, 21, drafted=2), [22]))
    assert found[0].ids == (23, 1)


def test_copies_that_were_wrong_lately_count_for_less() -> None:
    drafting, drafts, length = repeating(0.2), [], len(REPEATED)
    drafting.take((SessionRows(7, 0, REPEATED), []))
    for other in range(12, 20):
        # The same three tokens again and again, behind another one each time: the network is always right.
        rows = SessionRows(7, length, (other, 3, 17), 1, head_draft_tokens=1)
        drafts += [each.ids[0] for each in drafting.take((rows, [9]))]
        # Where they differ, the draft is wrong; the text that has to be copied is the one with 25.
        drafting.take((SessionRows(7, length + 3, (9, 10, 3, 17, 9, 25)), []))
        length += 9
    assert drafts[0] == 25
    assert drafts[-1] == 10


def test_what_was_rolled_back_is_not_copied_and_what_came_instead_is() -> None:
    drafting = repeating(0.2)
    drafting.take((prompt(7, *REPEATED, 5, 6, drafted=1), [8]))
    # The session goes back to its second token.
    drafting.take((prompt(7, 4, 19, 12, 28, start=2, drafted=1), [13]))
    assert drafting.take((prompt(7, 13, 4, 19, start=6, drafted=1), [12]))[0].ids == (28,)
    assert drafting.take((prompt(7, 12, 17, start=9, drafted=1), [9]))[0].ids != (25,)


def test_a_session_copies_from_the_beginning_that_it_shares() -> None:
    drafting = repeating(0.2)
    drafting.take((prompt(7, *REPEATED, 5, drafted=1), [8]))
    drafting.drafter.adopt(7, 8, 6)
    drafting.open(8)
    drafting.tail.follow(SessionRows(8, 0, REPEATED))
    assert drafting.take((prompt(8, 3, 17, start=6, drafted=2), [9]))[0].ids == (25, 11)
    # Of what came behind it in the other session, nothing is known to this one.
    assert drafting.take((prompt(8, 9, 11, start=8, drafted=1), [2]))[0].ids != (5,)


def test_indices_of_quiet_sessions_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.runtime.head_drafter._INDEXED_TOKENS", 12)
    drafting = Drafting(CountingNetwork(0.2), confidence=0.0)
    drafting.open(1, 2)
    for session in (1, 2):
        drafting.take((prompt(session, *REPEATED, 5, drafted=1), [8]))
        assert drafting.drafter.indexed_tokens == 7
    # The first one's was dropped, and is made again from its tokens.
    assert drafting.take((prompt(1, 8, 3, 17, start=7, drafted=1), [9]))[0].ids == (25,)


def test_copies_are_drawn_with_the_noise_of_the_real_draw() -> None:
    """A drafted token is what the real draw picks from logits that are the mixture."""
    agreed = copied = 0
    for seed in range(24):
        drafting = repeating(0.2, Sampling(temperature=0.8, seed=seed))
        found = drafting.take((prompt(7, *REPEATED, *REPEATED[:3], drafted=1), [25]))
        spread = np.full((1, VOCABULARY), -12.0, dtype=np.float32)
        spread[0, 11] = 0.0
        picked = drafting.tail.pick([SessionRows(7, 9, (25,), 1)], spread)[0].choice.id
        copied += found[0].ids == (11,)
        agreed += found[0].ids == (picked,)
    assert copied == agreed
    assert 4 < copied < 24


def test_an_unlikely_draw_does_not_end_a_draft() -> None:
    """It was drawn with the noise of the real draw, and so is right more often than its likelihood says."""
    lengths = {}
    for name, sampling in (("best", Sampling(temperature=0.0)), ("drawn", Sampling(temperature=5.0, seed=1))):
        drafting = Drafting(CountingNetwork(0.1), confidence=0.2, drawn_confidence=0.2)
        drafting.open(7, sampling=sampling)
        found = drafting.take((prompt(7, 9, drafted=4), [3]))
        lengths[name] = len(found[0].ids) if found else 0
    assert lengths == {"best": 0, "drawn": 1}
