"""Scripts of self-play: questions that the model makes up, questions and texts that it is given, and answers.

A model invents a question when it reads how a user's turn begins and goes on by itself; where that turn would end,
its own begins. Articles that it wrote are given to it again, to summarise or to answer from.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from shardcompute.core.errors import UsageError
from shardcompute.draft_training.dialogue import GIVEN, ChosenTokens, GivenTokens, Script, SelfPlayDialogue
from shardcompute.draft_training.passages import Passages
from shardcompute.draft_training.questions import (
    CODE_ASKS,
    EXTRACTION_ASKS,
    FOLLOW_UPS,
    HELD_OUT,
    KINDS,
    RETRIEVAL_ASKS,
    SUMMARY_ASKS,
    TRANSLATION_ASKS,
    ask,
    fill,
)
from shardcompute.draft_training.words import TONGUES, tongue_text
from shardcompute.models.tokenizer import Tokenizer

_Piece = str | tuple[int, ...]
_MARKS = ("⁂QZXJ⁂", "⁂XJZQ⁂", "⁂JQXZ⁂")
_SYSTEMS = (
    None,
    "You are a helpful assistant.",
    "You are a careful expert. Answer precisely, and say so where you do not know.",
    "Answer in short sentences.",
)
_OTHER_SYSTEMS = 0.12
"""How often a script has other instructions than the model's own."""
_QUESTION_TOKENS = 96
_ANSWER_TOKENS = (160, 384)
_FIRST_ANSWER_TOKENS = (64, 160)
_ARTICLE_TOKENS = 448
_TEMPERATURES = (0.0, 0.0, 0.0, 0.8)
_WRITTEN_AHEAD = 4096
_WRITTEN_AT_ONCE = 64
_FRAMED_KINDS = ("invented", "followed")
_SHARES = {
    "invented": 14,
    "question": 9,
    "instruction": 8,
    "article": 5,
    "story": 4,
    "code": 7,
    "maths": 11,
    "role": 3,
    "reasoning": 4,
    "riddle": 0.7,
    "rewriting": 0.7,
    "translation": 10,
    "summary": 9,
    "retrieval": 9,
    "extraction": 5,
    "reading code": 2,
    "followed": 8,
    "continued": 3,
    "reading": 1,
}


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a chat template puts around a user's words, and around those of a second turn where it takes one: `reply`
    comes behind the first answer, `again` behind the second question."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    reply: tuple[int, ...] | None = None
    again: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Outline:
    """A script before its texts are encoded: what is given is in pieces, of text or of tokens."""

    kind: str
    turns: tuple[tuple[_Piece, ...] | ChosenTokens, ...]


