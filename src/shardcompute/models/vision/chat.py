"""Chat prompts with pictures: the template's marks become rows, and only those: text that looks like a mark has none.

A template writes a mark for each picture. Where somebody's words have the mark's text in them, that is set aside while
the template works, so that every mark in what it writes is its own; then it is text again. Which of the prompt's rows
are whose is known by their order, never by what they look like.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardcompute.core.errors import UsageError
from shardcompute.core.pictures import Picture, PictureSpan, check_spans, digest_of
from shardcompute.models.spec import PicturePrompt, VisionSpec
from shardcompute.models.vision.prepare import PreparedPicture

_MOST_DEPTH = 64


class ChatRenderer(Protocol):
    """As much of a tokenizer as prompts with pictures need."""

    @property
    def render_chat(self) -> Callable[..., str]: ...

    def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]: ...


def encode_with_pictures(
    codec: ChatRenderer,
    vision: VisionSpec,
    messages: Sequence[Mapping[str, Any]],
    prepared: Sequence[PreparedPicture],
    *,
    context_length: int | None = None,
    **options: Any,
) -> tuple[list[int], tuple[Picture, ...]]:
    """The prompt of messages that have a part `{"type": "image"}` for each picture, and the pictures at their rows.

    UsageError where the template has no place for them.
    """
    written, aside = vision.prompt, f"\ue000{secrets.token_hex(8)}\ue001"
    plain = _replaced([*messages], written.mark, aside)
    rendered = codec.render_chat(plain, **_replaced(options, written.mark, aside))
    texts = rendered.split(written.mark)
    if len(texts) != len(prepared) + 1:
        raise UsageError(
            f"the model's chat template has places for {len(texts) - 1} of {len(prepared)} images",
            hint="send images in messages of the user",
        )
    texts = [text.replace(aside, written.mark) for text in texts]
    whole = texts[0] + "".join(
        written.text(each.rows) + text for each, text in zip(prepared, texts[1:], strict=True)
    )
    ids = codec.encode_rendered(whole, context_length=context_length)
    return ids, _place(written, ids, texts, prepared)


def _place(
    written: PicturePrompt, ids: Sequence[int], texts: Sequence[str], prepared: Sequence[PreparedPicture]
) -> tuple[Picture, ...]:
    """Each picture's rows follow those that the text before it only looks like having."""
    rows = [position for position, token in enumerate(ids) if token == written.row_id]
    typed = [text.count(written.row) for text in texts]
    if len(rows) != sum(typed) + sum(each.rows for each in prepared):
        raise _unclear(written)
    placed, taken = list[Picture](), 0
    for each, before in zip(prepared, typed, strict=False):
        taken += before
        start = rows[taken]
        taken += each.rows
        if rows[taken - 1] != start + each.rows - 1:
            raise _unclear(written)
        span = PictureSpan(start, each.rows, each.grid)
        placed.append(Picture(span, each.patches, digest_of(each.grid, each.patches)))
    check_spans([picture.span for picture in placed], len(ids))
    return tuple(placed)


def _unclear(written: PicturePrompt) -> UsageError:
    return UsageError(
        f"the messages have {written.row!r} in them, so that it is unclear where images are",
        hint="leave that text out",
    )


def _replaced(value: Any, text: str, by: str, depth: int = 0) -> Any:
    """The value, however nested, with a text in all its strings replaced."""
    if isinstance(value, str):
        return value.replace(text, by)
    if depth > _MOST_DEPTH:
        raise UsageError("the messages are nested too deeply", hint="send simpler ones")
    if isinstance(value, Mapping):
        return {
            _replaced(key, text, by, depth + 1): _replaced(each, text, by, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(each, text, by, depth + 1) for each in value]
    return value
