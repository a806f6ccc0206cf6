"""Whether a worker may work, by what its owner allows and what the machine says; and for how long that has been so.

Reasons to rest count at once, but for a load that passes. Reasons to work must have held for a while, so that a plug
that wiggles moves no layers. What the system does not say keeps nobody from working.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

IDLE_AFTER_S = 300.0
"""So long nobody has typed or moved a mouse where a machine is idle."""
BUSY_LOAD = 0.25
"""Other programs that use more of the processors than this are somebody's work."""
BUSY_AFTER_S = 30.0
CALM_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkConditions:
    """When a worker may work, as its owner says."""

    only_when_idle: bool = False
    only_on_mains: bool = False
    not_metered: bool = False

    @property
    def has_any(self) -> bool:
        return self.only_when_idle or self.only_on_mains or self.not_metered


@dataclass(frozen=True, slots=True)
class Reading:
    """What the machine says now; None: it does not."""

    is_on_mains: bool | None = None
    is_metered: bool | None = None
    idle_s: float | None = None
    others_load: float | None = None


@dataclass(frozen=True, slots=True)
class WorkJudgement:
    """What follows from the readings so far: `reason` to rest, or "" where the worker may work."""

    reason: str = ""
    busy_since_s: float | None = None
    """Since when other programs have been busy."""
    fine_since_s: float | None = None
    """Since when nothing has spoken against work, while it rests."""

    def after(self, conditions: WorkConditions, reading: Reading, now_s: float) -> WorkJudgement:
        """The judgement with one reading more."""
        is_busy = conditions.only_when_idle and (reading.others_load or 0.0) > BUSY_LOAD
        busy_since_s = (now_s if self.busy_since_s is None else self.busy_since_s) if is_busy else None
        reason = _reason(conditions, reading)
        # A machine that rests goes on resting while it is busy; one that works is not disturbed by a moment of it.
        is_long = is_busy and busy_since_s is not None and now_s - busy_since_s >= BUSY_AFTER_S
        if not reason and is_busy and (is_long or self.reason):
            reason = "other programs are busy on this machine"
        judged = replace(self, busy_since_s=busy_since_s)
        if reason:
            return replace(judged, reason=reason, fine_since_s=None)
        if not self.reason:
            return judged
        fine_since_s = now_s if self.fine_since_s is None else self.fine_since_s
        if now_s - fine_since_s >= CALM_S:
            return WorkJudgement(busy_since_s=busy_since_s)
        return replace(judged, fine_since_s=fine_since_s)


def _reason(conditions: WorkConditions, reading: Reading) -> str:
    if conditions.only_on_mains and reading.is_on_mains is False:
        return "it runs on its battery"
    if conditions.not_metered and reading.is_metered:
        return "its link is metered"
    if conditions.only_when_idle and reading.idle_s is not None and reading.idle_s < IDLE_AFTER_S:
        return "somebody is using this machine"
    return ""


def unsaid(conditions: WorkConditions, reading: Reading) -> list[str]:
    """Options that can have no effect here, in words, because the system does not say what they ask about."""
    lines = []
    if conditions.only_on_mains and reading.is_on_mains is None:
        lines.append("--only-on-mains has no effect: this system does not say what powers it")
    if conditions.not_metered and reading.is_metered is None:
        lines.append("--not-metered has no effect: this system does not say whether its link is metered")
    if conditions.only_when_idle and reading.idle_s is None:
        lines.append(
            "--only-when-idle goes by other programs' load alone: this system does not say when it was last used"
        )
    return lines
