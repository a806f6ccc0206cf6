"""Scripts of self-play: questions that the model makes up, questions and texts that it is given, and answers.

A model invents a question when it reads how a user's turn begins and goes on by itself; where that turn would end,
its own begins. Articles that it wrote are given to it again, to summarise or to answer from.
"""

from __future__ import annotations

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
    SUMMARY_ASKS,
    ask,
    fill,
)
from shardcompute.draft_training.words import TONGUES, tongue_text
from shardcompute.models.tokenizer import Tokenizer

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


class ScriptWriter:
    """Writes scripts for ever, of all kinds; `texts` are passages of tokens to be read as they are, first of all."""

    def __init__(
        self, tokenizer: Tokenizer, context_length: int, seed: int, *, texts: Sequence[Sequence[int]] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._random = Random(seed)
        self._context_length = context_length
        self._frames = _find_frames(tokenizer)
        self._passages = Passages(self._random)
        self._texts = list(texts)
        self._forms: dict[str, Callable[[], Script]] = {
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
            yield self.write(self._random.choices(self._kinds, self._shares)[0])

    def write(self, kind: str) -> Script:
        form = self._forms.get(kind)
        return self._asked(kind, ask(self._random, kind)) if form is None else form()

    def keep(self, dialogue: SelfPlayDialogue) -> None:
        """An article that the model has written will be given to it again."""
        if dialogue.kind == "article":
            said = dialogue.ids[dialogue.origins != GIVEN].tolist()
            words = [token for token in said if token not in self._tokenizer.special_ids]
            self._passages.articles.append(tuple(words))

    def _asked(self, kind: str, question: str) -> Script:
        limit = _ARTICLE_TOKENS if kind == "article" else None
        return self._script(kind, self._prompt(question), limit)

    def _invented(self) -> Script:
        frame = self._frame()
        stops = self._tokenizer.eos_ids | {frame.behind[0]}
        question = ChosenTokens(_QUESTION_TOKENS, frozenset(stops), temperature=1.0, top_p=0.95)
        turns = (GivenTokens(frame.before), question, GivenTokens(frame.behind), self._answer())
        return Script("invented", turns)

    def _followed(self) -> Script:
        """A question, an answer, and a second question."""
        kinds = [kind for kind in KINDS if kind not in HELD_OUT]
        question = ask(self._random, self._random.choice(kinds))
        frame, answer = self._frame(), self._answer()
        if frame.reply is None or frame.again is None:
            return self._asked("question", question)
        more = self._encode(fill(self._random.choice(FOLLOW_UPS), self._random))
        first = ChosenTokens(self._random.randint(*_FIRST_ANSWER_TOKENS), answer.stops, answer.temperature)
        turns = (
            GivenTokens((*frame.before, *self._encode(question), *frame.behind)),
            first,
            GivenTokens((*frame.reply, *more, *frame.again)),
            answer,
        )
        return Script("followed", turns)

    def _frame(self) -> _Frame:
        if len(self._frames) > 1 and self._random.random() < _OTHER_SYSTEMS:
            return self._random.choice(self._frames[1:])
        return self._frames[0]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)

    def _translation(self) -> Script:
        random = self._random
        tongue, text = tongue_text(random, random.randint(1, 3))
        if random.random() < 0.25:
            tongue = random.choice(TONGUES)
            text = f"Translate English to {tongue}: {self._passages.facts(random.randint(1, 2))}"
        else:
            form = random.choice(
                ("Translate {} to English: ", "Translate from {} into English: ", "What does this {} mean? ")
            )
            text = form.format(tongue) + text
        return self._script("translation", self._prompt(text))

    def _summary(self) -> Script:
        question = self._random.choice(SUMMARY_ASKS) + _MARKS[0]
        return self._script("summary", self._prompt(question, self._passage()))

    def _extraction(self) -> Script:
        question = self._random.choice(EXTRACTION_ASKS) + self._passages.facts(self._random.randint(2, 6))
        return self._script("extraction", self._prompt(question))

    def _code(self) -> Script:
        question = self._random.choice(CODE_ASKS) + self._passages.code(self._random.randint(200, 1400))
        return self._script("reading code", self._prompt(question))

    def _retrieval(self) -> Script:
        """Passages, and a question that one of them may answer."""
        random = self._random
        question, article = ask(random, "question"), self._passages.article()
        texts = [self._passages.facts(random.randint(2, 7)) for _ in range(random.randint(1, 4))]
        if article is not None and random.random() < 0.7:
            texts[random.randrange(len(texts))] = _MARKS[0]
        elif random.random() < 0.3:
            texts[0] = self._passages.prose(random.randint(300, 1500))
        form = random.choice(
            (
                "Answer the question from these passages.\n\n{}\n\nQuestion: {}",
                "{}\n\nAnswer the question: {}",
                "Context:\n{}\n\nUsing the context above, answer: {}",
                "Question: {1}\n\nDocuments:\n{0}\n\nAnswer:",
            )
        )
        given = "\n\n".join(texts)
        return self._script("retrieval", self._prompt(form.format(given, question), article))

    def _reading(self) -> Script:
        length = self._random.randint(200, self._context_length * 3)
        text = self._passages.prose(length) if self._random.random() < 0.6 else self._passages.code(length)
        return Script("reading", (GivenTokens(tuple(self._tokenizer.encode(text)[: self._context_length])),))

    def _continued(self) -> Script:
        """A text without a question, that the model goes on with."""
        random = self._random
        text = self._passages.facts(random.randint(1, 8))
        if random.random() < 0.4:
            text = self._passages.prose(random.randint(80, 1200))
        prompt = tuple(self._tokenizer.encode(text)[: self._context_length // 2])
        return self._script("continued", prompt[: max(4, len(prompt) - random.randint(0, 12))])

    def _passage(self) -> Sequence[int]:
        """An article of the model, or something else to read."""
        article, random = self._passages.article(), self._random
        if article is not None and random.random() < 0.6:
            return article
        if random.random() < 0.5:
            return self._encode(self._passages.facts(random.randint(4, 16)))
        return self._encode(self._passages.prose(random.randint(300, 2400)))

    def _prompt(self, question: str, marked: Sequence[int] | None = None) -> tuple[int, ...]:
        """Its tokens, with `marked` in place of the mark."""
        before, mark, behind = question.partition(_MARKS[0])
        ids = self._encode(before)
        if mark and marked is not None:
            ids += [*marked[: self._context_length // 2], *self._encode(behind)]
        # The end of a question says most of what is asked.
        ids = ids[-(self._context_length * 5 // 8) :]
        if not self._frames:
            return tuple(self._tokenizer.encode("") + ids)
        frame = self._frame()
        return (*frame.before, *ids, *frame.behind)

    def _script(self, kind: str, prompt: tuple[int, ...], limit: int | None = None) -> Script:
        return Script(kind, (GivenTokens(prompt), self._answer(limit)))

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
