"""Bounded fields: types that messages between nodes share, with the most that a peer may say in one.

A message that says more cannot be read, and ends its link: texts are shortened by whoever sends them (`shorten`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

MOST_NAME = 512
MOST_TEXT = 2000
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=MOST_NAME)]
"""Of a node, a chain, a model, a tensor, a codec, a kind of error."""
Text: TypeAlias = Annotated[str, Meta(max_length=MOST_TEXT)]
"""For people."""


def shorten(text: str, most: int = MOST_TEXT) -> str:
    """`text`, or its beginning, as one line without anything that a terminal or a log would obey."""
    line = "".join(each if each.isprintable() else " " for each in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"
