"""What a round of speculation is worth: tokens per second for a session, less what its rows take from the others.

Pure arithmetic. A plain round commits one token in a traversal of the ring. With drafts, rows are verified along:
each costs a little time in every stage, and where other sessions keep the slowest stage busy, that time is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_FRAMES = 8
_IDLE, _BUSY = 0.5, 0.9
"""Below the one share of the slowest stage's time, others lose nothing by our rows; from the other on, all of it."""


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What the rows of a session cost now."""

    fixed_s: float
    """A traversal's time without rows, and what each row adds to it."""
    row_s: float
    stage_fixed_s: float
    """The same of the slowest stage."""
    stage_row_s: float
    draft_s: float
    """Drafting one token."""
    sessions: int
    circulating: int
    """Frames that go round with plain decoding."""
    frames_in_flight: int = 0
    continues: bool = False
    """The chain goes on with plain decoding by itself, so that a plain round costs the stage's time alone. A draft
    has to wait for the driver: where others continue meanwhile, for their next step."""
    drafts_ahead: bool = False
    """The drafter goes on while a frame travels: where all of it holds, and the token behind it, the next draft is
    there."""

    sharing: float = field(init=False)
    """Sessions in one frame."""
    plain_s: float = field(init=False)
    """A round of plain decoding."""
    pressure: float = field(init=False)
    """0 to 1: how much of the slowest stage's time that our rows take is taken from others."""

    def __post_init__(self) -> None:
        # Asked for with every length and number of frames that is weighed, so worked out once.
        object.__setattr__(self, "sharing", self.sessions / self.circulating)
        plain_s = self.stage_s(self.sharing) if self.continues else self.loop_s(0.0)
        object.__setattr__(self, "plain_s", max(plain_s, 1e-9))
        object.__setattr__(self, "pressure", self._find_pressure())

    def stage_s(self, rows: float) -> float:
        return self.stage_fixed_s + self.stage_row_s * rows

    def loop_s(self, extra_rows: float) -> float:
        """From sending a frame with so many drafted rows until its results are back, with the others around."""
        idle = self.fixed_s + self.row_s * (self.sharing + extra_rows)
        if self.continues and self.sessions > 1:
            idle = max(idle, self.stage_s(self.sharing) + self.stage_s(self.sharing + extra_rows))
        return max(idle, self.circulating * self.stage_s(self.sharing) + self.stage_row_s * extra_rows)

    def _find_pressure(self) -> float:
        if self.sessions < 2:
            return 0.0
        around = max(self.circulating, self.frames_in_flight)
        busy = around * self.stage_s(self.sharing) / max(self.fixed_s + self.row_s * self.sharing, 1e-9)
        return min(1.0, max(0.0, (busy - _IDLE) / (_BUSY - _IDLE)))


@dataclass(frozen=True, slots=True)
class Prospect:
    """What drafts of one length promise, on average."""

    rows: float
    accepted: float
    whole: float
    """The chance that all of it holds."""
    onward: float
    """The chance that a token holds which is drafted after that, all before it being right."""
    offered: float = 1.0
    """The chance that there is a draft at all."""


def prospects(chances: Sequence[float]) -> tuple[Prospect, ...]:
    """For drafts of 0, 1, 2 … tokens, from the chance of each position given those before. The last one is that of
    all positions beyond."""
    found = [Prospect(0.0, 0.0, 1.0, chances[0])]
    for index in range(len(chances)):
        last = found[-1]
        whole = last.whole * chances[index]
        onward = chances[min(index + 1, len(chances) - 1)]
        found.append(Prospect(last.rows + 1.0, last.accepted + whole, whole, onward))
    return tuple(found)


def mix(parts: Sequence[tuple[float, Prospect]]) -> Prospect:
    """Prospects that come with these shares. A draft of no tokens cannot be followed by another frame."""
    sent = [(share, part) for share, part in parts if part.rows > 0.0]
    whole = sum(share * part.whole for share, part in sent)
    return Prospect(
        sum(share * part.rows for share, part in sent),
        sum(share * part.accepted for share, part in sent),
        whole,
        sum(share * part.whole * part.onward for share, part in sent) / whole if whole > 0.0 else 0.0,
        sum(share for share, _ in sent),
    )


def plain_rate(costs: RoundCosts) -> float:
    return 1.0 / costs.plain_s


def ahead_chance(prospect: Prospect) -> float:
    """The chance that what is drafted while such a draft travels is of use."""
    return prospect.whole * prospect.offered * prospect.onward


def net_rate(costs: RoundCosts, tokens: int, prospect: Prospect, frames: int = 1) -> float:
    """Tokens per second of a session that sends such drafts, less the tokens that the others lose by it.

    `tokens` are drafted (and their drafting is paid for); `prospect.rows` of them are sent.
    """
    draft_s = costs.draft_s * tokens
    loop_s = costs.loop_s(prospect.rows)
    if frames == 1:
        # Drafts of all sessions are made one after the other.
        waited_s = draft_s * (1.0 - ahead_chance(prospect)) if costs.drafts_ahead else draft_s
        round_s = max(loop_s + waited_s, costs.sessions * draft_s, 1e-9)
        rate = (1.0 + prospect.accepted) / round_s
    else:
        round_s, rate = _pipelined(costs, prospect, frames, loop_s, draft_s)
    return rate - _others_loss(costs, prospect.rows, frames) / round_s if costs.sessions > 1 else rate


def _pipelined(
    costs: RoundCosts, prospect: Prospect, frames: int, loop_s: float, draft_s: float
) -> tuple[float, float]:
    """(seconds of a round, tokens per second) with several frames under way, each assuming the ones before it.

    Frames come back one after the other until one is not wholly accepted; then all that follow are void and the
    ring fills anew. How many hold until then is geometric. A frame that follows another has no known row, and its
    first token is judged with the frame before it.
    """
    onward = min(prospect.onward, 0.999)
    later_whole = prospect.offered * onward**prospect.rows
    later_accepted = prospect.offered * onward * (1.0 - onward**prospect.rows) / (1.0 - onward)
    accepted = prospect.accepted + prospect.whole * later_accepted / (1.0 - later_whole)
    apart_s = max(draft_s, costs.stage_s(prospect.rows))
    turn_s = max(loop_s - costs.row_s, frames * apart_s)
    followed = prospect.whole * prospect.offered * onward
    turns = followed * later_whole ** (frames - 1) / (1.0 - later_whole**frames)
    rest = followed / (1.0 - later_whole) - frames * turns
    # Where frames come faster than the slowest stage takes them, a new start waits behind what is void.
    behind_s = max(0.0, frames * costs.stage_s(prospect.rows) - loop_s)
    seconds = draft_s + behind_s + loop_s + turns * turn_s + rest * apart_s
    return turn_s, (1.0 + accepted) / max(seconds, 1e-9)


def _others_loss(costs: RoundCosts, rows: float, frames: int) -> float:
    """Tokens that the other sessions lose in one round of ours: those in our frame wait for our rows, and all of
    them for the slowest stage where it is busy."""
    pressure = costs.pressure
    stage_s = rows * costs.stage_row_s + (frames - 1) * costs.stage_s(rows)
    in_stage = pressure * (costs.sessions - 1) * stage_s
    in_frame = (1.0 - pressure) * max(costs.sharing - 1.0, 0.0) * rows * costs.row_s
    return (in_stage + in_frame) / costs.plain_s
