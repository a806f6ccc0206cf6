"""Decides, round by round, whether and how a session speculates.

For each frame of a session the driver asks `choose`, has the drafter propose, asks `worth` once how many of the
drafted tokens to send, and tells what became of them (`verified`, or `missed` where there was nothing to propose).
After a miss it may ask again without that drafter. Left alone, the router takes what promises the most tokens per
second (see `gains`) and is plain unless that is a clear gain; what does not pay is tried again, less and less often.
Where several sessions answer, what came of it is measured too (`load_trials`), and has the last word.

Deterministic: no clock, no randomness. One caller at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardcompute.core.generation import Speculation
from shardcompute.decoding.drafting import GRADES, HEAD_DRAFTER
from shardcompute.decoding.routing.estimates import Acceptance, DraftTimes, RingTimes
from shardcompute.decoding.routing.gains import (
    MOST_FRAMES,
    Prospect,
    RoundCosts,
    ahead_chance,
    mix,
    net_rate,
    plain_rate,
    prospects,
)
from shardcompute.decoding.routing.load_trials import LoadTrials

_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
_MARGIN = 1.03
"""Speculation must promise this much more than plain decoding, and a further frame than one frame less."""
_FREE_DRAFT_S = 2e-4
"""A draft token under this is made whenever there may be use for it: only its verification costs."""
_ONE_FRAME = frozenset({HEAD_DRAFTER})
"""These draft at the end of a frame's way, so nothing can be drafted to follow it before it is back."""
_AHEAD = frozenset({"model"})
"""These draft beside the driver, and can go on while a frame is on its way."""
_AHEAD_CHANCE = 0.2
"""What is drafted ahead takes somebody's time: it must be of use this often."""
_FRAME_COUNTS = (1, 2, 3, 4, 6, MOST_FRAMES)
_FIRST_TOKENS = 4
_PROBE_TOKENS = 2
_PROBE_ACCEPTANCE = 0.9
_FIRST_WAIT, _LONGEST_WAIT = 8, 64
_FIRST_COSTLY_WAIT, _LONGEST_COSTLY_WAIT = 64, 512
"""Of a drafter that takes too long to draft: a try costs more than one that is only wrong."""
_ROUNDS_PER_PLAN = 12
_OFFER_FADE = 0.85
_FIRST_OFFERS = (*[0.1] * GRADES, 0.0)
_DEEPEST_PIPE = 32
_DEPTH_SHARE = 0.9
"""Where frames wait in line, the ring seems longer by that; asking for a little less lets the line dissolve."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to do next for a session. `drafter` None: plain decoding. `tokens` and `frames` are at most."""

    drafter: str | None
    tokens: int
    frames: int
    reason: str


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """A draft that is there: whose, how sure, and of how many tokens."""

    drafter: str
    grade: int
    count: int


@dataclass(frozen=True, slots=True)
class PipeLoad:
    """How full the chain is: sessions that are answering now, frames on their way, stages."""

    sessions: int
    frames_in_flight: int
    stages: int
    continues: bool = False
    """Whether it goes on with plain decoding by itself: nobody waits for the driver then."""


@dataclass(slots=True)
class _Patience:
    """How long to leave alone what does not pay: twice as long after each try."""

    wait: int = _FIRST_WAIT
    longest: int = _LONGEST_WAIT
    passed: int = 0

    def is_due(self) -> bool:
        self.passed += 1
        if self.passed < self.wait:
            return False
        self.passed, self.wait = 0, min(2 * self.wait, self.longest)
        return True


@dataclass(frozen=True, slots=True)
class _Prospectus:
    """What one drafter can do for a session now."""

    drafter: str
    is_free: bool
    tokens: int
    frames: int
    rate: float
    worth: tuple[int, ...]
    """By grade, how many tokens are worth sending."""
    can_pay: bool
    """Whether good drafts would pay at all."""
    is_too_slow: bool = False
    """They would if drafting took no longer than it needs to."""


