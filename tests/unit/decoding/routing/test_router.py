"""What the router chooses, and that it listens to what it is told."""

from __future__ import annotations

import itertools

import pytest

from shardcompute.core.generation import Speculation
from shardcompute.decoding.routing.router import DraftOffer, DraftPlan, PipeLoad, Router

ALONE = PipeLoad(sessions=1, frames_in_flight=0, stages=2)
AUTO = Speculation()


def measured(wire_s: float = 0.08, stage_s: float = 0.004, row_s: float = 0.0002) -> Router:
    """A router that has seen the ring at work."""
    router = Router()
    for _ in range(30):
        for rows in (1, 4, 16):
            stages = [stage_s + row_s * rows] * 2
            router.traversed(rows, wire_s + sum(stages), stages)
    return router


def taught(
    router: Router, accepted: int, *, drafted: int = 4, drafter: str = "ngram", grade: int = 1
) -> Router:
    for _ in range(100):
        router.verified(1, drafter, grade, drafted, accepted)
    return router


def half_right(router: Router) -> Router:
    for turn in range(200):
        router.verified(1, "ngram", 1, 4, (0, 1, 0, 3, 1, 2)[turn % 6])
    return router


def choose(router: Router, wish: Speculation = AUTO, load: PipeLoad = ALONE, *names: str) -> DraftPlan:
    return router.choose(1, wish, names or ("ngram",), load)


def test_wishes_are_obeyed() -> None:
    router = measured()
    assert choose(router, Speculation("off")).drafter is None
    assert choose(router, Speculation("ngram", 5, 2)) == DraftPlan("ngram", 5, 2, "as asked")
    assert router.worth(1, "ngram", 0, 5, ALONE) == 5
    assert choose(router, Speculation("auto", tokens=0)).drafter is None
    assert choose(router, Speculation("model")).drafter is None


def test_a_wished_drafter_is_used_even_where_it_does_not_pay() -> None:
    router = taught(measured(), 0)
    chosen = choose(router, Speculation("ngram"))
    assert (chosen.drafter, chosen.frames) == ("ngram", 1)
    assert chosen.tokens >= 1
    assert router.worth(1, "ngram", 1, 4, ALONE) == 1


def test_a_number_that_is_wished_for_binds_the_router() -> None:
    router = taught(measured(), 4)
    chosen = choose(router, Speculation("auto", tokens=3))
    assert (chosen.drafter, chosen.tokens) == ("ngram", 3)
    assert router.worth(1, "ngram", 1, 3, ALONE) == 3
    assert choose(router, Speculation("auto", frames=2)).frames == 2


def test_nothing_is_drafted_unasked_before_anything_was_measured() -> None:
    assert choose(Router()).drafter is None
    assert choose(Router(), Speculation("ngram")).drafter == "ngram"
    assert choose(measured(), AUTO, ALONE).drafter == "ngram"


def test_better_acceptance_means_longer_drafts_and_more_frames() -> None:
    poor, good, sure = half_right(measured()), measured(), taught(measured(), 4)
    for turn in range(200):
        good.verified(1, "ngram", 1, 4, (4, 4, 3, 4, 1)[turn % 5])
    lengths = [choose(router).tokens for router in (poor, good, sure)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]
    assert choose(taught(measured(), 0)).frames == 1
    assert choose(sure).frames > 1


def test_drafts_of_bad_grades_are_held_back_while_good_ones_go() -> None:
    router = measured()
    for _ in range(100):
        router.verified(1, "ngram", 0, 4, 0)
        router.verified(1, "ngram", 3, 4, 4)
    assert choose(router).drafter == "ngram"
    assert router.worth(1, "ngram", 0, 8, ALONE) == 0
    assert router.worth(1, "ngram", 3, 8, ALONE) == 8


def test_what_does_not_pay_is_tried_again_less_and_less_often() -> None:
    router = taught(measured(), 0)
    sent = []
    for _ in range(200):
        choose(router)
        count = router.worth(1, "ngram", 1, 8, ALONE)
        if count:
            router.verified(1, "ngram", 1, count, 0)
        sent.append(count)
    tries = [turn for turn, count in enumerate(sent) if count]
    assert max(sent) <= 2
    assert 3 <= len(tries) <= 6
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1]


def test_a_slow_drafter_that_does_not_pay_is_left_alone_and_probed() -> None:
    router = taught(measured(wire_s=0.02), 0, drafter="model")
    rounds = []
    for _ in range(60):
        router.drafted(1, "model", 0.02, 4)
        rounds.append(choose(router, AUTO, ALONE, "model").drafter)
    assert 1 <= rounds.count("model") <= 4


def test_drafting_time_is_weighed() -> None:
    quick, slow = (taught(measured(wire_s=0.02), 3, drafter="model") for _ in range(2))
    for _ in range(20):
        quick.drafted(1, "model", 0.004, 4)
        slow.drafted(1, "model", 0.4, 4)
    assert choose(quick, AUTO, ALONE, "model").drafter == "model"
    assert choose(slow, AUTO, ALONE, "model").drafter is None


