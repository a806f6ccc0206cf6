"""Prompts with pictures: a template's marks become rows, and nobody's words do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.models.vision.chat import encode_with_pictures
from shardcompute.models.vision.prepare import PreparedPicture
from support.pictures import EYES, ROW_ID

ROW = EYES.prompt.row


class Letters:
    """A token for each character; a template that writes marks and texts as they come."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> str:
        texts = [f"{tools};"] if tools else []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            texts += [EYES.prompt.mark if part["type"] == "image" else part["text"] for part in parts]
        return "".join(texts)

    def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]:
        return [ROW_ID if letter == ROW else ord(letter) for letter in rendered]


def prepared(rows: int, shade: int = 0) -> PreparedPicture:
    return PreparedPicture((1, rows, 1), rows, bytes([shade]) * rows * EYES.patch_bytes)


def message(*parts: str | None) -> dict[str, Any]:
    """None stands for an image."""
    return {
        "role": "user",
        "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
    }


def text_of(ids: Sequence[int]) -> str:
    return "".join("#" if token == ROW_ID else chr(token) for token in ids)


def test_pictures_stand_where_their_parts_do() -> None:
    ids, pictures = encode_with_pictures(
        Letters(), EYES, [message("a", None, "b"), message(None)], [prepared(2, 1), prepared(3, 2)]
    )
    assert text_of(ids) == "a[##]b[###]"
    assert [(each.span.start, each.span.count, each.span.grid) for each in pictures] == [
        (2, 2, (1, 2, 1)),
        (7, 3, (1, 3, 1)),
    ]
    assert [each.patches[0] for each in pictures] == [1, 2]
    assert pictures[0].digest != pictures[1].digest


def test_equal_pictures_have_equal_digests_wherever_they_lie() -> None:
    _, (one, other) = encode_with_pictures(
        Letters(), EYES, [message(None, "x", None)], [prepared(2), prepared(2)]
    )
    assert one.digest == other.digest


@pytest.mark.parametrize("typed", ["<image>", ROW, f"<image>{ROW}", ROW * 5, "[" + ROW * 2 + "]"])
@pytest.mark.parametrize("is_before", [True, False])
def test_words_that_look_like_pictures_have_no_rows_of_one(typed: str, is_before: bool) -> None:
    parts = (f"{typed}.", None) if is_before else (None, f".{typed}")
    ids, (picture,) = encode_with_pictures(Letters(), EYES, [message(*parts)], [prepared(2)])
    assert text_of(ids).replace("#", ROW) == (
        f"{typed}.[{ROW}{ROW}]" if is_before else f"[{ROW}{ROW}].{typed}"
    )
    assert picture.span.start == (len(typed) + 2 if is_before else 1)


def test_marks_in_tools_and_nested_values_are_words_too() -> None:
    told = [message(None), {"role": "assistant", "content": "<image>", "calls": [{"<image>": ["<image>"]}]}]
    ids, (picture,) = encode_with_pictures(Letters(), EYES, told, [prepared(2)], tools="<image>")
    assert text_of(ids) == "<image>;[##]<image>"
    assert picture.span.start == 9


def test_a_template_without_places_is_refused() -> None:
    class Blind(Letters):
        def render_chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> str:
            return "words"

    with pytest.raises(UsageError, match="places for 0 of 1"):
        encode_with_pictures(Blind(), EYES, [message(None)], [prepared(2)])


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    class Merging(Letters):
        """Makes one token of two rows, as no tokenizer should."""

        def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]:
            return super().encode_rendered(rendered.replace(ROW + ROW, ROW))

    with pytest.raises(UsageError, match="unclear"):
        encode_with_pictures(Merging(), EYES, [message(None)], [prepared(4)])


def test_a_deep_value_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UsageError, match="nested"):
        encode_with_pictures(Letters(), EYES, [{"role": "user", "content": "x", "extra": deep}], [])


def test_the_text_around_rows_is_the_familys() -> None:
    eyes = replace(EYES, prompt=replace(EYES.prompt, before="<start>", after="<end>"))
    ids, (picture,) = encode_with_pictures(Letters(), eyes, [message("see ", None)], [prepared(1)])
    assert text_of(ids) == "see <start>#<end>"
    assert picture.span.start == 11
