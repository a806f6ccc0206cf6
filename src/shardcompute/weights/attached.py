"""Attached files that travel beside a model's tensors, such as its vocabulary: to everybody they are tensors of bytes.

So they are listed on the card, fetched in pieces from whoever has them, checked and cached like weights. An
attachment's stored name holds the hash of its content, so a model whose vocabulary changed is another model to
caches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.formats.bytes import check_range
from shardcompute.weights.formats.tensor_file import TensorEntry, TensorFile

_MARK = "@"


def is_attachment(stored: str) -> bool:
    return stored.startswith(_MARK)


def stored_name(name: str, content: bytes) -> str:
    """Under what name an attachment is stored."""
    return f"{_MARK}{name}/{hashlib.sha256(content).hexdigest()[:32]}"


def find_attachment(stored: Iterable[str], name: str) -> str | None:
    """The stored name of the attachment `name`."""
    return next((each for each in stored if each.startswith(f"{_MARK}{name}/")), None)


def read_attachment(tensors: TensorFile, name: str) -> bytes | None:
    """What was attached as `name`, None if nothing was; CorruptModelError if it is not what its name promises."""
    stored = find_attachment(tensors.entries, name)
    if stored is None:
        return None
    content = bytes(tensors.read_bytes(stored, 0, tensors.entries[stored].size_bytes))
    if stored != stored_name(name, content):
        raise CorruptModelError(f"the {name} of {tensors.name} is damaged", hint="fetch the model again")
    return content


class AttachedTensors:
    """A `TensorFile` with attachments besides the tensors of another one, in the place of those that it had by the same
    names; closing it closes that one."""

    def __init__(self, tensors: TensorFile, attachments: Mapping[str, bytes]) -> None:
        self._tensors = tensors
        self._contents = {stored_name(name, content): content for name, content in attachments.items()}
        self.name = tensors.name
        self.metadata: Mapping[str, Any] = tensors.metadata
        former = {find_attachment(tensors.entries, name) for name in attachments}
        self.entries: Mapping[str, TensorEntry] = {
            **{stored: entry for stored, entry in tensors.entries.items() if stored not in former},
            **{
                stored: TensorEntry(stored, "U8", (len(content),), 0, len(content))
                for stored, content in self._contents.items()
            },
        }

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        content = self._contents.get(name)
        if content is None:
            return self._tensors.read_bytes(name, offset, length)
        check_range(name, len(content), offset, length)
        return memoryview(content)[offset : offset + length]

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        content = self._contents.get(name)
        if content is None:
            return self._tensors.read_rows(name, start, stop)
        stop = len(content) if stop is None else stop
        return self.read_bytes(name, start, stop - start)

    def close(self) -> None:
        self._tensors.close()