def test_the_better_drafter_is_chosen() -> None:
    router = taught(taught(measured(), 0, drafter="ngram"), 4, drafter="model")
    router.drafted(1, "model", 0.008, 4)
    assert choose(router, AUTO, ALONE, "ngram", "model").drafter == "model"
    for _ in range(200):
        router.verified(2, "ngram", 3, 8, 8)
        router.verified(2, "model", 1, 8, 1)
    assert router.choose(2, AUTO, ("ngram", "model"), ALONE).drafter == "ngram"


def test_misses_make_a_drafter_less_attractive() -> None:
    router = taught(taught(measured(), 4), 3, drafter="model")
    router.drafted(1, "model", 0.008, 4)
    assert choose(router, AUTO, ALONE, "ngram", "model").drafter == "ngram"
    for _ in range(30):
        router.missed(1, "ngram")
        chosen = choose(router, AUTO, ALONE, "ngram", "model")
    assert chosen.drafter == "model"


def test_backs_off_as_others_fill_the_pipe() -> None:
    router = half_right(measured(wire_s=0.05, stage_s=0.002, row_s=0.004))
    lengths = []
    for sessions in (1, 2, 4, 8, 16):
        choose(router, AUTO, PipeLoad(sessions, sessions, 2))
        lengths.append(router.worth(1, "ngram", 1, 16, PipeLoad(sessions, sessions, 2)))
    assert lengths[0] >= 1
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0
    all_rows = half_right(measured(wire_s=0.0, stage_s=0.0, row_s=0.01))
    assert choose(all_rows, AUTO, PipeLoad(16, 2, 2)).drafter is None


def test_where_rows_cost_as_much_as_tokens_only_sure_drafts_are_sent() -> None:
    assert _sent(half_right(measured(wire_s=0.0, stage_s=0.002, row_s=0.010))) == 0
    assert _sent(taught(measured(wire_s=0.0, stage_s=0.010, row_s=0.002), 4)) >= 2


def _sent(router: Router) -> int:
    choose(router)
    return router.worth(1, "ngram", 1, 16, ALONE)


@pytest.mark.parametrize(
    ("wire_s", "stage_s", "depth"), [(0.2, 0.01, 20), (0.001, 0.02, 2), (9.0, 0.001, 32)]
)
def test_the_pipe_is_as_deep_as_the_slowest_stage_needs(wire_s: float, stage_s: float, depth: int) -> None:
    found = measured(wire_s, stage_s, 0.0).pipe_depth(2)
    assert depth - 2 <= found <= depth
    assert Router().pipe_depth(3) == 3


def test_waiting_in_line_does_not_deepen_the_pipe() -> None:
    """Frames that wait make the ring look longer; sending more of them for that would feed on itself."""
    router = measured(0.01, 0.02, 0.0)
    depth = 16
    for _ in range(4000):
        seconds = max(0.05, depth * 0.02)  # as many frames as there are wait for the slowest stage
        router.traversed(1, seconds, [0.02, 0.02])
        depth = router.pipe_depth(2)
    assert 1 <= depth <= 5


def test_a_forgotten_session_starts_afresh() -> None:
    router = measured()
    for session in (2, 3):
        for _ in range(60):
            router.verified(session, "ngram", 1, 4, 4)
    for _ in range(60):
        router.verified(1, "ngram", 1, 4, 0)
    assert _chosen(router, 1) != _chosen(router, 9)
    router.forget(1)
    assert _chosen(router, 1) == _chosen(router, 9)


def _chosen(router: Router, session: int) -> tuple[DraftPlan, int]:
    return router.choose(session, AUTO, ("ngram",), ALONE), router.worth(session, "ngram", 1, 16, ALONE)


def test_the_snapshot_tells_times_acceptance_and_shares() -> None:
    router = taught(measured(), 2)
    choose(router)
    choose(router, Speculation("off"))
    router.missed(1, "ngram")
    told = router.snapshot()
    assert told["ring_s"] == pytest.approx(0.0884, rel=0.02)
    assert told["bottleneck_s"] == pytest.approx(0.0042, rel=0.05)
    assert told["acceptance_ngram"] == pytest.approx(0.5, rel=0.02)
    assert (told["share_plain"], told["share_ngram"]) == (1.0, 0.0)


def test_equal_stories_lead_to_equal_choices() -> None:
    first, second = (taught(measured(), 3) for _ in range(2))
    assert [choose(first) for _ in range(20)] == [choose(second) for _ in range(20)]


