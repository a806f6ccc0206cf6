"""Static files of the web page, each with a route of its own. Nothing else on the disk can be asked for.

Scripts and styles come from here alone, nothing is inline, and no other site may frame the page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Asked for again each time, and answered with 304: after an upgrade nobody runs half of an old page.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """`/` for the page itself, `/page/…` for what it consists of."""
    folder = resources.files(__package__) / "static"
    return [
        Route("/" if name == "index.html" else f"/page/{name}", _serving(name, content), methods=["GET"])
        for name, content in sorted(_files(folder, ""))
    ]


def _files(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        elif any(entry.name.endswith(ending) for ending in _KINDS):
            found.append((f"{prefix}{entry.name}", entry.read_bytes()))
    return found


def _serving(name: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    kind = _KINDS[f".{name.rpartition('.')[2]}"]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def serve_file(request: Request) -> Response:
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return serve_file
