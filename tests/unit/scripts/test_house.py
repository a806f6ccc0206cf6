"""The check of the house finds what it is there for."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script

LINES = [f"value_{number} = compute({number})" for number in range(8)]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return load_script("house")


def source(house: ModuleType, path: str, *lines: str) -> object:
    text = "\n".join(lines)
    return house.SourceFile(path, ast.parse(text), text.splitlines())


def test_class_names_used_twice(house: ModuleType) -> None:
    files = [
        source(house, "a.py", "class One: ..."),
        source(house, "b.py", "class One: ...", "class Two: ..."),
    ]
    assert list(house.twice_named(files)) == ["class One is in a.py, b.py"]


def test_full_folders(house: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for folder, count in (("few", 15), ("many", 16)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        for number in range(count):
            (tmp_path / folder / f"file_{number}.py").touch()
    assert list(house.full_folders(tmp_path)) == ["folder many has 16 files"]


def test_runs_of_equal_lines(house: ModuleType) -> None:
    whole = source(house, "a.py", "import os", *LINES)
    assert list(house.equal_runs([whole, source(house, "b.py", *LINES[:7])])) == []
    assert list(house.equal_runs([whole, source(house, "b.py", "x = 1", *LINES)])) == [
        "a.py:2 and b.py:2 share 8 lines"
    ]
    comments = source(house, "c.py", *(f"# {line}" for line in LINES))
    assert list(house.equal_runs([comments, comments])) == []


def test_folders_that_import_each_other(house: ModuleType) -> None:
    a = source(house, "p/a/one.py", "from p.b.two import f")
    b = source(house, "p/b/two.py", "from p.a.one import g")
    assert list(house.import_cycles([a, b])) == ["folders p.a and p.b import each other"]
    assert list(house.import_cycles([a, source(house, "p/b/two.py", "import os")])) == []
