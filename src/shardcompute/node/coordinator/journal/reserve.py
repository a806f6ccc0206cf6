"""Disk reserve: room that is held while there is some, and given up when the disk is full.

So that what keeps a cluster safe (who was thrown out, who was lost) can still be written down then.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from shardcompute.security.private_files import private_opener

log = logging.getLogger(__name__)
RESERVE_BYTES = 1 << 20
# The last room on a disk is left to others.
_FREE_PER_RESERVE = 4


class DiskReserve:
    """A file that takes room and says nothing. Used from one thread at a time."""

    def __init__(self, path: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self._path = path
        self._size_bytes = size_bytes

    @property
    def is_held(self) -> bool:
        try:
            return self._path.stat().st_size >= self._size_bytes
        except OSError:
            return False

    def hold(self) -> bool:
        """Take the room if there is plenty; whether it is held now."""
        if self.is_held:
            return True
        try:
            if shutil.disk_usage(self._path.parent).free < _FREE_PER_RESERVE * self._size_bytes:
                return False
            with open(self._path, "wb", opener=private_opener) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self._size_bytes)
                else:
                    file.write(os.urandom(self._size_bytes))
        except OSError as error:
            log.info("no disk space is reserved for the journal: %s", error)
            self.release()
            return False
        return True

    def release(self) -> bool:
        """Give the room up; whether there was any."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
