"""Training files: JSON lines, each a chat, an instruction or plain text, checked before anything is taught.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}
    {"text": "…"}

or, where preferences are learned, a prompt with a better and a worse answer:

    {"prompt": "…", "chosen": "…", "rejected": "…"}

A line is read up to a bound, so that a file that is no such thing costs no memory. Whatever is wrong is a UsageError
with the number of its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shardcompute.core.errors import UsageError
from shardcompute.core.units import format_bytes

MAX_LINE_BYTES = 4 << 20
MAX_FILE_BYTES = 4 << 30
"""All examples are held in memory, as tokens."""
ROLES = ("system", "user", "assistant", "tool")
_MARKS = (b"\xff\xfe", b"\xfe\xff")
_FORMS = 'use {"messages": […]}, {"prompt": "…", "completion": "…"} or {"text": "…"}'
_PREFERENCE_FORM = 'use {"prompt": "…", "chosen": "…", "rejected": "…"}'
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A conversation; what the assistant says in it is learned."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """A prompt and the answer that is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class TextRecord:
    """Text of which every token is learned."""

    text: str


@dataclass(frozen=True, slots=True)
class PreferenceRecord:
    """A prompt with the answer that is to become more likely than the other."""

    prompt: str
    chosen: str
    rejected: str


Record = ChatRecord | InstructionRecord | TextRecord | PreferenceRecord


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file's records with the numbers of their lines, and the SHA-256 of its bytes."""

    path: Path
    records: tuple[tuple[int, Record], ...]
    sha256: str


def read_dataset(path: Path, *, has_preferences: bool = False) -> Dataset:
    """All of a training file, checked: examples, or preferences alone."""
    parse = _parse_preference if has_preferences else _parse_example
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UsageError(
                f"{path} has {format_bytes(size)}, more than the {format_bytes(MAX_FILE_BYTES)} that are read",
                hint="cut it into several files and teach one after the other",
            )
        digest = hashlib.sha256()
        with path.open("rb") as file:
            records = tuple(
                (number, parse(path, number, _parse_line(path, number, line)))
                for number, line in _lines(path, file, digest)
            )
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", hint="name a file of JSON lines"
        ) from error
    if not records:
        raise UsageError(f"{path} has no examples", hint=_PREFERENCE_FORM if has_preferences else _FORMS)
    return Dataset(path, records, digest.hexdigest())


def _lines(path: Path, file: IO[bytes], digest: Any) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(
                f"line {number} of {path} is longer than {format_bytes(MAX_LINE_BYTES)}",
                hint="a line is one example as JSON; cut long texts into several",
            )
        digest.update(line)
        if number == 1 and line.startswith(_MARKS):
            raise UsageError(f"{path} is UTF-16", hint="save it as UTF-8")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _wrong(
            path, number, f"is not UTF-8 at its byte {error.start + 1}", "save the whole file as UTF-8"
        ) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, f"is not JSON: {error}", "write one JSON object on each line") from error
    if not isinstance(value, dict):
        raise _wrong(path, number, "is no JSON object", _FORMS)
    return value


def _parse_preference(path: Path, number: int, value: Mapping[str, Any]) -> PreferenceRecord:
    for key in ("prompt", "chosen", "rejected"):
        _check_text(path, number, value.get(key), key, _PREFERENCE_FORM)
    if value["chosen"] == value["rejected"]:
        raise _wrong(
            path, number, "has the same answer twice", "there is nothing to prefer; leave the line out"
        )
    return PreferenceRecord(value["prompt"], value["chosen"], value["rejected"])


def _parse_example(path: Path, number: int, value: Mapping[str, Any]) -> Record:
    if "chosen" in value or "rejected" in value:
        raise _wrong(
            path, number, "has a chosen and a rejected answer", "learn from preferences with --loss dpo"
        )
    if "messages" in value:
        return ChatRecord(_messages(path, number, value["messages"]))
    if "prompt" in value or "completion" in value:
        for key in ("prompt", "completion"):
            _check_text(path, number, value.get(key), key)
        return InstructionRecord(value["prompt"], value["completion"])
    if "text" in value:
        _check_text(path, number, value["text"], "text")
        return TextRecord(value["text"])
    keys = ", ".join(sorted(map(str, value)))[:_SHOWN]
    raise _wrong(path, number, f"has none of the keys that are read, but {keys or 'no keys'}", _FORMS)


def _messages(path: Path, number: int, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(path, number, 'has "messages" that are no list', _FORMS)
    for place, message in enumerate(value, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise _wrong(
                path,
                number,
                f"has the role {str(role)[:_SHOWN]!r} in message {place}",
                f"roles are {', '.join(ROLES)}",
            )
        if role == "system" and place > 1:
            raise _wrong(path, number, f"has a system message as message {place}", "put it first")
        if role == "assistant" and message.get("tool_calls"):
            continue
        _check_text(path, number, message.get("content"), f"content of message {place}")
    if not any(message["role"] == "assistant" for message in value):
        raise _wrong(path, number, "has no message of the assistant", "there is nothing to learn without one")
    return tuple(value)


def _check_text(path: Path, number: int, value: Any, what: str, forms: str = _FORMS) -> None:
    if not isinstance(value, str):
        raise _wrong(path, number, f"has no text as its {what}", forms)
    if not value.strip():
        raise _wrong(path, number, f"has an empty {what}", "leave the line out, or say what belongs there")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(
            path,
            number,
            f"has half a character in its {what}",
            "surrogates stand for a character in pairs only",
        ) from error


def _wrong(path: Path, number: int, what: str, hint: str) -> UsageError:
    return UsageError(f"line {number} of {path} {what}", hint=hint)
