"""Files of a repository on the hub, as a listing names them. Pure; what fetches them is `hub`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository; `sha256` is known for the large ones."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class HubListing:
    """A repository's files at one commit."""

    repo: str
    commit: str
    files: Mapping[str, HubFile]
