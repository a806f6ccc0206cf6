"""Tool call formats: how one family of models writes calls down."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcompute.api.tools.events import CallReader
from shardcompute.decoding import check_rule, json_rule
from shardcompute.models.vocabulary import Vocabulary

_LETTERS = string.ascii_letters + string.digits
_DESCRIBING = (
    *(
        "properties",
        "additionalProperties",
        "patternProperties",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "enum",
        "const",
    ),
)
"""One of these says what an object holds."""
MOST_CALLS = 16
"""A weak model would call for ever."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    is_strict: bool = False
    """Arguments must follow the schema exactly: what cannot be enforced is refused rather than ignored."""

    @property
    def size(self) -> int:
        """Of its description, in characters of JSON."""
        return len(self.name) + len(self.description) + len(json.dumps(self.parameters))

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Marks:
    """The marks of a format, as text or, where the vocabulary has them so, as special tokens."""

    def __init__(self, vocabulary: Vocabulary, texts: Sequence[str]) -> None:
        by_bytes = {vocabulary.tokens[token]: token for token in vocabulary.special_ids - vocabulary.eos_ids}
        found = {text: by_bytes.get(text.encode()) for text in texts}
        self._ids = {text: token for text, token in found.items() if token is not None}

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that must appear in the answer's text for the format to be read."""
        return frozenset(self._ids.values())

    def is_token(self, text: str) -> bool:
        return text in self._ids

    def term(self, text: str) -> str:
        """The mark in a Lark rule."""
        return f"<[{self._ids[text]}]>" if text in self._ids else quoted(text)


class CallFormat(ABC):
    """How one family of models writes calls. Formats have no state: they are shared by all answers."""

    marks: tuple[str, ...]
    """Texts that may be special tokens."""
    has_own_template = True
    """Whether the model's chat template tells it of its tools; otherwise we do."""
    most_calls = MOST_CALLS
    """In one answer, where a grammar counts them."""

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """A reader of one answer of a model that knows these tools."""

    @abstractmethod
    def calls(self, tools: Sequence[Tool], marks: Marks, most: int) -> str:
        """Lark rules by which `calls` stands for one to `most` calls."""

    @abstractmethod
    def text_then_calls(self, marks: Marks, most: int) -> str | None:
        """Besides those rules, some by which `answer` stands for free text or calls; None where that cannot be."""

    def holds_text(self, tool: Tool) -> bool:
        """Whether the format can hold texts among the arguments to what their schema says of them."""
        return True

    def new_id(self) -> str:
        """The name of one call."""
        return f"call_{random_letters(24)}"

    def call_id(self, name: str, number: int) -> str | None:
        """What the model's template must call the conversation's call of this number, whatever its name was; None where
        it takes names as they are."""
        return None

    def text_rule(self, marks: Marks, rule: str) -> str:
        """The right side of a Lark rule for an answer that is no call, of text that follows another."""
        return rule

    def known_id(self, call_id: str) -> str:
        """A name that somebody else gave a call, as the model's template takes it."""
        return call_id


def arguments_rule(tool: Tool) -> str:
    """The right side of a Lark rule for a tool's arguments: an object of its schema, `{}` where that names nothing.

    Words of the schema that no grammar can follow are left to the model, unless the tool is strict.
    """
    schema = {**tool.parameters, "type": "object"}
    if not any(key in schema for key in _DESCRIBING):
        schema["properties"] = {}
    return json_rule(schema, is_lenient=not tool.is_strict)


def check_arguments(tool: Tool) -> bool:
    """Whether the whole schema of a tool can be enforced; UsageError where nothing of it can."""
    return check_rule(arguments_rule(tool))


def object_rules(tools: Sequence[Tool], arguments_key: str) -> str:
    """Lark rules by which `call` stands for `{"name": …, "<arguments_key>": …}`."""
    lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{arguments_key}": '
        lines.append(f'call_{index}: {quoted(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: {arguments_rule(tool)}")
    return "\n".join(lines)


def listed_rules(mark: str, tools: Sequence[Tool], most: int, end: str = "") -> str:
    """Lark rules by which `calls` stands for the mark, a list of one to `most` calls as objects, and the end."""
    more = f'(", " call){{0,{most - 1}}}' if most > 1 else ""
    listed = f'calls: {mark} listed {end}\nlisted: "[" call {more} "]"'
    return f"{listed}\n{object_rules(tools, 'arguments')}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def random_letters(count: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(count))
