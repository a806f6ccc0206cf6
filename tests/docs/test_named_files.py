"""Documents name real files, and the walks of the architecture page have as many as they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardcompute"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|sh|toml))`")
WALK = re.compile(r"^### (.+?): (\d+) files\b", re.MULTILINE)


def walks() -> Iterator[tuple[str, int, str]]:
    """Each walk's name, the number that it gives, and its text."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    found = list(WALK.finditer(page))
    ends = [*(each.start() for each in found[1:]), len(page)]
    for each, end in zip(found, ends, strict=True):
        yield each.group(1), int(each.group(2)), page[each.end() : end].split("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = {
        name for name in NAMED.findall(page.read_text()) if "NNNN" not in name and not name.startswith("..")
    }
    roots = (ROOT, ROOT / "src", PACKAGE, page.parent)
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []


def test_walks_count_their_files() -> None:
    told = {name: count for name, count, _ in walks()}
    counted = {name: len(set(NAMED.findall(text))) for name, _, text in walks()}
    assert len(told) == 4
    assert counted == told
