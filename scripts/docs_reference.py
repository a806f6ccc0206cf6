"""Writes the pages of docs/reference and docs/models.md, which are made from the code. `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

import api_reference
import metrics_reference
import models_table
import settings_reference

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    "reference/metrics.md": metrics_reference.render,
    "reference/settings.md": settings_reference.render,
    "reference/api.md": api_reference.render,
    "models.md": models_table.render,
}


def main() -> int:
    stale = 0
    for name, render in PAGES.items():
        path, content = DOCS / name, render()
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        if "--check" in sys.argv:
            print(f"docs/{name} is out of date: run python scripts/docs_reference.py")
            stale += 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