@dataclass(slots=True)
class _RoutedSession:
    wish: Speculation = field(default_factory=Speculation)
    offers: dict[str, list[float]] = field(default_factory=dict)
    """By drafter, faded counts of drafts of each grade and, last, of none."""
    patience: dict[tuple[str, int], _Patience] = field(default_factory=dict)
    plans: tuple[_Prospectus, ...] = ()
    plain_rate: float = 0.0
    planned_for: object = None
    rounds_left: int = 0
    plans_made: int = 0

    def offered(self, drafter: str, grade: int) -> None:
        counts = self.offers.setdefault(drafter, list(_FIRST_OFFERS))
        for index in range(len(counts)):
            counts[index] *= _OFFER_FADE
        counts[grade] += 1.0

    def offer_shares(self, drafter: str) -> list[float]:
        counts = self.offers.get(drafter, list(_FIRST_OFFERS))
        total = sum(counts)
        return [count / total for count in counts]

    def is_due(self, drafter: str, grade: int) -> bool:
        return self.patience.setdefault((drafter, grade), _Patience()).is_due()

    def is_try_due(self, plan: _Prospectus) -> bool:
        """Whether to see how a drafter fares that promises nothing now. Without that nobody would ever know better:
        its machine may have been busy, its text unusual."""
        if plan.can_pay:
            return self.is_due(plan.drafter, GRADES)
        if not plan.is_too_slow:
            return False
        costly = _Patience(_FIRST_COSTLY_WAIT, _LONGEST_COSTLY_WAIT)
        return self.patience.setdefault((plan.drafter, GRADES + 1), costly).is_due()

    def plan_of(self, drafter: str) -> _Prospectus | None:
        return next((plan for plan in self.plans if plan.drafter == drafter), None)


