"""Between what rooms compute with (`core.steps`) and what travels (`wire.messages`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace as dataclass_replace
from itertools import accumulate, pairwise

from msgspec.structs import replace

from shardcompute.core.errors import ShardComputeError, rebuild_error
from shardcompute.core.fields import shorten
from shardcompute.core.generation import TokenChoice
from shardcompute.core.pictures import PictureSpan, check_spans
from shardcompute.core.steps import PICKED, Draft, Frame, Opening, Picked, Prefix, SessionRows
from shardcompute.wire import (
    ID_BYTES,
    HeadDraftIds,
    PictureHeader,
    RowResult,
    SegmentHeader,
    SessionOpen,
    StageTiming,
    StepFailed,
    StepFrame,
    StepResult,
    open_session,
    pack_ids,
    unpack_ids,
)

_MOST_S = 86_400.0
_PICKED = pack_ids([PICKED])
REPLAY = 0
"""The number of frames that only tell a stage what it missed; drivers count theirs from 1."""


def step_frame(chain: str, epoch: int, frame: Frame) -> StepFrame:
    """A driver's frame for the first stage: token ids, and beside it `patches_of` the pictures of new sessions."""
    return StepFrame(
        chain=chain,
        epoch=epoch,
        sequence=frame.sequence,
        segments=[segment_of(part) for part in frame.work],
        rows=frame.rows,
        width=0,
        codec="",
        replay=frame.sequence == REPLAY,
        opens=[opened_of(opening) for opening in frame.openings],
    )


def patches_of(openings: Iterable[Opening]) -> list[memoryview]:
    """The body of a frame with these openings, as their headers announce it."""
    return [memoryview(patches) for opening in openings for patches in opening.patches if patches]


def work_of(segment: SegmentHeader) -> SessionRows:
    return SessionRows(
        segment.session,
        segment.start,
        _rows_ids(segment.ids),
        segment.logit_rows,
        tuple(unpack_ids(segment.targets).tolist()) if segment.targets else (),
        segment.head_draft_tokens,
    )


def opened_of(opening: Opening) -> SessionOpen:
    opened = open_session(opening.session, opening.sampling, opening.prompt_length, opening.prompt_logprobs)
    if opening.adapter:
        opened = replace(opened, adapter=opening.adapter)
    if opening.receipt_nonce:
        opened = replace(opened, receipt_nonce=opening.receipt_nonce)
    if opening.spans:
        opened = replace(opened, pictures=_headers(opening))
    prefix = opening.prefix
    if prefix is None:
        return opened
    return replace(opened, prefix_source=prefix.source, prefix_length=prefix.length, is_moved=prefix.is_moved)


def _headers(opening: Opening) -> list[PictureHeader]:
    sizes = [len(patches) for patches in opening.patches] or [0] * len(opening.spans)
    return [
        PictureHeader(span.start, span.count, *span.grid, size)
        for span, size in zip(opening.spans, sizes, strict=True)
    ]


def without_patches(opened: SessionOpen) -> SessionOpen:
    """As stages behind the first are told of a session."""
    if not opened.pictures:
        return opened
    return replace(opened, pictures=[replace(picture, size_bytes=0) for picture in opened.pictures])


def openings_of(frame: StepFrame, body: memoryview) -> list[Opening]:
    """The openings of a frame, with the patches in its body where that has none but them. UsageError for pictures that
    cannot be in a prompt."""
    openings, end = [], 0
    for opened in frame.opens:
        opening = opening_of(opened)
        if opened.pictures:
            check_spans(opening.spans, opened.prompt_length)
        if opened.pictures and not frame.width:
            edges = list(accumulate((picture.size_bytes for picture in opened.pictures), initial=end))
            patches = tuple(bytes(body[start:stop]) for start, stop in pairwise(edges))
            opening, end = dataclass_replace(opening, patches=patches), edges[-1]
        openings.append(opening)
    return openings


def rows_to_compute(frame: StepFrame) -> int:
    """Rows of a frame, and patches that its stage looks at before: each takes about as long as a row."""
    shown = (picture for opened in frame.opens for picture in opened.pictures if picture.size_bytes)
    return frame.rows + sum(picture.frames * picture.rows * picture.columns for picture in shown)


