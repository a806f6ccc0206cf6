"""Recorded states: dialogues with the final states of their tokens, in one file of the machine that learns from them.

A run that was cut short leaves them there, and the next one begins with them. The file is bounded, readable by its
owner alone, and believed only as far as it goes well: what does not belong to these weights, is damaged or cannot be a
dialogue ends it, and is cut off.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from shardcompute.core.errors import BackendError
from shardcompute.draft_training.dialogue import GREEDY, SelfPlayDialogue
from shardcompute.draft_training.swarm.play import PlayedDialogue
from shardcompute.draft_training.swarm.taught_model import check_states
from shardcompute.security.private_files import private_opener
from shardcompute.weights.sources.disk import disk_errors

log = logging.getLogger(__name__)
_MAGIC = b"states1\n"
_MOST_BYTES = 1 << 30
_MOST_RECORD_BYTES = 16 << 20
_MOST_HEADER_BYTES = 4096
_MOST_KIND_CHARS = 64
_PREFIX_BYTES = 8


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """Whose states these are: those of weights with this hash."""

    weights: str
    hidden: int
    vocab_size: int


class _DialogueRecord(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    ids: bytes
    origins: bytes
    states: bytes


class StateRecording:
    """The file of one model's states. `read` comes first; then what is played is added."""

    def __init__(
        self, file: Path, *, weights: str, hidden: int, vocab_size: int, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._file = file
        self._header = _Header(weights, hidden, vocab_size)
        self._most_bytes = most_bytes
        self.is_full = False

    def read(self) -> Iterator[PlayedDialogue]:
        """What an earlier run has left; the file ends behind it then. Where it is none of these weights', or none at
        all, it is begun anew."""
        with disk_errors(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(self._file), open(self._file, "a+b", opener=private_opener) as opened:
            opened.seek(0)
            if not self._is_own(opened):
                opened.seek(0)
                opened.truncate()
                opened.write(_MAGIC + _framed(msgspec.msgpack.encode(self._header)))
            end = opened.tell()
            while (content := _next_content(opened, _MOST_RECORD_BYTES)) is not None:
                try:
                    played = self._decode(content)
                except (ValueError, BackendError) as error:
                    log.warning("%s is cut where it is damaged: %s", self._file, error)
                    break
                end = opened.tell()
                yield played
            opened.seek(end)
            opened.truncate()

    def add(self, played: PlayedDialogue) -> None:
        """Append a dialogue, unless there is no room for it: then the file is full."""
        dialogue = played.dialogue
        record = _DialogueRecord(
            dialogue.kind[:_MOST_KIND_CHARS],
            dialogue.ids.astype("<i4").tobytes(),
            dialogue.origins.tobytes(),
            played.states.astype("<f2").tobytes(),
        )
        content = _framed(msgspec.msgpack.encode(record))
        with disk_errors(self._file), self._file.open("ab") as opened:
            self.is_full = self.is_full or opened.tell() + len(content) > self._most_bytes
            if not self.is_full:
                opened.write(content)

    def remove(self) -> None:
        """All of it was learned from."""
        self._file.unlink(missing_ok=True)

    def _is_own(self, opened: BinaryIO) -> bool:
        if opened.read(len(_MAGIC)) != _MAGIC:
            return False
        content = _next_content(opened, _MOST_HEADER_BYTES)
        try:
            return content is not None and msgspec.msgpack.decode(content, type=_Header) == self._header
        except msgspec.MsgspecError:
            return False

    def _decode(self, content: bytes) -> PlayedDialogue:
        """ValueError or BackendError for what is no dialogue of this model."""
        record = msgspec.msgpack.decode(content, type=_DialogueRecord)
        count, hidden = len(record.origins), self._header.hidden
        sizes = len(record.ids), len(record.states)
        if not count or sizes != (4 * count, 2 * hidden * count) or len(record.kind) > _MOST_KIND_CHARS:
            raise ValueError(f"{sizes} bytes of ids and states do not belong to {count} tokens")
        ids = np.frombuffer(record.ids, "<i4").astype(np.int32)
        origins = np.frombuffer(record.origins, np.uint8).copy()
        if ids.min() < 0 or ids.max() >= self._header.vocab_size or origins.max() > GREEDY:
            raise ValueError("a token is not one of this model")
        states = np.frombuffer(record.states, "<f2").reshape(count, hidden)
        return PlayedDialogue(SelfPlayDialogue(record.kind, ids, origins), check_states(states))


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little") + content


def _next_content(opened: BinaryIO, most_bytes: int) -> bytes | None:
    """The next record's bytes; None at the end, or where it is cut short, too long or damaged. No more is read of one
    than it may have."""
    prefix = opened.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        return None
    length, checksum = int.from_bytes(prefix[:4], "little"), int.from_bytes(prefix[4:], "little")
    left = os.fstat(opened.fileno()).st_size - opened.tell()
    if length > min(most_bytes, left):
        return None
    content = opened.read(length)
    return content if len(content) == length and zlib.crc32(content) == checksum else None