class Router:
    """Live estimates of one chain, and the choices that follow from them."""

    def __init__(self) -> None:
        self._acceptance = Acceptance()
        self._ring = RingTimes()
        self._draft_times = DraftTimes()
        self._trials = LoadTrials()
        self._sessions: dict[int, _RoutedSession] = {}
        self._rounds: dict[str, int] = {}

    # What the driver asks

    def choose(self, session: int, wish: Speculation, available: Sequence[str], load: PipeLoad) -> DraftPlan:
        """What to do for the session's next frame."""
        state = self._sessions.setdefault(session, _RoutedSession())
        state.wish = wish
        chosen = self._choose(session, state, available, load)
        self._count_round(chosen)
        return chosen

    def compare(
        self,
        session: int,
        wish: Speculation,
        offers: Sequence[DraftOffer],
        load: PipeLoad,
        others: Sequence[str] = (),
    ) -> DraftPlan | None:
        """Which of the drafts that are there already to send, and how much of it; None: better plain decoding, or one
        of the `others`, who would have to draft first."""
        if not offers or not self._ring.is_known or wish.tokens == 0 or not self._may_draft(wish, load):
            return None
        state = self._sessions.setdefault(session, _RoutedSession())
        state.wish = wish
        self._plan(session, state, (*(offer.drafter for offer in offers), *others), load)
        costs = self._costs(load)
        rates = [plan.rate for plan in state.plans if plan.drafter in others]
        best, most = None, max([state.plain_rate * _MARGIN, *rates])
        for offer in offers:
            plan = state.plan_of(offer.drafter)
            grade = min(max(offer.grade, 0), GRADES - 1)
            tokens = min(offer.count, 0 if plan is None else plan.worth[grade])
            if plan is None or tokens < 1:
                continue
            chances = self._acceptance.chances(session, offer.drafter, grade, tokens + 1)
            rate = net_rate(costs, tokens, prospects(chances)[tokens], plan.frames)
            if rate > most:
                reason = f"promises {rate / state.plain_rate:.2f} of plain"
                best, most = DraftPlan(offer.drafter, tokens, plan.frames, reason), rate
        return best

    def took(self, plan: DraftPlan) -> None:
        """The next frame is made by a plan that `compare` gave. To look for one is no round, however often."""
        self._count_round(plan)

    def head_draft_tokens(self, session: int, wish: Speculation, load: PipeLoad) -> int:
        """How many tokens the last stage is to draft behind the next frame; it must be told with that."""
        drafter = HEAD_DRAFTER
        if wish.drafter not in ("auto", drafter) or wish.tokens == 0:
            return 0
        if wish.drafter == drafter and (wish.tokens is not None or not self._ring.is_known):
            return wish.tokens or _FIRST_TOKENS
        if not self._ring.is_known or not self._may_draft(wish, load):
            return 0
        state = self._sessions.setdefault(session, _RoutedSession())
        state.wish = wish
        self._plan(session, state, (drafter,), load)
        plan = state.plan_of(drafter)
        if plan is None:
            return 0
        if wish.drafter == drafter or (plan.tokens and plan.rate >= _MARGIN * state.plain_rate):
            return max(plan.tokens, 1)
        return _PROBE_TOKENS if state.is_try_due(plan) else 0

    def worth(self, session: int, drafter: str, grade: int, count: int, load: PipeLoad) -> int:
        """How many of a draft's `count` tokens to send, now that its grade is known. Asked once for each draft."""
        state = self._sessions.setdefault(session, _RoutedSession())
        wish = state.wish
        if wish.tokens is not None and wish.drafter != "auto":
            return min(count, wish.tokens)
        plan = state.plan_of(drafter)
        if plan is None:
            self._plan(session, state, (drafter,), load)
            plan = state.plan_of(drafter)
        if count < 1 or plan is None:
            return 0
        best = plan.worth[min(max(grade, 0), GRADES - 1)]
        if best > 0:
            state.patience.pop((drafter, grade), None)
            return min(count, best)
        if wish.drafter == drafter:
            return 1
        if plan.can_pay and state.is_due(drafter, grade):
            return min(count, _PROBE_TOKENS)
        state.offered(drafter, grade)
        self._was_plain(drafter)
        return 0

    def pays_ahead(self, session: int, drafter: str, grade: int, count: int) -> bool:
        """Whether a drafter should go on behind a draft of so many tokens that is being verified."""
        if drafter not in _AHEAD:
            return False
        grade = min(max(grade, 0), GRADES - 1)
        chances = self._acceptance.chances(session, drafter, grade, count + 1)
        return ahead_chance(prospects(chances)[count]) >= _AHEAD_CHANCE

    def pipe_depth(self, stages: int) -> int:
        """Frames in flight that keep the slowest stage busy: as many as it could take in one traversal."""
        fixed_s, row_s = self._ring.ring()
        stage_fixed_s, stage_row_s = self._ring.bottleneck()
        return depth_of_pipe(fixed_s + row_s, stage_fixed_s + stage_row_s, stages)

    def snapshot(self) -> Mapping[str, float]:
        """For metrics. Shares are of all rounds so far."""
        fixed_s, row_s = self._ring.ring()
        stage_fixed_s, stage_row_s = self._ring.bottleneck()
        total = sum(self._rounds.values())
        return {
            "ring_s": fixed_s + row_s,
            "ring_row_s": row_s,
            "bottleneck_s": stage_fixed_s + stage_row_s,
            "bottleneck_row_s": stage_row_s,
            **{f"acceptance_{name}": share for name, share in sorted(self._acceptance.overall().items())},
            **{f"share_{name}": count / total for name, count in sorted(self._rounds.items()) if total},
        }

    # What the driver tells

    def drafted(self, session: int, drafter: str, seconds: float, count: int) -> None:
        """Drafting `count` tokens took this long."""
        self._draft_times.observe(drafter, seconds, count)

    def verified(self, session: int, drafter: str, grade: int, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens that were sent, the first `accepted` held. Not for drafts whose assumption failed."""
        self._acceptance.observe(session, drafter, grade, drafted, accepted)
        self._sessions.setdefault(session, _RoutedSession()).offered(drafter, grade)

    def missed(self, session: int, drafter: str) -> None:
        """The drafter that was chosen had nothing to offer."""
        self.had_nothing(session, drafter)
        self._was_plain(drafter)

    def had_nothing(self, session: int, drafter: str) -> None:
        """The drafter had nothing to offer when it was asked beforehand."""
        self._sessions.setdefault(session, _RoutedSession()).offered(drafter, GRADES)

    def traversed(self, rows: int, seconds: float, stage_compute_s: Sequence[float]) -> None:
        """A frame of so many rows is back; each stage says how long it computed."""
        self._ring.observe(rows, seconds, stage_compute_s)

    def came(self, tokens: int, sessions: int, now_s: float) -> None:
        """So many tokens of answers came while so many sessions answered."""
        fixed_s, row_s = self._ring.ring()
        self._trials.came(tokens, sessions, fixed_s + row_s, now_s)

    def forget(self, session: int) -> None:
        self._sessions.pop(session, None)
        self._acceptance.forget(session)

    # How it decides

    def _may_draft(self, wish: Speculation, load: PipeLoad) -> bool:
        return wish.drafter != "auto" or self._trials.drafts(load.sessions)

    def _choose(
        self, session: int, state: _RoutedSession, available: Sequence[str], load: PipeLoad
    ) -> DraftPlan:
        wish = state.wish
        if wish.drafter == "off" or wish.tokens == 0:
            return _plain("not wanted")
        names = tuple(name for name in available if wish.drafter in ("auto", name))
        if not names:
            return _plain("no drafter" if wish.drafter == "auto" else f"no {wish.drafter} drafter here")
        if wish.drafter != "auto" and wish.tokens is not None and wish.frames is not None:
            return DraftPlan(names[0], wish.tokens, wish.frames, "as asked")
        if not self._may_draft(wish, load):
            return _plain("with so many sessions more came without drafts")
        if not self._ring.is_known:
            if wish.drafter == "auto":
                return _plain("nothing measured yet")
            return DraftPlan(names[0], wish.tokens or _FIRST_TOKENS, wish.frames or 1, "nothing measured yet")
        self._plan(session, state, names, load)
        plans = [plan for plan in state.plans if plan.drafter in names]
        best = max(plans, key=lambda plan: plan.rate)
        if wish.drafter != "auto":
            return DraftPlan(best.drafter, max(best.tokens, 1), best.frames, "the drafter that was asked for")
        return self._choose_freely(state, plans, best)

    def _choose_freely(
        self, state: _RoutedSession, plans: Sequence[_Prospectus], best: _Prospectus
    ) -> DraftPlan:
        gain = best.rate / state.plain_rate if state.plain_rate > 0.0 else 1.0
        if best.tokens and gain >= _MARGIN:
            return DraftPlan(best.drafter, best.tokens, best.frames, f"promises {gain:.2f} of plain")
        if not any(plan.can_pay or plan.is_too_slow for plan in plans):
            return _plain("others need the time")
        free = next((plan for plan in plans if plan.is_free and plan.can_pay), None)
        if free is not None:
            # Drafting costs nothing, and a rare good draft may be worth sending.
            tokens = max(_PROBE_TOKENS, *free.worth) if state.wish.tokens is None else state.wish.tokens
            return DraftPlan(free.drafter, tokens, 1, "only if the draft is good")
        for plan in plans:
            if state.is_try_due(plan):
                return DraftPlan(
                    plan.drafter, state.wish.tokens or _PROBE_TOKENS, 1, "to see whether it pays by now"
                )
        return _plain(f"promises only {gain:.2f} of plain")

    def _plan(self, session: int, state: _RoutedSession, names: tuple[str, ...], load: PipeLoad) -> None:
        """Work out what each drafter promises, unless that was done a few rounds ago for the same situation."""
        situation = (state.wish, load.sessions, load.stages, load.continues)
        planned = {plan.drafter for plan in state.plans}
        if state.planned_for == situation and state.rounds_left > 0 and planned.issuperset(names):
            state.rounds_left -= 1
            return
        names = tuple(sorted(planned.union(names)))
        costs = self._costs(load)
        state.plain_rate = plain_rate(costs)
        state.plans = tuple(
            self._survey(session, state, name, self._drafting_costs(costs, name)) for name in names
        )
        state.plans_made += 1
        state.planned_for = situation
        # At first every observation changes the picture; later few do.
        state.rounds_left = min(state.plans_made // 3, _ROUNDS_PER_PLAN)

    def _costs(self, load: PipeLoad) -> RoundCosts:
        fixed_s, row_s = self._ring.ring()
        sessions = max(1, load.sessions)
        circulating = max(1, min(sessions, self.pipe_depth(load.stages)))
        stage_fixed_s, stage_row_s = self._ring.bottleneck(sessions / circulating)
        return RoundCosts(
            fixed_s,
            row_s,
            stage_fixed_s,
            stage_row_s,
            0.0,
            sessions,
            circulating,
            load.frames_in_flight,
            load.continues,
        )

    def _drafting_costs(self, costs: RoundCosts, drafter: str) -> RoundCosts:
        draft_s = self._draft_times.per_token_s(drafter)
        return replace(costs, draft_s=draft_s, drafts_ahead=drafter in _AHEAD)

    def _survey(self, session: int, state: _RoutedSession, drafter: str, costs: RoundCosts) -> _Prospectus:
        wish = state.wish
        lengths = _TOKENS if wish.tokens is None else (wish.tokens,)
        is_free = costs.draft_s < _FREE_DRAFT_S
        by_grade = [
            prospects(self._acceptance.chances(session, drafter, grade, max(lengths) + 1))
            for grade in range(GRADES)
        ]
        # Once a draft is there, its drafting is paid for.
        sending = replace(costs, draft_s=0.0)
        least = plain_rate(costs) * _MARGIN
        worth = tuple(_best_length(sending, lengths, promised, least) for promised in by_grade)
        shares = state.offer_shares(drafter)
        tokens, frames, rate = 0, 1, plain_rate(costs)
        for length in lengths:
            sent = [min(length, worth[grade]) if is_free else length for grade in range(GRADES)]
            promised = mix([(shares[grade], by_grade[grade][sent[grade]]) for grade in range(GRADES)])
            for count in (1,) if drafter in _ONE_FRAME else _frame_counts(wish, promised):
                found = net_rate(costs, length, promised, count)
                if found > rate * (_MARGIN if count > frames else 1.0):
                    tokens, frames, rate = length, count, found
        if frames > 1:
            worth = tuple(_best_length(sending, lengths, promised, least, frames) for promised in by_grade)
        if wish.drafter == drafter and tokens == 0:
            tokens = min(lengths)
        can_pay = _can_pay(costs, lengths, least)
        prior_s = min(costs.draft_s, self._draft_times.prior_s(drafter))
        is_too_slow = not can_pay and _can_pay(replace(costs, draft_s=prior_s), lengths, least)
        return _Prospectus(drafter, is_free, tokens, wish.frames or frames, rate, worth, can_pay, is_too_slow)

    def _count_round(self, plan: DraftPlan) -> None:
        if plan.drafter is not None:
            self._trials.drafted()
        name = plan.drafter or "plain"
        self._rounds[name] = self._rounds.get(name, 0) + 1

    def _was_plain(self, drafter: str) -> None:
        """A round that was to be speculative turned out to be plain."""
        if self._rounds.get(drafter, 0) > 0:
            self._rounds[drafter] -= 1
            self._rounds["plain"] = self._rounds.get("plain", 0) + 1


def depth_of_pipe(ring_s: float, slowest_s: float, stages: int) -> int:
    """Frames that keep a stage of `slowest_s` busy, where one goes round in `ring_s`."""
    depth = round(_DEPTH_SHARE * ring_s / slowest_s) if slowest_s > 0.0 else stages
    return min(max(depth, stages, 1), _DEEPEST_PIPE)


def _plain(reason: str) -> DraftPlan:
    return DraftPlan(None, 0, 1, reason)


def _frame_counts(wish: Speculation, promised: Prospect) -> Sequence[int]:
    if wish.frames is not None:
        return (max(1, wish.frames),)
    return _FRAME_COUNTS if promised.whole > 0.3 else (1,)


def _best_length(
    costs: RoundCosts, lengths: Sequence[int], promised: Sequence[Prospect], least: float, frames: int = 1
) -> int:
    """The length that promises most, and at least `least`; 0: none does."""
    best, most = 0, least
    for length in lengths:
        rate = net_rate(costs, length, promised[length], frames)
        if rate > most:
            best, most = length, rate
    return best


def _can_pay(costs: RoundCosts, lengths: Sequence[int], least: float) -> bool:
    length = min(lengths, key=lambda length: abs(length - _PROBE_TOKENS))
    promised = prospects([_PROBE_ACCEPTANCE] * length)[-1]
    return net_rate(costs, length, promised) > least
