"""A browser for each module, or none and a skip that says why."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.api.browser import CHROMIUM, open_browser
from support.models.tiny_checkpoint import save_tiny_llama

_NAME = "shardcompute_api_fakes"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        _NAME, Path(__file__).parents[1] / "unit" / "api" / "fakes.py"
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])


@pytest.fixture(scope="session")
def fakes() -> Any:
    return sys.modules[_NAME]


# Of a module, not of the session: while it is open, no other test of this thread could run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium was found; install the package chromium")
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tinier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tinier", seed=2, layers=2)