def opening_of(opened: SessionOpen) -> Opening:
    prefix = Prefix(opened.prefix_source, opened.prefix_length, opened.is_moved)
    return Opening(
        opened.session,
        opened.sampling(),
        opened.prompt_length,
        opened.prompt_logprobs or 0,
        prefix if opened.prefix_length else None,
        opened.adapter,
        tuple(
            PictureSpan(each.start, each.count, (each.frames, each.rows, each.columns))
            for each in opened.pictures
        ),
        receipt_nonce=opened.receipt_nonce,
    )


def result_row(picked: Picked) -> RowResult:
    choice = picked.choice
    return RowResult(
        picked.session,
        picked.position + 1,
        choice.id,
        choice.logprob,
        list(choice.alternatives),
        choice.hidden,
    )


def step_result(
    frame: StepFrame, out: Sequence[Picked], drafts: Sequence[Draft], timings: list[StageTiming]
) -> StepResult:
    """What the last stage tells the driver of a frame."""
    rows = [(result_row(picked), picked.is_scored) for picked in out]
    return StepResult(
        frame.chain,
        frame.epoch,
        frame.sequence,
        [row for row, is_scored in rows if not is_scored],
        [row for row, is_scored in rows if is_scored],
        timings,
        [HeadDraftIds(each.session, each.start, pack_ids(each.ids), each.grade) for each in drafts],
    )


def step_failed(frame: StepFrame, error: Exception) -> StepFailed:
    sessions = [segment.session for segment in frame.segments]
    said = shorten(str(error))
    return StepFailed(frame.chain, frame.epoch, frame.sequence, sessions, type(error).__name__, said)


def picked_of(result: StepResult) -> list[Picked]:
    scored = [_picked(row, is_scored=True) for row in result.prompt_rows]
    return scored + [_picked(row, is_scored=False) for row in result.rows]


def timings_of(timings: Sequence[StageTiming], nodes: Collection[str]) -> list[StageTiming]:
    """What the stages of a chain say of a step, as far as it can be: of these nodes, once each, in numbers that are
    some. The last stage hands on all of it, and may lie."""
    heard: dict[str, StageTiming] = {}
    for each in timings:
        times = (each.queue_s, each.compute_s, each.codec_s, each.draft_s, each.exchange_s)
        if each.node in nodes and all(-_MOST_S < seconds < _MOST_S for seconds in times):
            heard.setdefault(each.node, each)
    return list(heard.values())


def head_drafts_of(result: StepResult) -> list[Draft]:
    return [
        Draft(each.session, each.start, tuple(unpack_ids(each.ids).tolist()), each.grade)
        for each in result.head_drafts
    ]


def error_of(failed: StepFailed) -> ShardComputeError:
    """The error that a stage met, as the same kind of error here."""
    return rebuild_error(failed.code, shorten(failed.message))


def segment_of(part: SessionRows) -> SegmentHeader:
    ids = part.ids
    return SegmentHeader(
        part.session,
        part.start,
        len(ids),
        part.logit_rows,
        # Most rows come alone, and numpy takes longer to begin than this takes.
        ids[0].to_bytes(ID_BYTES, "little", signed=True) if len(ids) == 1 else pack_ids(ids),
        pack_ids(part.targets) if part.targets else b"",
        part.head_draft_tokens,
    )


def _rows_ids(packed: bytes) -> tuple[int, ...]:
    if len(packed) == ID_BYTES:
        only = int.from_bytes(packed, "little", signed=True)
        if only >= PICKED:
            return (only,)
    if packed.startswith(_PICKED):
        return (PICKED, *unpack_ids(packed[len(_PICKED) :]).tolist())
    return tuple(unpack_ids(packed).tolist())


def _picked(row: RowResult, *, is_scored: bool) -> Picked:
    choice = TokenChoice(row.token, row.logprob, tuple(row.alternatives), row.hidden)
    return Picked(row.session, row.position - 1, choice, is_scored)
