"""What tests share: the embedded default model, fetched once, and no test by hypothesis that fails for being slow."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest

from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
# What is measured differs from run to run: where a test does not ask for llama.cpp, ONNX Runtime computes.
os.environ.setdefault("SHARDCOMPUTE_CPU_BACKEND", "onnx")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The embedded default model's file, from the user's cache where it is already there."""
    settings = load_settings()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    # Of processes that test side by side one fetches it, and the others find it.
    with (settings.data_dir / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
