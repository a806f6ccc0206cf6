"""One tiny model for all swarms, and what a single process makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.swarm import Alone, open_alone
from support.tiny_checkpoint import save_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def alone(tiny: Path) -> Iterator[Alone]:
    """The truth: the same model in one process."""
    with open_alone(tiny) as service:
        yield Alone(service)
