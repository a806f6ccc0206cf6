"""Device speeds: what a worker knows of how fast its device is, and what of that is news for the coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shardcompute.backends.device_memory import free_caches, within_memory
from shardcompute.control.events import NodeMeasured, StageTimed
from shardcompute.control.state import LayerTime
from shardcompute.core.phases import phase
from shardcompute.node.worker.shard_loader import MeasuredShard
from shardcompute.node.worker.speed_book import DeviceKey, SpeedBook
from shardcompute.node.worker.speed_probe import BackendSpeed, probe_backend
from shardcompute.node.worker.stages.service_pace import ShardPace
from shardcompute.node.worker.stages.stage_slots import ShardKey

log = logging.getLogger(__name__)
_PROBE_LASTS_S = 7 * 86_400.0
_GUESSED = BackendSpeed(1e-10, 1e-11, 0.0)
"""A machine that reads 10 GB of weights a second."""


class DeviceSpeeds:
    """Of one device with one backend. Probes it when it is made. Methods may be called from any thread."""

    def __init__(self, device: DeviceKey, book: SpeedBook, clock: Callable[[], float] = time.time) -> None:
        self._device = device
        self._book = book
        self._clock = clock
        self._shards: dict[ShardKey, tuple[str, MeasuredShard]] = {}
        self.probed, self.probed_at_s = self._probe()
        """What the device does whatever the model, and when that was measured; 0: it could not be, and is guessed."""

    def remembered(self) -> tuple[LayerTime, ...]:
        """What was measured with models, in this process or before."""
        return self._book.models(self._device)

    def loaded(self, key: ShardKey, model: str, measured: MeasuredShard) -> NodeMeasured:
        """Layers were loaded, and measured: what to tell of them."""
        self._shards[key] = model, measured
        now_s, speed = self._clock(), measured.speed
        time = LayerTime(
            model,
            speed.layer_s,
            shape=measured.shape,
            batch_s=speed.batch_layer_s,
            prefill_s=speed.prefill_layer_s,
            loaded_s=speed.layer_s,
            measured_at_s=now_s,
        )
        self._book.note_model(self._device, time)
        return NodeMeasured(
            node="",
            incarnation=0,
            model=model,
            layer_s=speed.layer_s,
            shape=measured.shape,
            batch_layer_s=speed.batch_layer_s,
            prefill_layer_s=speed.prefill_layer_s,
            measured_at_s=now_s,
        )

    def paced(self, key: ShardKey, pace: ShardPace) -> StageTimed | None:
        """What to tell of layers whose steps had this pace of late; None where they are gone."""
        known = self._shards.get(key)
        if known is None:
            return None
        model, measured = known
        chain, start, stop, tensor = key
        speed = measured.speed
        # What was measured alone counts for whole layers; in service, all ranks take as long as this one.
        part = 1.0 if tensor is None else tensor.weights[tensor.rank] / sum(tensor.weights)
        return StageTimed(
            node="",
            incarnation=0,
            chain=chain,
            model=model,
            start=start,
            stop=stop,
            loaded_s=speed.layer_s * part,
            layer_s=_times(speed.layer_s * part, pace.decode),
            batch_layer_s=None
            if speed.batch_layer_s is None
            else _times(speed.batch_layer_s * part, pace.decode),
            prefill_layer_s=None
            if speed.prefill_layer_s is None
            else _times(speed.prefill_layer_s, pace.prefill),
            shape=measured.shape,
            is_group=tensor is not None,
            measured_at_s=self._clock(),
        )

    def unloaded(self, key: ShardKey) -> None:
        self._shards.pop(key, None)

    def _probe(self) -> tuple[BackendSpeed, float]:
        """On a GPU, where it takes a while, what is remembered serves for some days."""
        device, now_s = self._device, self._clock()
        known = self._book.probed(device, since_s=now_s - _PROBE_LASTS_S)
        if known is not None and device.device != "cpu":
            return known
        try:
            with phase("probing the device"):
                speed = within_memory(
                    lambda: probe_backend(device.backend, device.device, device.threads),
                    free_caches,
                    "the device was probed",
                )
        except Exception as error:
            # It may compute all the same: what it loads is measured, too.
            log.warning("the speed of %s with %s is guessed: %s", device.label, device.backend, error)
            return known or (_GUESSED, 0.0)
        self._book.note_probe(device, speed, now_s)
        return speed, now_s


def _times(seconds: float, ratio: float | None) -> float | None:
    return None if ratio is None else seconds * ratio
