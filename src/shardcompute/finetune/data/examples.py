"""Examples: records as tokens, with those marked that are learned.

A conversation is written by the model's own chat template. Only what the assistant says is learned, up to and including
the token that ends its turn. Templates that write earlier turns differently later on (some drop the thoughts of all
turns but the last) make several examples of one conversation, each ending with a turn as it was written then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.dataset import (
    ChatRecord,
    Dataset,
    InstructionRecord,
    PreferenceRecord,
    Record,
    TextRecord,
)

LEAST_TOKENS = 2
"""There has to be one to learn and one before it."""


class ChatTokenizer(Protocol):
    """What examples need of `models.tokenizer.Tokenizer`."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def encode_rendered(self, rendered: str) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each whether it is learned (from those before it)."""

    ids: NDArray[np.int32]
    is_learned: NDArray[np.bool_]

    @property
    def learned(self) -> int:
        return int(self.is_learned[1:].sum())

    @property
    def units(self) -> int:
        """How much of a step's loss it is: tokens."""
        return self.learned

    @property
    def sequences(self) -> tuple[Example, ...]:
        return (self,)

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example

    @property
    def learned(self) -> int:
        return self.chosen.learned + self.rejected.learned

    @property
    def units(self) -> int:
        """How much of a step's loss it is: one pair."""
        return 1

    @property
    def sequences(self) -> tuple[Example, ...]:
        return (self.chosen, self.rejected)

    @property
    def tokens(self) -> int:
        return self.chosen.tokens + self.rejected.tokens


TrainingUnit = Example | PreferencePair


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """What came of a dataset: `shortened` were cut at the longest length, `dropped` had nothing left to learn."""

    examples: tuple[TrainingUnit, ...]
    shortened: int
    dropped: int

    @property
    def tokens(self) -> int:
        return sum(example.tokens for example in self.examples)

    @property
    def learned(self) -> int:
        return sum(example.learned for example in self.examples)


def make_examples(dataset: Dataset, tokenizer: ChatTokenizer, longest: int) -> ExampleSet:
    """The examples of a dataset, of at most `longest` tokens each: text goes on in the next, answers are cut."""
    kept: list[TrainingUnit] = []
    shortened = dropped = 0
    for number, record in dataset.records:
        try:
            made = _encode(record, tokenizer)
        except UsageError as error:
            raise UsageError(f"line {number} of {dataset.path}: {error.message}", hint=error.hint) from error
        if isinstance(record, PreferenceRecord):
            cut = [_cut(each, longest, is_text=False)[0] for each in made]
            shortened += any(len(each.ids) > longest for each in made)
            if all(each.learned for each in cut):
                kept.append(PreferencePair(*cut))
            else:
                dropped += 1
            continue
        for example in made:
            pieces = _cut(example, longest, is_text=isinstance(record, TextRecord))
            shortened += isinstance(record, ChatRecord | InstructionRecord) and len(example.ids) > longest
            useful = [piece for piece in pieces if piece.learned]
            dropped += len(pieces) - len(useful)
            kept.extend(useful)
    if not kept:
        raise UsageError(
            f"nothing is left to learn of {dataset.path}: its answers begin after {longest} tokens",
            hint="raise --max-length, or shorten the prompts",
        )
    return ExampleSet(tuple(kept), shortened, dropped)


def _cut(example: Example, longest: int, *, is_text: bool) -> list[Example]:
    count = len(example.ids)
    # A piece begins with the last token of the one before, so that every token is learned once.
    starts = range(0, max(1, count - 1), longest - 1) if is_text else range(1)
    return [
        Example(example.ids[start : start + longest], example.is_learned[start : start + longest])
        for start in starts
        if count - start >= LEAST_TOKENS
    ]


def _encode(record: Record, tokenizer: ChatTokenizer) -> list[Example]:
    if isinstance(record, TextRecord):
        ids = _with_end(tokenizer.encode(record.text), tokenizer)
        return [_example(ids, [(1, len(ids))])]
    if isinstance(record, PreferenceRecord):
        answers = (record.chosen, record.rejected)
        return [_encode(InstructionRecord(record.prompt, answer), tokenizer)[0] for answer in answers]
    if isinstance(record, InstructionRecord):
        if not tokenizer.has_chat_template:
            before = tokenizer.encode(record.prompt)
            ids = _with_end(tokenizer.encode(record.prompt + record.completion), tokenizer)
            return [_example(ids, [(_common(before, ids), len(ids))])]
        messages: Sequence[Mapping[str, Any]] = (
            {"role": "user", "content": record.prompt},
            {"role": "assistant", "content": record.completion},
        )
    else:
        messages = record.messages
    return _encode_chat(messages, tokenizer)


def _encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: ChatTokenizer) -> list[Example]:
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    last = turns[-1] + 1
    whole = tokenizer.render_chat(messages[:last], add_generation_prompt=False)
    spoken = []
    for turn in turns:
        before = tokenizer.render_chat(messages[:turn], add_generation_prompt=True) if turn else ""
        until = tokenizer.render_chat(messages[: turn + 1], add_generation_prompt=False)
        if not until.startswith(before):
            raise UsageError(
                "the model's chat template writes an answer otherwise than it asks for one",
                hint='write the conversation out yourself, as {"text": …}',
            )
        spoken.append((before, until))
    if all(whole.startswith(until) for _, until in spoken):
        ids = tokenizer.encode_rendered(whole)
        return [_example(ids, [_span(ids, before, until, tokenizer) for before, until in spoken])]
    made = []
    for before, until in spoken:
        ids = tokenizer.encode_rendered(until)
        made.append(_example(ids, [_span(ids, before, until, tokenizer)]))
    return made


def _span(ids: Sequence[int], before: str, until: str, tokenizer: ChatTokenizer) -> tuple[int, int]:
    """Where the turn that leads from one text to the other lies in the tokens."""
    start = _common(tokenizer.encode_rendered(before), ids) if before else 0
    stop = _common(tokenizer.encode_rendered(until), ids)
    ends = [place for place in range(start, stop) if ids[place] in tokenizer.eos_ids]
    # What a template writes behind the end of a turn is never asked of the model.
    return start, ends[-1] + 1 if ends else stop


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with: a token may reach over a border of text."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count


def _with_end(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    if not tokenizer.eos_ids or (ids and ids[-1] in tokenizer.eos_ids):
        return ids
    return [*ids, min(tokenizer.eos_ids)]


def _example(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Example:
    marks = np.zeros(len(ids), dtype=np.bool_)
    for start, stop in spans:
        marks[start:stop] = True
    return Example(np.asarray(ids, dtype=np.int32), marks)
