"""Prompts of `run`: which of its arguments is the model, and what text is the prompt."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import BinaryIO, TextIO

from shardcompute.core.errors import UsageError
from shardcompute.weights.sources.reference import EMBEDDED_NAMES

_STDIN_LIMIT_BYTES = 16 << 20
_PATIENCE_S = 2.0


def split_arguments(first: str | None, second: str | None) -> tuple[str, str | None]:
    """Model and prompt. One argument alone is the model if it is the name of one, otherwise the prompt."""
    if first is None:
        return "", None
    if second is not None:
        return first, second
    return (first, None) if is_model_name(first) else ("", first)


def is_model_name(text: str) -> bool:
    """Whether `text` is an existing path, or one word with a slash, ending in .gguf, or the default's name."""
    if os.path.exists(text):
        return True
    if not text or any(character.isspace() for character in text):
        return False
    return "/" in text or "\\" in text or text.lower().endswith(".gguf") or text.lower() in EMBEDDED_NAMES


def join_prompt(prompt: str | None, piped: str | None) -> str:
    """The prompt with what was piped in below it; UsageError if that leaves nothing."""
    text = "\n\n".join(part for part in (prompt, piped) if part)
    if not text.strip():
        raise UsageError(
            "the prompt is empty", hint='give one, such as: shardcompute run "Why is the sky blue?"'
        )
    return text


def read_piped(stream: TextIO | None, say: Callable[[str], None]) -> str | None:
    """All of stdin as text, or None where it is a terminal or closed; says so if the wait gets long."""
    if stream is None or stream.closed or stream.isatty():
        return None
    notice = threading.Timer(
        _PATIENCE_S, say, ["waiting for the end of standard input; without any, add: </dev/null"]
    )
    notice.daemon = True
    notice.start()
    try:
        return decode_piped(_read(stream.buffer))
    finally:
        notice.cancel()


def decode_piped(content: bytes) -> str:
    if len(content) > _STDIN_LIMIT_BYTES:
        raise UsageError(
            f"standard input is longer than {_STDIN_LIMIT_BYTES >> 20} MiB", hint="send a shorter prompt"
        )
    try:
        return content.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}",
            hint="convert it first, for example with iconv -t utf-8",
        ) from error


def _read(stream: BinaryIO) -> bytes:
    try:
        return stream.read(_STDIN_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"standard input cannot be read: {error.strerror}", hint="add </dev/null if there is none"
        ) from error
