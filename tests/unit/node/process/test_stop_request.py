"""A process is asked to stop where no signal can be sent: by a file that means it, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

from shardcompute.node.process.stop_request import ask_to_stop, heeding_requests

OWN, OTHER = 4711, 4712


def test_the_process_that_is_meant_is_stopped(tmp_path: Path) -> None:
    stopped = threading.Event()
    with heeding_requests(tmp_path, OWN, by_file=True, stop=stopped.set, look_s=0.01):
        ask_to_stop(SimpleNamespace(pid=OWN), tmp_path, by_file=True)
        assert stopped.wait(30.0)
    assert list(tmp_path.iterdir()) == [], "who starts there next is not stopped by it"


def test_what_was_left_for_another_is_forgotten(tmp_path: Path) -> None:
    stopped = threading.Event()
    ask_to_stop(SimpleNamespace(pid=OTHER), tmp_path, by_file=True)
    with heeding_requests(tmp_path, OWN, by_file=True, stop=stopped.set, look_s=0.01):
        while list(tmp_path.iterdir()):
            assert not stopped.wait(0.01)
        ask_to_stop(SimpleNamespace(pid=OWN), tmp_path, by_file=True)
        assert stopped.wait(30.0)


def test_signals_need_no_file(tmp_path: Path) -> None:
    terminated: list[bool] = []
    process = SimpleNamespace(pid=OWN, terminate=lambda: terminated.append(True))
    ask_to_stop(process, tmp_path, by_file=False)
    assert terminated == [True]
    assert list(tmp_path.iterdir()) == []
