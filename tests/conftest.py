"""What tests share: the embedded default model, fetched once into a cache of the tests' own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The embedded default model's file, from the user's cache where it is already there."""
    settings = load_settings()
    files = resolve(parse_reference("smollm2"), replace(settings, offline=False))
    assert files.folder is not None
    return files.folder / files.main_file


@pytest.fixture(scope="session")
def evaluation_data() -> Path:
    """The folder of evaluation data; tests that need it are skipped where it is not."""
    folder = Path(os.environ.get("SHARDCOMPUTE_TEST_DATA", DATA))
    if not folder.is_dir():
        pytest.skip(f"no evaluation data at {folder}; set SHARDCOMPUTE_TEST_DATA")
    return folder
