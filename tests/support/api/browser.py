"""A real browser for tests, and a page that is watched: errors that it logs and requests to others are failures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.api.bridge import LOCAL_SECRET

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 12_000


@contextmanager
def open_browser() -> Iterator[Any]:
    """Its event loop lives in this thread, so nothing else may run one here until the block ends."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """What a page said and asked for."""

    def __init__(self, page: Any, origin: str) -> None:
        self.origin = origin
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def forget(self, word: str) -> None:
        """Errors that a test brought about itself."""
        self.errors = [error for error in self.errors if word not in error]

    def check(self) -> None:
        assert self.errors == []
        assert self.foreign == []

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:")):
            self.foreign.append(request.url)


@contextmanager
def watched_page(
    browser: Any, origin: str, *, key: str = LOCAL_SECRET, **options: Any
) -> Iterator[tuple[Any, Watch]]:
    """A page of a fresh profile; when the block ends well, it must have logged no error and asked nobody else.

    It is signed in with `key`, unless that is empty.
    """
    context = browser.new_context(**options)
    if key:
        context.add_init_script(f"sessionStorage.setItem('shardcompute.key', {key!r})")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watch = Watch(page, origin)
    try:
        yield page, watch
        watch.check()
    finally:
        context.close()
