"""What a driver keeps of a generation beside the scheduler's session: its text, who hears of it, and its times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import Delta, Timings
from shardcompute.node.driver.answer import AnswerText
from shardcompute.node.driver.flights import Journey
from shardcompute.node.driver.session import Session
from shardcompute.node.driver.speculator import DraftStats

Emit = Callable[[Delta | ShardComputeError], None]


@dataclass(slots=True)
class Generation:
    """What the driver keeps beside the scheduler's session."""

    session: Session
    answer: AnswerText
    emit: Emit
    submitted_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    is_cancelled: bool = False
    """Nobody wants to hear of it any more."""
    journey: Journey = field(default_factory=Journey)

    def timings(self, course: DraftStats, now: float) -> Timings:
        """How its time was spent, now that it is over."""
        return Timings(
            queue_s=self.started_s - self.submitted_s,
            prefill_s=self.first_token_s - self.started_s,
            decode_s=now - self.first_token_s,
            prompt_tokens=self.session.prompt_length,
            generated_tokens=self.answer.count,
            cached_tokens=self.session.reused,
            traversals=self.journey.traversals,
            drafted_tokens=course.drafted,
            accepted_tokens=course.accepted,
            traversal=self.journey.mean(course.draft_s),
        )
