"""Conversations on disk, for `/save` and `/load`: one JSON file each, readable by its owner alone.

A plain name means a file in the folder of conversations; anything with a slash in it, or that ends in .json, is a
path. Only a file that holds a conversation is ever written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.security.private_files import read_private, replace_private

FOLDER = "chats"
_ENDING = ".json"


class SaidText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ShownUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class ShownImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image that was shown, whole: as a data: URL."""

    image_url: ShownUrl


class TranscriptMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[SaidText | ShownImage]


class Transcript(msgspec.Struct, frozen=True, tag_field="kind", tag="shardcompute-chat"):
    """`model` answered it; it may go on with another."""

    model: str
    messages: tuple[TranscriptMessage, ...]


def transcript_path(folder: Path, name: str) -> Path:
    """Where a conversation of this name is kept."""
    if not name:
        raise UsageError("a conversation needs a name", hint="write for example: /save holidays")
    if "/" in name or "\\" in name or name.endswith(_ENDING):
        return Path(name).expanduser()
    if name.startswith(".") or not name.isprintable():
        raise UsageError(f"{name!r} is no name for a file", hint="use letters and digits")
    return folder / f"{name}{_ENDING}"


def save_transcript(path: Path, model: str, messages: Sequence[dict[str, Any]]) -> None:
    if path.exists() and not _is_transcript(path):
        raise UsageError(
            f"{path} exists and holds something else than a conversation", hint="choose another name"
        )
    kept = Transcript(model, tuple(msgspec.convert(list(messages), list[TranscriptMessage])))
    replace_private(path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")


def load_transcript(path: Path) -> Transcript:
    """UsageError if there is none, SourceError if it cannot be read as one."""
    try:
        return msgspec.json.decode(read_private(path), type=Transcript)
    except FileNotFoundError:
        raise UsageError(
            f"there is no conversation {path}", hint="/load lists those that were saved"
        ) from None
    except msgspec.DecodeError as error:
        raise SourceError(f"{path} holds no conversation: {error}", hint="choose another file") from error


def list_transcripts(folder: Path) -> list[str]:
    """Names of those in the folder of conversations."""
    try:
        return sorted(path.stem for path in folder.iterdir() if path.suffix == _ENDING and path.is_file())
    except OSError:
        return []


def _is_transcript(path: Path) -> bool:
    try:
        load_transcript(path)
    except (SourceError, UsageError):
        return False
    return True
