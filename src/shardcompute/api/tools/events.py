"""Tool call parsing events: what an answer turns out to be while it is read, text and calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The model calls a tool."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of the latest call's arguments."""

    text: str


Event: TypeAlias = AnswerText | ReasoningText | CallStarted | CallArguments


class CallReader(ABC):
    """A streaming parser: reads one answer in one format, piece by piece."""

    def __init__(self) -> None:
        self._held = ""
        """Text that may yet turn out to be something else."""
        self.is_mid_call = False
        """Once it has finished: whether it did so within a call."""
        self.thought_chars = 0
        """So many characters of the answer, marks included, were thinking."""

    @property
    def is_plain(self) -> bool:
        """Whether what comes from here on is text for the user as it is."""
        return False

    def push(self, text: str) -> list[Event]:
        """What is certain by now."""
        self._held += text
        events: list[Event] = []
        while self._held and self._advance(events):
            pass
        return merged(events)

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The answer is over: what was held back. Of an answer that was cut short, the beginning of a call is nothing:
        it is not meant for anybody's eyes."""

    @abstractmethod
    def _advance(self, events: list[Event]) -> bool:
        """One step; False when more text is needed."""


def merged(events: Iterable[Event]) -> list[Event]:
    """The same, with neighbours of a kind put together and empty ones left out."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, AnswerText) and isinstance(last, AnswerText):
            out[-1] = AnswerText(last.text + event.text)
        elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
            out[-1] = ReasoningText(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            out[-1] = CallArguments(last.text + event.text)
        elif isinstance(event, CallStarted) or event.text:
            out.append(event)
    return out


def before_partial(text: str, mark: str) -> str:
    """`text` without the beginning of a `mark` at its end; a single character may be anything."""
    certain = len(text)
    for start in range(max(0, len(text) - len(mark) + 1), len(text) - 1):
        if mark.startswith(text[start:]):
            certain = start
            break
    return text[:certain].rstrip() if certain < len(text) else text


def split_before(text: str, mark: str) -> int:
    """How much of `text` is certain not to belong to a `mark` that is still arriving, or to the space before it."""
    cut = len(text)
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            cut = start
            break
    return len(text[:cut].rstrip())
