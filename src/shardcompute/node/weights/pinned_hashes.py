"""Pinned hashes on a coordinator's disk: what the first readers of a model's source have found, kept over restarts.

    <fingerprint>.hashes    one line for each tensor, its SHA-256 and its name; the last one of a name counts

A line that was cut off is left out. Where nothing can be written they are known until the coordinator stops.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from pathlib import Path

from shardcompute.core.errors import SourceError
from shardcompute.security.private_files import private_opener
from shardcompute.weights.sources.disk import disk_errors

log = logging.getLogger(__name__)
_LINE = re.compile(r'([0-9a-f]{64}) (".{0,600}")')
_MOST_BYTES = 256 << 20


class PinnedHashes:
    """Of all models of a cluster. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, fingerprint: str) -> dict[str, bytes]:
        """By tensor."""
        path = self._path(fingerprint)
        try:
            with disk_errors(path), path.open("rb") as file:
                lines = file.read(_MOST_BYTES).decode("ascii", "replace").splitlines()
        except SourceError:
            return {}
        hashes: dict[str, bytes] = {}
        for match in map(_LINE.fullmatch, lines):
            with contextlib.suppress(ValueError):
                if match:
                    hashes[json.loads(match[2])] = bytes.fromhex(match[1])
        return hashes

    def add(self, fingerprint: str, tensor: str, digest: bytes) -> None:
        path = self._path(fingerprint)
        try:
            with disk_errors(path):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with open(path, "a", encoding="ascii", opener=private_opener) as file:
                    file.write(f"{digest.hex()} {json.dumps(tensor)}\n")
        except SourceError as error:
            log.warning("hashes of weights are not kept: %s", error)

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.hashes"