def test_head_drafts_are_asked_for_where_they_pay() -> None:
    router = measured()
    assert router.head_draft_tokens(1, AUTO, ALONE) > 0
    for _ in range(60):
        router.verified(1, "head", 2, 4, 4)
    eager = router.head_draft_tokens(1, AUTO, ALONE)
    assert eager >= 4
    for wish in (Speculation("off"), Speculation("ngram"), Speculation("auto", tokens=0)):
        assert router.head_draft_tokens(1, wish, ALONE) == 0
    assert router.head_draft_tokens(1, Speculation("head", tokens=3), ALONE) == 3
    assert Router().head_draft_tokens(1, AUTO, ALONE) == 0
    assert Router().head_draft_tokens(1, Speculation("head"), ALONE) > 0


def test_head_drafts_that_never_hold_are_asked_for_less_and_less() -> None:
    router = measured()
    for _ in range(200):
        router.verified(1, "head", 2, 2, 0)
    asked = [bool(router.head_draft_tokens(1, AUTO, ALONE)) for _ in range(300)]
    assert 0 < sum(asked[:100]) < 20
    assert sum(asked[200:]) <= sum(asked[:100])


def test_one_slow_draft_does_not_end_head_drafts() -> None:
    """The first one after a load may take as long as a busy machine lets it."""
    router = measured()
    for _ in range(60):
        router.verified(1, "head", 2, 4, 4)
    eager = router.head_draft_tokens(2, AUTO, ALONE)
    router.drafted(2, "head", 4.0, 2)
    assert router.head_draft_tokens(3, AUTO, ALONE) == eager


def test_a_drafter_that_was_slow_for_long_is_tried_again_and_taken_back() -> None:
    router = measured()
    for _ in range(60):
        router.verified(1, "head", 2, 4, 4)
        router.drafted(1, "head", 4.0, 2)
    asked = []
    for _ in range(600):
        asked.append(router.head_draft_tokens(1, AUTO, ALONE))
        if asked[-1]:
            router.drafted(1, "head", 4.0, asked[-1])
    tries = [turn for turn, count in enumerate(asked) if count]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert max(asked) <= 2
    assert 2 <= len(tries) <= 6
    assert gaps == sorted(gaps)
    for _ in range(1200):
        count = router.head_draft_tokens(1, AUTO, ALONE)
        if count:
            router.drafted(1, "head", 0.004, count)
    assert router.head_draft_tokens(1, AUTO, ALONE) >= 4


def test_drafts_that_are_made_inside_the_ring_go_round_one_at_a_time() -> None:
    router = taught(measured(), 4, drafter="head")
    assert choose(router, AUTO, ALONE, "head").frames == 1


def test_of_the_drafts_at_hand_the_one_that_promises_most_is_sent() -> None:
    router = measured()
    for _ in range(100):
        router.verified(1, "ngram", 1, 4, 1)
        router.verified(1, "ngram", 3, 4, 4)
        router.verified(1, "head", 2, 4, 3)
    drafted = DraftOffer("head", 2, 4)
    poor = router.compare(1, AUTO, [DraftOffer("ngram", 1, 8), drafted], ALONE)
    good = router.compare(1, AUTO, [DraftOffer("ngram", 3, 8), drafted], ALONE)
    assert poor is not None
    assert good is not None
    assert (poor.drafter, good.drafter) == ("head", "ngram")
    assert 1 <= poor.tokens <= 4
    assert good.tokens == 8


def test_drafts_at_hand_that_never_hold_are_not_sent() -> None:
    router = measured()
    for _ in range(200):
        router.verified(1, "ngram", 0, 4, 0)
    assert router.compare(1, AUTO, [DraftOffer("ngram", 0, 4)], ALONE) is None
    assert router.compare(1, AUTO, [], ALONE) is None
    assert Router().compare(1, AUTO, [DraftOffer("ngram", 3, 4)], ALONE) is None


def test_a_drafter_goes_on_behind_drafts_that_mostly_hold() -> None:
    router = measured()
    assert not router.pays_ahead(1, "model", 1, 4), "nobody knows yet"
    taught(router, 4, drafter="model")
    assert router.pays_ahead(1, "model", 1, 4)
    assert not router.pays_ahead(1, "model", 0, 4), "of this grade none has held"
    taught(router, 4, drafter="ngram")
    assert not router.pays_ahead(1, "ngram", 1, 4), "what is free is drafted when it is wanted"
    for _ in range(10):
        taught(router, 0, drafter="model")
    assert not router.pays_ahead(1, "model", 1, 4)


def test_a_very_long_ring_holds_many_frames_of_a_sure_drafter() -> None:
    near, far = (taught(measured(wire_s=wire_s), 4, drafter="model", grade=3) for wire_s in (0.05, 1.0))
    for router in (near, far):
        for _ in range(50):
            router.verified(1, "model", 3, 16, 16)
            router.drafted(1, "model", 0.02, 4)
    assert choose(near, AUTO, ALONE, "model").frames < 4
    assert choose(far, AUTO, ALONE, "model").frames > 4
