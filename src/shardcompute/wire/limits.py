"""What a peer may ask of our memory, and whether a message keeps its own promises.

Everything here looks at numbers only, before anything of their size is allocated. The same checks run on what
we send, so that a mistake shows where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.core.errors import LinkError
from shardcompute.core.generation import MAX_GRAMMAR_BYTES
from shardcompute.core.pictures import MAX_PICTURE_BYTES
from shardcompute.wire.codecs import find_codec
from shardcompute.wire.control import TensorBytes
from shardcompute.wire.generations import Generate
from shardcompute.wire.messages import (
    ID_BYTES,
    MOST_SHARE_BYTES,
    SHARE_BYTES,
    CollectiveFrame,
    KvPiece,
    Message,
    SessionClose,
    SessionOpen,
    ShareProducts,
    ShareRows,
    StepFailed,
    StepFrame,
    StepResult,
    TrainingFrame,
)


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The most that one frame may hold. `max_ids` bounds token ids of prompts, biases and alternatives."""

    max_header_bytes: int = 8 << 20
    max_body_bytes: int = 256 << 20
    max_segments: int = 1024
    max_rows: int = 16384
    max_ids: int = 65536
    max_grammar_bytes: int = MAX_GRAMMAR_BYTES
    """Of one session, compressed."""
    max_picture_bytes: int = 2 * MAX_PICTURE_BYTES
    """Of the patches in one frame."""


HANDSHAKE_LIMITS = WireLimits(max_header_bytes=8192, max_body_bytes=0, max_segments=0, max_rows=0, max_ids=0)
"""For peers that have not introduced themselves."""


def check_sizes(header_bytes: int, body_bytes: int, limits: WireLimits) -> None:
    """Raises `LinkError` where a frame of these sizes is out of bounds."""
    _check_at_most("header", header_bytes, "bytes", limits.max_header_bytes)
    _check_at_most("body", body_bytes, "bytes", limits.max_body_bytes)
    if header_bytes == 0:
        raise LinkError("a frame came without a header", hint="the peer may not be a ShardCompute node")


def check_message(message: Message, body_bytes: int, limits: WireLimits) -> None:
    """Raises `LinkError` where the counts of a message are out of bounds or disagree with each other."""
    if isinstance(message, StepFrame):
        _check_frame(message, body_bytes, limits)
        return
    if isinstance(message, TensorBytes):
        if body_bytes != message.size:
            raise LinkError(f"{message.size} bytes of a tensor were announced and {body_bytes} came")
        return
    if isinstance(message, Generate):
        _check_at_most("request", body_bytes, "bytes of pictures", limits.max_picture_bytes)
        if body_bytes != sum(message.patch_sizes):
            raise LinkError(
                f"{sum(message.patch_sizes)} bytes of pictures were announced and {body_bytes} came"
            )
        return
    if isinstance(message, CollectiveFrame):
        if body_bytes != message.size:
            raise LinkError(f"{message.size} bytes of a collective were announced and {body_bytes} came")
        return
    if isinstance(message, KvPiece):
        _check_kv_rows(message, body_bytes, limits)
        return
    if isinstance(message, ShareRows | ShareProducts):
        _check_shares(message, body_bytes, limits)
        return
    if isinstance(message, TrainingFrame):
        if body_bytes != message.size:
            raise LinkError(f"{message.size} bytes of a fine-tuning run were announced and {body_bytes} came")
        return
    if body_bytes:
        raise LinkError(f"{type(message).__name__} has no body, but {body_bytes} bytes came with it")
    if isinstance(message, StepResult):
        _check_result(message, limits)
    elif isinstance(message, SessionClose | StepFailed):
        _check_at_most("message", len(message.sessions), "sessions", limits.max_ids)


def _check_frame(frame: StepFrame, body_bytes: int, limits: WireLimits) -> None:
    _check_at_most("frame", frame.rows, "rows", limits.max_rows)
    _check_at_most("frame", len(frame.segments), "segments", limits.max_segments)
    _check_at_most("frame", len(frame.opens), "new sessions", limits.max_segments)
    rows = 0
    for segment in frame.segments:
        rows += segment.count
        _check_at_most("segment", segment.head_draft_tokens, "tokens to draft", limits.max_rows)
        if segment.logit_rows > segment.count:
            raise LinkError(f"a segment of {segment.count} rows wants the logits of {segment.logit_rows}")
        if len(segment.ids) != ID_BYTES * segment.count:
            raise LinkError(f"a segment of {segment.count} rows has {len(segment.ids)} bytes of token ids")
        if segment.targets and len(segment.targets) != ID_BYTES * segment.logit_rows:
            raise LinkError(
                f"{segment.logit_rows} logit rows have {len(segment.targets)} bytes of target ids"
            )
    if rows != frame.rows:
        raise LinkError(f"a frame of {frame.rows} rows has segments of {rows}")
    for opened in frame.opens:
        _check_opening(opened, limits)
    patch_bytes = sum(picture.size_bytes for opened in frame.opens for picture in opened.pictures)
    _check_at_most("frame", patch_bytes, "bytes of pictures", 0 if frame.width else limits.max_picture_bytes)
    codec = find_codec(frame.codec) if frame.width else None
    can_be = codec.can_be(body_bytes, frame.rows, frame.width) if codec else body_bytes == patch_bytes
    if not can_be:
        expected = codec.body_bytes(frame.rows, frame.width) if codec else patch_bytes
        raise LinkError(
            f"a frame of {frame.rows} × {frame.width} activations in {frame.codec!r} "
            f"has a body of {body_bytes} bytes instead of {expected}"
        )


def _check_kv_rows(message: KvPiece, body_bytes: int, limits: WireLimits) -> None:
    if body_bytes != message.size:
        raise LinkError(f"{message.size} bytes of KV were announced and {body_bytes} came")
    if message.ids and len(message.ids) != ID_BYTES * message.count:
        raise LinkError(f"{message.count} rows of KV have {len(message.ids)} bytes of token ids")
    if message.opened is not None:
        _check_opening(message.opened, limits)


def _check_shares(message: ShareRows | ShareProducts, body_bytes: int, limits: WireLimits) -> None:
    _check_at_most("frame", message.rows, "rows", limits.max_rows)
    announced = SHARE_BYTES * message.rows * message.width
    _check_at_most("frame", announced, "bytes of shares", MOST_SHARE_BYTES)
    if body_bytes != announced:
        raise LinkError(f"{announced} bytes of shares were announced and {body_bytes} came")


def _check_opening(opened: SessionOpen, limits: WireLimits) -> None:
    _check_at_most("session", len(opened.logit_bias), "biases", limits.max_ids)
    _check_at_most("session", len(opened.grammar), "bytes of grammar", limits.max_grammar_bytes)


def _check_result(result: StepResult, limits: WireLimits) -> None:
    _check_at_most("result", len(result.rows), "rows", limits.max_rows)
    _check_at_most("result", len(result.prompt_rows), "prompt rows", limits.max_rows)
    _check_at_most("result", len(result.head_drafts), "sessions with drafts", limits.max_segments)
    drafted = sum(len(each.ids) for each in result.head_drafts)
    _check_at_most("result", drafted, "bytes of drafts", limits.max_rows * ID_BYTES)
    alternatives = sum(len(row.alternatives) for row in (*result.rows, *result.prompt_rows))
    _check_at_most("result", alternatives, "alternatives", limits.max_ids)


def _check_at_most(what: str, count: int, unit: str, limit: int) -> None:
    if count > limit:
        raise LinkError(
            f"a {what} of {count} {unit} is over the limit of {limit}",
            hint="run the same release with the same limits on every node",
        )
