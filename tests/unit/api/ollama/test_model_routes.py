from __future__ import annotations

import re
from typing import Any


def test_listings_have_digest_and_size(app: Any, call: Any) -> None:
    """`ollama list` shows the first twelve characters of the digest, and must find them."""
    for path in ("/api/tags", "/api/ps"):
        [listed] = call(app, "GET", path).json()["models"]
        assert re.fullmatch("[0-9a-f]{64}", listed["digest"]), path
        assert listed["size"] == 12_345, path


def test_show_tells_the_same(app: Any, call: Any) -> None:
    [listed] = call(app, "GET", "/api/tags").json()["models"]
    shown = call(app, "POST", "/api/show", json={"model": "org/tiny"}).json()
    assert (shown["digest"], shown["size"]) == (listed["digest"], listed["size"])
