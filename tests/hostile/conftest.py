"""A swarm under attack, and the tiny model that it serves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardcompute.security import Credentials
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import Alone, LabSwarm, open_alone
from support.swarm.siege import Siege, siege


def _load_fakes() -> ModuleType:
    """Test folders are no packages, so the module is loaded by its path, once."""
    name = "shardcompute_api_fakes"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "unit" / "api" / "fakes.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def fakes() -> Any:
    return _load_fakes()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def alone(tiny: Path) -> Iterator[Alone]:
    """The truth: the same model in one process."""
    with open_alone(tiny) as service:
        yield Alone(service)


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with siege(tmp_path_factory.mktemp("hostile")) as besieged:
        yield besieged


@pytest.fixture
def outlasts(besieged: Siege) -> Iterator[None]:
    """The swarm is as it was after the test."""
    with besieged.outlasted():
        yield


@pytest.fixture
def lab(besieged: Siege) -> LabSwarm:
    return besieged.lab


@pytest.fixture
def member(besieged: Siege) -> Credentials:
    return besieged.member
