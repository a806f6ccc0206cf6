"""Served files: what models are served from, open as long as that lasts, and the weights that workers fetch of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardcompute.core.errors import UnknownModelError
from shardcompute.decoding.drafting import Drafter
from shardcompute.node.cluster.preparation import PreparedModel
from shardcompute.node.weights.originals import note_original
from shardcompute.node.weights.pinned_hashes import PinnedHashes
from shardcompute.node.weights.server import WeightsServer
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.served import ServedWeights, attach


class ServedFiles:
    """Those of the models that are served. Methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, ServedWeights] = {}
        self._notes: dict[str, Path | None] = {}
        """For workers of this machine, where models lie that are served."""
        self._former: dict[str, str] = {}
        """The fingerprint of the card that a model was served by before it was given attachments."""
        self._checkpoints: dict[str, Checkpoint] = {}
        self._drafters: dict[str, Sequence[Drafter]] = {}
        self.weights = WeightsServer(self._served, pinned=PinnedHashes(folder))

    def hold(self, prepared: PreparedModel) -> None:
        """Serve from these, in place of what the model was served from before."""
        checkpoint, served = prepared.checkpoint, prepared.served
        self.close(checkpoint.name)
        self._drafters[checkpoint.name] = prepared.drafters
        self._served[checkpoint.name] = served
        self._notes[checkpoint.name] = note_original(served.card, served.origin)
        with self._lock:
            self._checkpoints[checkpoint.name] = checkpoint
        checkpoint.files.keep()

    def checkpoint_of(self, model: str) -> Checkpoint | None:
        """What a model that is served was opened from."""
        with self._lock:
            return self._checkpoints.get(model)

    def served_of(self, model: str) -> ServedWeights | None:
        """What of a model is served to workers."""
        return self._served.get(model)

    def attach(self, model: str, attachments: Mapping[str, bytes]) -> None:
        """From now on serve a model with these beside its weights. Whoever has read the card of before can go on by
        it."""
        with self._lock:
            served = self._served.get(model)
            if served is None:
                raise UnknownModelError(f"the model {model!r} is not served here")
            changed = attach(served, attachments)
            self._served.pop(self._former.pop(model, ""), None)
            if changed.card.fingerprint != served.card.fingerprint:
                self._former[model] = served.card.fingerprint
                self._served[served.card.fingerprint] = served
            self._served[model] = changed

    def close(self, model: str) -> None:
        note = self._notes.pop(model, None)
        if note is not None:
            note.unlink(missing_ok=True)
        self._served.pop(self._former.pop(model, ""), None)
        served = self._served.pop(model, None)
        if served is not None:
            served.tensors.close()
        for drafter in self._drafters.pop(model, ()):
            drafter.close()
        with self._lock:
            checkpoint = self._checkpoints.pop(model, None)
        if checkpoint is not None:
            checkpoint.close()

    def close_all(self) -> None:
        with self._lock:
            models = list(self._checkpoints)
        for model in models:
            self.close(model)
