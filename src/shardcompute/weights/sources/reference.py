"""Model references: how a user names a model, and what that name means.

    smollm2 (or default, or nothing)   the embedded default model
    qwen3:8b  qwen3                    a model of the catalogue (see `catalogue`): what it stands for on the hub
    ./folder  /abs/folder  ~/folder    a local folder with config.json and safetensors, or with one GGUF file
    ./model.gguf                       a local GGUF file
    org/repo                           a model of the hub
    org/repo@revision                  … at a branch, tag or commit
    org/repo:QUANT                     … the GGUF file of that quantisation, such as Q4_K_M
    org/repo@revision:QUANT            … both

A name that exists on disk is local; everything else must be one of the forms above. `str(reference)` can be
parsed again and gives the same reference. Parsing asks whether a path exists and reads nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import UsageError
from shardcompute.weights.sources.catalogue import find_known, suggest_known

DEFAULT_REVISION = "main"
EMBEDDED_NAMES = ("smollm2", "default", "")
_MAX_LENGTH = 4096
_ACCEPTED = (
    "give smollm2 (the embedded default), a name that `shardcompute list --catalogue` has, a local ./folder or "
    "./file.gguf, or a hub model as org/repo, org/repo@revision, org/repo:QUANT or org/repo@revision:QUANT"
)
_HUB = re.compile(r"(?P<repo>[^@:]+)(?:@(?P<revision>[^@:]+))?(?::(?P<quant>[^@:]+))?")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./+-]*[A-Za-z0-9_+-])?")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_EXPLICIT_PATH = re.compile(r"(?:\.{1,2}|~[^/\\]*)(?:[/\\]|$)|[/\\]|[A-Za-z]:[/\\]")


@dataclass(frozen=True, slots=True)
class EmbeddedReference:
    """The model that comes as a Python package."""

    def __str__(self) -> str:
        return EMBEDDED_NAMES[0]


@dataclass(frozen=True, slots=True)
class FolderReference:
    """A folder on this machine; `path` is absolute."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class GgufReference:
    """A GGUF file on this machine; `path` is absolute."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model of the hub; `quant` (upper case) picks one of a repository's GGUF files."""

    repo: str
    revision: str = DEFAULT_REVISION
    quant: str | None = None

    def __str__(self) -> str:
        # A repository that is called like a file needs its revision to be told from a file.
        is_plain = self.revision == DEFAULT_REVISION and not self.repo.lower().endswith(".gguf")
        revision = "" if is_plain else f"@{self.revision}"
        return f"{self.repo}{revision}{':' + self.quant if self.quant else ''}"


ModelReference = EmbeddedReference | FolderReference | GgufReference | HubReference


def parse_reference(text: str) -> ModelReference:
    """The model that `text` names; raises `UsageError` if it names none."""
    if len(text) > _MAX_LENGTH or not _is_clean(text):
        raise UsageError(
            "a model name must not hold control characters or be longer than 4096 characters", hint=_ACCEPTED
        )
    if text.strip().lower() in EMBEDDED_NAMES:
        return EmbeddedReference()
    if _EXPLICIT_PATH.match(text) or text.lower().endswith(".gguf") or os.path.exists(text):
        return _parse_local(text)
    known = find_known(text)
    if known is not None:
        is_embedded = known.reference in EMBEDDED_NAMES
        return EmbeddedReference() if is_embedded else parse_hub_reference(known.reference)
    return parse_hub_reference(text.strip())


def parse_hub_reference(text: str) -> HubReference:
    """`org/repo[@revision][:QUANT]`, whatever lies on this machine's disk."""
    match = _HUB.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not the name of a model", hint=_ACCEPTED)
    revision = match["revision"] or DEFAULT_REVISION
    if not _is_repo(match["repo"]):
        raise UsageError(
            f"{text!r} is not the name of a model: no such file or folder, no org/repo, not in the catalogue",
            hint=suggest_known(text) or _ACCEPTED,
        )
    if not _is_revision(revision):
        raise UsageError(f"{revision!r} is not a branch, tag or commit", hint=_ACCEPTED)
    quant = match["quant"]
    if quant is not None and (len(quant) > 32 or not _QUANT.fullmatch(quant)):
        raise UsageError(f"{quant!r} is not a quantisation like Q4_K_M", hint=_ACCEPTED)
    return HubReference(match["repo"], revision, quant.upper() if quant else None)


def _parse_local(text: str) -> FolderReference | GgufReference:
    try:
        path = Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as error:
        raise UsageError(f"{text!r} names a user without a home folder", hint="give the full path") from error
    is_gguf_name = path.suffix.lower() == ".gguf"
    if path.is_dir() or not (is_gguf_name or path.exists()):
        return FolderReference(path)
    if not is_gguf_name:
        raise UsageError(
            f"{path} is a file, but not a .gguf file",
            hint="give a .gguf file, or the folder that holds config.json and the safetensors files",
        )
    return GgufReference(path)


def _is_clean(text: str) -> bool:
    return not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text)


def _is_repo(text: str) -> bool:
    """The hub's own rules; without `--` in names, `--` can stand for the slash in folder names."""
    parts = text.split("/")
    is_named = len(parts) == 2 and all(_NAME.fullmatch(part) for part in parts)
    return (
        is_named and len(text) <= 96 and "--" not in text and ".." not in text and not text.endswith(".git")
    )


def _is_revision(text: str) -> bool:
    is_named = len(text) <= 100 and _REVISION.fullmatch(text) is not None
    return is_named and ".." not in text and "//" not in text and "/." not in text
