"""Speed book: what a worker has measured on its devices, kept in its folder for the next start.

One small file, written whole or not at all; one that cannot be read is as good as none. What is found there is told at
the next registration, so that placement need not guess.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from shardcompute.control.state import LayerTime
from shardcompute.core.errors import SourceError
from shardcompute.node.worker.speed_probe import BackendSpeed
from shardcompute.security.private_files import read_private, replace_private

log = logging.getLogger(__name__)
_MOST_DEVICES = 16
_MOST_MODELS = 48
"""Of one device; fewer than a coordinator takes at once."""


class DeviceKey(msgspec.Struct, frozen=True):
    """On what something was measured."""

    label: str
    backend: str
    device: str
    threads: int


class _DeviceSpeeds(msgspec.Struct, frozen=True):
    key: DeviceKey
    probed: BackendSpeed | None = None
    probed_at_s: float = 0.0
    models: tuple[LayerTime, ...] = ()
    """The newest last."""


class SpeedBook:
    """Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._devices = {each.key: each for each in self._read()}

    def probed(self, key: DeviceKey, *, since_s: float) -> tuple[BackendSpeed, float] | None:
        """What the backend did there, and when; None where that was not measured since then."""
        with self._lock:
            known = self._devices.get(key)
        if known is None or known.probed is None or known.probed_at_s < since_s:
            return None
        return known.probed, known.probed_at_s

    def models(self, key: DeviceKey) -> tuple[LayerTime, ...]:
        with self._lock:
            known = self._devices.get(key)
        return () if known is None else known.models

    def note_probe(self, key: DeviceKey, speed: BackendSpeed, now_s: float) -> None:
        with self._lock:
            known = self._devices.pop(key, _DeviceSpeeds(key))
            self._keep(msgspec.structs.replace(known, probed=speed, probed_at_s=now_s))

    def note_model(self, key: DeviceKey, time: LayerTime) -> None:
        """In place of what was known of a model of its shape."""
        shape = time.shape
        if shape is None:
            return
        with self._lock:
            known = self._devices.pop(key, _DeviceSpeeds(key))
            others = [
                each
                for each in known.models
                if each.model != time.model and not (each.shape is not None and each.shape.is_like(shape))
            ]
            models = (*others, time)[-_MOST_MODELS:]
            self._keep(msgspec.structs.replace(known, models=models))

    def _keep(self, device: _DeviceSpeeds) -> None:
        self._devices[device.key] = device
        while len(self._devices) > _MOST_DEVICES:
            del self._devices[next(iter(self._devices))]
        try:
            replace_private(self._path, msgspec.json.encode(list(self._devices.values())))
        except (OSError, SourceError) as error:
            log.warning("what was measured is not kept: %s", error)

    def _read(self) -> list[_DeviceSpeeds]:
        try:
            found = msgspec.json.decode(read_private(self._path), type=list[_DeviceSpeeds])
        except FileNotFoundError:
            return []
        except (OSError, SourceError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning("what was measured before cannot be read: %s", error)
            return []
        return [
            msgspec.structs.replace(each, models=each.models[-_MOST_MODELS:])
            for each in found[-_MOST_DEVICES:]
        ]
