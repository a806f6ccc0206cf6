"""A device whose memory runs out when a test says so, in the words of the libraries that do that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from shardcompute.backends.executor import Executor
from shardcompute.node.worker import shard_loader


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""

    def __init__(self) -> None:
        super().__init__(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
        )


@dataclass
class FullDevice:
    """`is_full(step)` is asked before each step of a model on it, counted from 1 over all of its life."""

    is_full: Callable[[int], bool] = lambda step: False
    is_full_for: Callable[[int, int], bool] = lambda start, stop: False
    """Asked before layers are loaded."""
    steps: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    closed: int = 0

    def wrap(self, executor: Executor) -> Executor:
        return _OnFullDevice(self, executor)  # type: ignore[return-value]


class _OnFullDevice:
    """Everything but `step` and `close` is the executor's own."""

    def __init__(self, device: FullDevice, executor: Executor) -> None:
        self._device = device
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def step(self, *args: Any, **options: Any) -> Any:
        self._device.steps += 1
        if self._device.is_full(self._device.steps):
            raise OutOfMemoryError
        return self._executor.step(*args, **options)

    def launch(self, *args: Any, **options: Any) -> Any:
        self._device.steps += 1
        if self._device.is_full(self._device.steps):
            raise OutOfMemoryError
        return self._executor.launch(*args, **options)

    def close(self) -> None:
        self._device.closed += 1
        self._executor.close()


@contextmanager
def loading_onto(find: Callable[[shard_loader.ShardCache], FullDevice | None]) -> Iterator[None]:
    """What workers load meanwhile goes onto the devices that `find` names by the worker's cache of shards."""
    open_stage = shard_loader.ShardLoader._open_stage
    open_remote_shard = shard_loader.open_remote_shard
    loading = threading.local()
    """Workers of one process load side by side."""

    def open_on_device(loader: Any, *args: Any) -> Any:
        loading.device = find(loader._cache)
        return open_stage(loader, *args)

    def open_wrapped(card: Any, stage: Any, *args: Any, **options: Any) -> Executor:
        device: FullDevice | None = loading.device
        if device is None:
            return open_remote_shard(card, stage, *args, **options)
        device.loads.append((stage.start, stage.stop))
        if device.is_full_for(stage.start, stage.stop):
            raise OutOfMemoryError
        return device.wrap(open_remote_shard(card, stage, *args, **options))

    with (
        mock.patch.object(shard_loader, "open_remote_shard", open_wrapped),
        mock.patch.object(shard_loader.ShardLoader, "_open_stage", open_on_device),
    ):
        yield
