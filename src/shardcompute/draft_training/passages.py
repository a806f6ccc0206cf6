"""Reading matter of self-play: text that comes with Python, facts that are made up, and what the model itself wrote."""

from __future__ import annotations

import ast
import importlib
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from shardcompute.draft_training.words import LANDS, NAMES, PLACES, SURNAMES, THINGS, TOPICS, TRADES

_MODULES: Final = 40
_LARGEST_MODULE: Final = 120_000
_KEPT_ARTICLES: Final = 4096
_SHORT_PASSAGE: Final = 160
_FACTS: Final = (
    "{name} {surname} (born {year}) is a {trade} from {place}, {land}.",
    "{surname} moved to {place} in {year} and worked there as a {trade} for {n} years.",
    "{place} has a population of about {big} and lies {n} kilometers from the sea.",
    "The town is known for {topic} and for its {things}.",
    "In {year}, {name} {surname} founded a company that sells {things}; it had {n} employees at the end of that year.",
    "The film about {topic} was directed by {name} {surname} and released in {year}.",
    "It was the first time since {year} that {land} had won the competition.",
    "According to {surname}, interest in {topic} has doubled since {year}.",
    "The museum in {place}, which opened in {year}, shows more than {big} objects.",
    "A spokesman said that {n} people were hurt and that the road would be closed for {m} days.",
    "The song was written by {name} {surname} and reached number {m} in {land}.",
    "Critics said that the book about {topic} was too long, but it sold {big} copies.",
    "The season has {n} episodes and was first shown on {m} May {year}.",
    "Police in {place} are looking for a {trade} who was last seen near the station on Monday.",
    "The school was closed in {year} because there were only {n} pupils left.",
    "'{topic} matters to all of us,' said {name} {surname}, {n}, a {trade} who lives in {place}.",
    "Every year more than {big} people visit {place} to learn about {topic}.",
    "The river is {big} kilometers long and crosses {land}.",
    "{surname} was elected in {year} with {n} percent of the vote.",
    "Prices of {things} rose by {m} percent, while wages in {land} stayed the same.",
    "The experiment was repeated {n} times by scientists in {place}, always with the same result.",
    "{name} told reporters that the family had lost everything but hoped to return to {place} soon.",
)


class Passages:
    """Pieces of text to read. Articles that the model wrote are kept as tokens, the latest of them."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._prose, self._code = _read_library()
        self.articles: deque[tuple[int, ...]] = deque(maxlen=_KEPT_ARTICLES)

    def facts(self, sentences: int) -> str:
        """Sentences about people and places that there may never have been."""
        return " ".join(fill_facts(self._random.choice(_FACTS), self._random) for _ in range(sentences))

    def prose(self, characters: int) -> str:
        return self._cut(self._prose, characters)

    def code(self, characters: int) -> str:
        return self._cut(self._code, characters, "\n\n")

    def article(self) -> tuple[int, ...] | None:
        """One that the model wrote; None before it has."""
        try:
            return self._random.choice(self.articles)
        except (IndexError, RuntimeError):  # there is none yet, or another thread has just added one
            return None

    def _cut(self, pieces: Sequence[str], characters: int, between: str = "\n") -> str:
        if not pieces:
            return self.facts(max(1, characters // 90))
        at, text = self._random.randrange(len(pieces)), ""
        while len(text) < characters:
            text += pieces[at % len(pieces)] + between
            at += 1
        return text[: int(1.3 * characters)].strip()


def fill_facts(text: str, random: Random) -> str:
    return text.format(
        name=random.choice(NAMES),
        surname=random.choice(SURNAMES),
        place=random.choice(PLACES),
        land=random.choice(LANDS),
        trade=random.choice(TRADES),
        topic=random.choice(TOPICS),
        things=random.choice(THINGS),
        year=random.randint(1800, 2024),
        n=random.randint(11, 98),
        m=random.randint(2, 28),
        big=f"{random.randint(1, 900)},{random.randint(0, 999):03}",
    )


@cache
def _read_library() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pieces of prose and of code; the same in every run."""
    prose = [piece for text in _docs() for piece in _paragraphs(text)]
    code: list[str] = []
    for text in _sources():
        code += _functions(text)
        prose += _docstrings(text)
    return tuple(prose), tuple(code)


def _docs() -> Iterator[str]:
    """Python's own help texts and licence, where they are installed."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some systems install it apart
        topics = {}
    yield from topics.values()
    for name in ("LICENSE.txt", "../../LICENSE", "LICENSE"):
        path = Path(sysconfig.get_path("stdlib"), name)
        if path.is_file():
            yield path.read_text(errors="replace")


def _sources() -> Iterator[str]:
    """Some of the standard library's modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        [
            path
            for pattern in ("*.py", "asyncio/*.py", "email/*.py", "json/*.py")
            for path in folder.glob(pattern)
        ]
    )
    for path in files[:: max(1, len(files) // _MODULES)]:
        text = path.read_text(errors="replace")
        if len(text) <= _LARGEST_MODULE:
            yield text


def _paragraphs(text: str) -> list[str]:
    pieces = (" ".join(part.split()) for part in text.split("\n\n"))
    return [piece for piece in pieces if len(piece) >= _SHORT_PASSAGE]


def _functions(text: str) -> list[str]:
    pieces = ["def " + part for part in text.split("\ndef ")[1:]]
    return [piece[:3000] for piece in pieces if len(piece) >= _SHORT_PASSAGE]


def _docstrings(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return [" ".join(each.split()) for each in found if len(each) >= _SHORT_PASSAGE]