class ScriptWriter:
    """Writes scripts for ever, of all kinds; `texts` are passages of tokens to be read as they are, first of all."""

    def __init__(
        self, tokenizer: Tokenizer, context_length: int, seed: int, *, texts: Sequence[Sequence[int]] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._random = Random(seed)
        self._context_length = context_length
        self._frames = _find_frames(tokenizer)
        self._start = tuple(tokenizer.encode(""))
        self._passages = Passages(self._random)
        self._texts = list(texts)
        self._forms: dict[str, Callable[[], _Outline]] = {
            "invented": self._invented,
            "followed": self._followed,
            "translation": self._translation,
            "summary": self._summary,
            "retrieval": self._retrieval,
            "extraction": self._extraction,
            "reading code": self._code,
            "continued": self._continued,
            "reading": self._reading,
        }
        kinds = [kind for kind in _SHARES if self._frames or kind not in _FRAMED_KINDS]
        self._kinds, self._shares = kinds, [_SHARES[kind] for kind in kinds]

    def __iter__(self) -> Iterator[Script]:
        while self._texts:
            yield Script("text", (GivenTokens(tuple(self._texts.pop())),))
        while True:
            yield from self.write(self._random.choices(self._kinds, self._shares, k=_WRITTEN_AT_ONCE))

    def write(self, kinds: Sequence[str]) -> list[Script]:
        """One of each of these kinds."""
        outlines = [self._outline(kind) for kind in kinds]
        given = [turn for outline in outlines for turn in outline.turns if isinstance(turn, tuple)]
        # All at once: a thread that writes beside others would have to wait for its turn behind every text.
        texts = [piece for turn in given for piece in turn if isinstance(piece, str)]
        encoded = iter(self._tokenizer.encode_all(texts))

        def finished(turn: tuple[_Piece, ...]) -> GivenTokens:
            pieces: list[Sequence[int]] = [
                next(encoded) if isinstance(piece, str) else piece for piece in turn
            ]
            return GivenTokens(_shortened(pieces, self._context_length * 5 // 8))

        return [
            Script(
                outline.kind,
                tuple(finished(turn) if isinstance(turn, tuple) else turn for turn in outline.turns),
            )
            for outline in outlines
        ]

    def keep(self, dialogue: SelfPlayDialogue) -> None:
        """An article that the model has written will be given to it again."""
        if dialogue.kind == "article":
            said = dialogue.ids[dialogue.origins != GIVEN].tolist()
            words = [token for token in said if token not in self._tokenizer.special_ids]
            self._passages.articles.append(tuple(words))

    def _outline(self, kind: str) -> _Outline:
        form = self._forms.get(kind)
        return self._asked(kind, ask(self._random, kind)) if form is None else form()

    def _asked(self, kind: str, *question: _Piece) -> _Outline:
        limit = _ARTICLE_TOKENS if kind == "article" else None
        if not self._frames:
            return _Outline(kind, ((self._start, *question), self._answer(limit)))
        frame = self._frame()
        return _Outline(kind, ((frame.before, *question, frame.behind), self._answer(limit)))

    def _invented(self) -> _Outline:
        frame = self._frame()
        stops = self._tokenizer.eos_ids | {frame.behind[0]}
        question = ChosenTokens(_QUESTION_TOKENS, frozenset(stops), temperature=1.0, top_p=0.95)
        return _Outline("invented", ((frame.before,), question, (frame.behind,), self._answer()))

    def _followed(self) -> _Outline:
        """A question, an answer, and a second question."""
        kinds = [kind for kind in KINDS if kind not in HELD_OUT]
        question = ask(self._random, self._random.choice(kinds))
        frame, answer = self._frame(), self._answer()
        if frame.reply is None or frame.again is None:
            return self._asked("question", question)
        more = fill(self._random.choice(FOLLOW_UPS), self._random)
        first = ChosenTokens(self._random.randint(*_FIRST_ANSWER_TOKENS), answer.stops, answer.temperature)
        given = (frame.before, question, frame.behind)
        return _Outline("followed", (given, first, (frame.reply, more, frame.again), answer))

    def _translation(self) -> _Outline:
        random = self._random
        tongue, text = tongue_text(random, random.randint(1, 3))
        if random.random() < 0.25:
            facts = self._passages.facts(random.randint(1, 2))
            return self._asked("translation", f"Translate English to {random.choice(TONGUES)}: {facts}")
        return self._asked("translation", random.choice(TRANSLATION_ASKS).format(tongue) + text)

    def _summary(self) -> _Outline:
        return self._asked("summary", self._random.choice(SUMMARY_ASKS), self._passage())

    def _extraction(self) -> _Outline:
        facts = self._passages.facts(self._random.randint(2, 6))
        return self._asked("extraction", self._random.choice(EXTRACTION_ASKS) + facts)

    def _code(self) -> _Outline:
        code = self._passages.code(self._random.randint(200, 1400))
        return self._asked("reading code", self._random.choice(CODE_ASKS) + code)

    def _retrieval(self) -> _Outline:
        """Passages, and a question that one of them may answer."""
        random = self._random
        question = ask(random, "question")
        texts: list[_Piece] = [
            self._passages.facts(random.randint(2, 7)) for _ in range(random.randint(0, 3))
        ]
        texts.insert(random.randint(0, len(texts)), self._passage())
        passages = [piece for text in texts for piece in (text, "\n\n")]
        before, between = random.choice(RETRIEVAL_ASKS)
        if before.endswith("Question: "):
            return self._asked("retrieval", before, question, between, *passages, "Answer:")
        return self._asked("retrieval", before, *passages, between, question)

    def _continued(self) -> _Outline:
        """A text without a question, that the model goes on with."""
        random = self._random
        text = self._passages.facts(random.randint(1, 8))
        if random.random() < 0.4:
            text = self._passages.prose(random.randint(80, 1200))
        cut = text[: max(8, len(text) - random.randint(0, 40))]
        return _Outline("continued", ((self._start, cut), self._answer()))

    def _reading(self) -> _Outline:
        length = self._random.randint(200, self._context_length * 3)
        text = self._passages.prose(length) if self._random.random() < 0.6 else self._passages.code(length)
        return _Outline("reading", ((self._start, text),))

    def _passage(self) -> _Piece:
        """An article of the model, or something else to read."""
        article, random = self._passages.article(), self._random
        if article is not None and random.random() < 0.6:
            return article
        if random.random() < 0.5:
            return self._passages.facts(random.randint(4, 16))
        return self._passages.prose(random.randint(300, 2400))

    def _frame(self) -> _Frame:
        if len(self._frames) > 1 and self._random.random() < _OTHER_SYSTEMS:
            return self._random.choice(self._frames[1:])
        return self._frames[0]

    def _answer(self, limit: int | None = None) -> ChosenTokens:
        limit = limit or self._random.randint(*_ANSWER_TOKENS)
        return ChosenTokens(limit, self._tokenizer.eos_ids, self._random.choice(_TEMPERATURES))


class ScriptsAhead:
    """Scripts written by a thread, some thousands ahead: who asks for the next need not wait for a tokenizer."""

    def __init__(self, writer: ScriptWriter) -> None:
        self._written: queue.Queue[Script | BaseException] = queue.Queue(_WRITTEN_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._write, args=(writer,), name="write scripts", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Script]:
        return self

    def __next__(self) -> Script:
        script = self._written.get()
        if isinstance(script, BaseException):
            raise script
        return script

    def close(self) -> None:
        self._is_closed.set()
        while self._thread.is_alive():
            try:
                self._written.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def _write(self, writer: ScriptWriter) -> None:
        try:
            for script in writer:
                self._written.put(script)
                if self._is_closed.is_set():
                    return
        except BaseException as error:  # said where the next script is asked for
            self._written.put(error)


def _shortened(pieces: list[Sequence[int]], most: int) -> tuple[int, ...]:
    """All of them, but for the ends of the longest where there are too many."""
    most_each, excess = max(map(len, pieces)), sum(map(len, pieces)) - most
    while excess > 0 and most_each > 1:
        most_each = max(1, most_each - -(-excess // len(pieces)))
        excess = sum(min(len(piece), most_each) for piece in pieces) - most
    return tuple(itertools.chain.from_iterable(piece[:most_each] for piece in pieces))


def _find_frames(tokenizer: Tokenizer) -> list[_Frame]:
    """With the model's own instructions first of all, and with others; none where a template cannot be seen through."""
    if not tokenizer.has_chat_template:
        return []
    found = [_find_frame(tokenizer, system) for system in _SYSTEMS]
    return [frame for frame in found if frame is not None]


def _find_frame(tokenizer: Tokenizer, system: str | None) -> _Frame | None:
    first = [] if system is None else [("system", system)]
    asked = _split(tokenizer, [*first, ("user", _MARKS[0])])
    if asked is None or not all(asked):
        return None
    turns = [("user", _MARKS[0]), ("assistant", _MARKS[1]), ("user", _MARKS[2])]
    followed = _split(tokenizer, [*first, *turns])
    return _Frame(*asked, *(followed[2:] if followed is not None and len(followed) == 4 else (None, None)))


def _split(tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> list[tuple[int, ...]] | None:
    """The tokens before, between and behind the marks in these turns."""
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.render_chat(messages)
    except UsageError:  # a template may refuse turns that others take
        return None
    parts: list[str] = []
    for mark in (mark for mark in _MARKS if any(mark in content for _, content in turns)):
        before, found, text = text.partition(mark)
        if not found:
            return None
        parts.append(before)
    parts.append(text)
    split = [tokenizer.encode(part, add_special=False) for part in parts]
    start = tokenizer.encode_chat(messages)[:1]
    if start != split[0][:1] and start == [tokenizer.bos_id]:
        split[0] = start + split[0]
    return [tuple(part) for part in split]
