"""Workers and drivers that are stopped say goodbye: whoever is being answered notices nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from shardcompute.client import Client
from support.swarm.processes import memory_for, started, swarm_of

pytestmark = pytest.mark.timeout(180)
STORY = "Tell me a story about a dragon."


def test_those_who_are_stopped_have_left(smollm2_gguf: Path, tmp_path: Path) -> None:
    memory = memory_for(smollm2_gguf, 2)
    guest_options = ("--data-dir", tmp_path / "guest", "--name", "guest", *memory, "--threads", "1")
    driver_options = ("--data-dir", tmp_path / "driver", "--name", "porch", "--api-port", "0")
    with (
        swarm_of(
            smollm2_gguf, tmp_path / "cluster", "--workers", "2", *memory, "--kv-tokens", "2048"
        ) as swarm,
        started("driver", swarm.token, *driver_options) as driver,
        Client(swarm.url) as client,
    ):

        def tell() -> str:
            return client.chat(STORY, max_tokens=64, temperature=0).text

        undisturbed = tell()
        with started("join", swarm.token, *guest_options) as guest:
            swarm.started.wait_for("guest holds layer")
            stop, told = threading.Event(), list[str]()
            asking = threading.Thread(target=lambda: _ask_until(stop, tell, told))
            asking.start()
            try:
                leaver = swarm.stage_names()[0]
                swarm.worker(leaver).send_signal(signal.SIGTERM)
                swarm.started.wait_for(rf"^{leaver} left$")
                swarm.started.wait_for(rf"{leaver} left the cluster \(exit 0\)")
                driver.wait_for("is ready at")
                assert driver.signal(signal.SIGINT) == 0
                swarm.started.wait_for("^the driver porch left$")
            finally:
                stop.set()
                asking.join()
            assert "guest" in swarm.stage_names()
            # Nobody can do its work now: it waits for that, until it is told not to.
            guest.process.send_signal(signal.SIGINT)
            guest.wait_for("leaving the cluster")
            assert guest.signal(signal.SIGINT) == 0
            assert guest.lines[-1] == "stopped"
            swarm.started.wait_for("^guest left$")
        assert set(told) == {undisturbed}
        assert not any("is lost" in line for line in swarm.started.lines), swarm.started.lines


def _ask_until(stop: threading.Event, tell: object, told: list[str]) -> None:
    assert callable(tell)
    while not stop.is_set():
        told.append(tell())
