"""Workload of `bench soak`: a fixed round of kinds, with texts and lengths that the request's number settles."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    PLAIN = "plain"
    SHARED = "shared beginning"
    LONG = "long prompt"
    SCHEMA = "JSON schema"
    SEVERAL = "several answers"
    CANCELLED = "cancelled"


ROUND = (
    Kind.PLAIN,
    Kind.SHARED,
    Kind.CANCELLED,
    Kind.PLAIN,
    Kind.SCHEMA,
    Kind.SHARED,
    Kind.LONG,
    Kind.PLAIN,
    Kind.SEVERAL,
    Kind.CANCELLED,
)
"""Kinds in the order in which they come, again and again."""
_ANSWERS = 3
_FIELDS = ("title", "summary", "answer", "place")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. The client hangs up after `leave_after` pieces of text; 0: it stays to the end."""

    kind: Kind
    body: Mapping[str, Any]
    answers: int = 1
    leave_after: int = 0


@dataclass(frozen=True, slots=True)
class RequestMix:
    """`system` stands before the questions of the shared kind; long prompts have about `long_chars` characters."""

    texts: Sequence[str]
    system: str
    long_chars: int
    most_tokens: int

    def ask(self, number: int) -> Ask:
        """The same for the same number, whoever asks."""
        chance = random.Random(number)
        kind = ROUND[number % len(ROUND)]
        question = chance.choice(self.texts)[: self.long_chars]
        tokens = chance.randint(max(1, self.most_tokens // 8), self.most_tokens)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": chance.choice((0.0, 0.7)),
            "seed": number,
            "stream": True,
        }
        if kind is Kind.SHARED:
            body["messages"].insert(0, {"role": "system", "content": self.system})
        elif kind is Kind.LONG:
            body["messages"] = [{"role": "user", "content": self._long_text(number, chance)}]
        elif kind is Kind.SCHEMA:
            body["response_format"] = _schema(chance.choice(_FIELDS))
        elif kind is Kind.SEVERAL:
            return Ask(kind, body | {"n": _ANSWERS, "temperature": 0.7}, answers=_ANSWERS)
        elif kind is Kind.CANCELLED:
            # Sometimes before anything has come but the first piece, sometimes in mid-sentence.
            body |= {"max_tokens": self.most_tokens, "ignore_eos": True}
            return Ask(kind, body, leave_after=chance.randint(1, max(1, self.most_tokens // 2)))
        return Ask(kind, body)

    def filler(self, number: int) -> Ask:
        """A long prompt whose answer does not matter."""
        text = self._long_text(number, random.Random(number))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": True}
        return Ask(Kind.LONG, body)

    def _long_text(self, number: int, chance: random.Random) -> str:
        """Texts one after another from anywhere in the list; the number in front keeps it from being remembered."""
        start = chance.randrange(len(self.texts))
        text = f"Letter {number}."
        while len(text) < self.long_chars:
            text = f"{text}\n{self.texts[start % len(self.texts)]}"
            start += 1
        return text[: self.long_chars]


def is_of_schema(text: str) -> bool:
    """Whether a whole answer to a request of the kind SCHEMA is what was asked for."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and len(found) == 2 and isinstance(found.get("sure"), bool)


def _schema(field: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {field: {"type": "string", "maxLength": 60}, "sure": {"type": "boolean"}},
        "required": [field, "sure"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": field, "schema": schema}}
