"""Between what rooms compute with (`core.steps`) and what travels (`wire.messages`)."""

from __future__ import annotations

from shardcompute.core import errors
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.generation import TokenChoice
from shardcompute.core.steps import Opening, Picked, Work
from shardcompute.node.scheduler import Frame
from shardcompute.wire import (
    RowResult,
    SegmentHeader,
    SessionOpen,
    StepFailed,
    StepFrame,
    StepResult,
    open_session,
    pack_ids,
    unpack_ids,
)


def step_frame(chain: str, epoch: int, frame: Frame) -> StepFrame:
    """A driver's frame for the first stage: token ids alone."""
    return StepFrame(
        chain=chain,
        epoch=epoch,
        sequence=frame.sequence,
        segments=[segment_of(part) for part in frame.work],
        rows=frame.rows,
        width=0,
        codec="",
        opens=[opened_of(opening) for opening in frame.openings],
    )


def replay_frame(chain: str, epoch: int, work: Work, opening: Opening | None) -> StepFrame:
    """Tokens that a new first stage computes for their KV alone."""
    return StepFrame(
        chain=chain,
        epoch=epoch,
        sequence=0,
        segments=[segment_of(work)],
        rows=len(work.ids),
        width=0,
        codec="",
        replay=True,
        opens=[] if opening is None else [opened_of(opening)],
    )


def work_of(segment: SegmentHeader) -> Work:
    return Work(
        segment.session,
        segment.start,
        tuple(int(token) for token in unpack_ids(segment.ids)),
        segment.wanted,
        tuple(int(token) for token in unpack_ids(segment.targets)),
    )


def opened_of(opening: Opening) -> SessionOpen:
    return open_session(opening.session, opening.sampling, opening.prompt_length, opening.prompt_logprobs)


def opening_of(opened: SessionOpen) -> Opening:
    return Opening(opened.session, opened.sampling(), opened.prompt_length, opened.prompt_logprobs or 0)


def result_row(picked: Picked) -> RowResult:
    choice = picked.choice
    return RowResult(
        picked.session, picked.position + 1, choice.id, choice.logprob, list(choice.alternatives)
    )


def picked_of(result: StepResult) -> list[Picked]:
    scored = [_picked(row, is_scored=True) for row in result.prompt_rows]
    return scored + [_picked(row, is_scored=False) for row in result.rows]


def error_of(failed: StepFailed) -> ShardComputeError:
    """The error that a stage met, as the same kind of error here."""
    kind = getattr(errors, failed.code, ShardComputeError)
    is_ours = isinstance(kind, type) and issubclass(kind, ShardComputeError)
    return kind(failed.message) if is_ours else ShardComputeError(failed.message)


def segment_of(part: Work) -> SegmentHeader:
    return SegmentHeader(
        part.session, part.start, len(part.ids), part.wanted, pack_ids(part.ids), pack_ids(part.targets)
    )


def _picked(row: RowResult, *, is_scored: bool) -> Picked:
    choice = TokenChoice(row.token, row.logprob, tuple(row.alternatives))
    return Picked(row.session, row.position - 1, choice, is_scored)
