"""A server in a process of its own, for attacks that might end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.swarm.processes import Started, started


@pytest.fixture(scope="module")
def within() -> tuple[str, ...]:
    """A command that the server is started by; a module may have its own."""
    return ()


@pytest.fixture(scope="module")
def server(tiny: Path, within: tuple[str, ...]) -> Iterator[Started]:
    with started("up", tiny, "--local", "--port", "0", within=within) as command:
        command.wait_for("Ctrl-C")
        yield command


@pytest.fixture(scope="module")
def port(server: Started) -> int:
    return int(server.wait_for(r"http://127\.0\.0\.1:(\d+)")[1])
