"""The lock file fits the project, and its check finds one that does not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script

ROOT = Path(__file__).parents[3]
PINNED = "one==1.2 \\\n    --hash=sha256:" + "a" * 64 + "\n"


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    return load_script("lock")


def test_the_lock_file_fits_the_project(lock: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert list(lock.unfit(lock.wanted_requirements(project), lock.LOCK.read_text())) == []


@pytest.mark.parametrize(
    ("wanted", "text", "finding"),
    [
        ("one>=1", "", "one is missing"),
        ("One>=2", PINNED, "One is locked to 1.2, pyproject.toml wants >=2"),
        ("one>=1", "one==1.2\n", "one has no hashes"),
        ("one>=1", PINNED.replace("==", ">="), "one is not one exact release"),
        ("one>=1", PINNED.replace("==1.2", " @ file:///one.whl"), "one is not one exact release"),
        ("one>=1", "??\n", "a line cannot be read"),
    ],
)
def test_what_does_not_fit_is_said(lock: ModuleType, wanted: str, text: str, finding: str) -> None:
    assert finding in next(lock.unfit([wanted], text))


def test_serving_is_installed_from_the_lock_file_alone() -> None:
    recipe = (ROOT / "Makefile").read_text().split("$(VENV)/.run:")[1].split("\n\n")[0]
    assert "--require-hashes --requirement requirements.lock" in recipe
    assert "--no-deps --no-build-isolation" in recipe
