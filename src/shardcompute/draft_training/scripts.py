"""Scripts of self-play: questions that the model makes up, questions that it is given, and answers.

A model invents a question when it reads how a user's turn begins and goes on by itself; where that turn would end,
its own begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from shardcompute.core.errors import UsageError
from shardcompute.draft_training.dialogue import ChosenTokens, GivenTokens, Script
from shardcompute.draft_training.questions import FOLLOW_UPS, ask, fill
from shardcompute.models.tokenizer import Tokenizer

_MARK = "⁂QZXJ⁂"
_QUESTION_TOKENS = 96
_ANSWER_TOKENS = (256, 384)
_FIRST_ANSWER_TOKENS = 96
_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
_FOLLOWED = 0.2


def write_scripts(tokenizer: Tokenizer, context_length: int, seed: int) -> Iterator[Script]:
    """For ever, half of them with questions of the model's own where it has a chat template that shows how."""
    random = Random(seed)
    writer = _Writer(tokenizer, random, context_length)
    while True:
        yield writer.invented()
        yield writer.followed() if random.random() < _FOLLOWED else writer.asked()


class _Writer:
    def __init__(self, tokenizer: Tokenizer, random: Random, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._longest = context_length // 2
        self._frame = _find_frame(tokenizer)

    def asked(self) -> Script:
        return (GivenTokens(self._prompt(ask(self._random))), self._answer())

    def invented(self) -> Script:
        if self._frame is None:
            return self.asked()
        before, behind = self._frame
        stops = self._tokenizer.eos_ids | {behind[0]}
        question = ChosenTokens(_QUESTION_TOKENS, frozenset(stops), temperature=1.0, top_p=0.95)
        return (GivenTokens(before), question, GivenTokens(behind), self._answer())

    def followed(self) -> Script:
        """A question, an answer, and a second question."""
        question, more = ask(self._random), fill(self._random.choice(FOLLOW_UPS), self._random)
        if self._frame is None:
            return self.asked()
        turns = [("user", question), ("assistant", _MARK), ("user", more)]
        parts = _split(self._tokenizer, turns)
        if parts is None:
            return self.asked()
        answer = self._answer()
        first = ChosenTokens(_FIRST_ANSWER_TOKENS, answer.stops, answer.temperature)
        return (GivenTokens(self._prompt(question)), first, GivenTokens(parts[1]), answer)

    def _prompt(self, question: str) -> tuple[int, ...]:
        if self._tokenizer.has_chat_template:
            ids = self._tokenizer.encode_chat([{"role": "user", "content": question}])
        else:
            ids = self._tokenizer.encode(question)
        return tuple(ids[-self._longest :])

    def _answer(self) -> ChosenTokens:
        limit = self._random.randint(*_ANSWER_TOKENS)
        return ChosenTokens(limit, self._tokenizer.eos_ids, self._random.choice(_TEMPERATURES))


def _find_frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What comes before a user's words and what behind them; None where that cannot be told."""
    if not tokenizer.has_chat_template:
        return None
    parts = _split(tokenizer, [("user", _MARK)])
    return parts if parts is not None and all(parts) else None


def _split(
    tokenizer: Tokenizer, turns: list[tuple[str, str]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The tokens before and behind the mark in these turns."""
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.render_chat(messages)
    except UsageError:  # a template may refuse turns that others take
        return None
    before, mark, behind = text.partition(_MARK)
    if not mark or _MARK in behind:
        return None
    ids = tokenizer.encode(before, add_special=False)
    start = tokenizer.encode_chat(messages)[:1]
    if start != ids[:1] and start == [tokenizer.bos_id]:
        ids = start + ids
    return tuple(ids), tuple(tokenizer.encode(behind, add_special=False))
