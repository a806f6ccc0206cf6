"""A worker that is asked to stop takes leave; asked twice, it waits for nobody."""

from __future__ import annotations

from typing import Any

from shardcompute.cli.console import open_screen
from shardcompute.cli.serve.worker_process import _take_leave


class FakeWorker:
    """Notes how it left; the first time somebody may be impatient."""

    def __init__(self, *, is_interrupted: bool) -> None:
        self.patience: list[float | None] = []
        self._is_interrupted = is_interrupted

    def leave(self, patience_s: float | None = None) -> None:
        self.patience.append(patience_s)
        if self._is_interrupted and len(self.patience) == 1:
            raise KeyboardInterrupt


def leave(worker: Any) -> None:
    _take_leave(worker, open_screen())


def test_it_leaves_once() -> None:
    worker = FakeWorker(is_interrupted=False)
    leave(worker)
    assert worker.patience == [None], "as patiently as workers are"


def test_another_interrupt_makes_it_say_goodbye_and_go() -> None:
    worker = FakeWorker(is_interrupted=True)
    leave(worker)
    assert worker.patience == [None, 0.0]
