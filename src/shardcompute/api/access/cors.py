"""CORS, off unless asked for: which web pages of other origins may call the routes of models from a browser.

Credentials that a browser adds by itself (cookies) are never allowed; pages send their key in a header. The routes that
steer a cluster or sign a page in are not for pages of others, whatever origins were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_MODEL_PATHS = ("/v1/", "/api/", "/tokenize", "/detokenize", "/health", "/version", "/openapi.json")
_EXPOSED = ("x-request-id", "retry-after", "x-shardcompute-unenforced-tools")


class ModelCorsMiddleware:
    """ASGI middleware that answers preflights and marks responses for pages of these origins (`*`: of any)."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=list(_EXPOSED),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_for_pages = scope["type"] == "http" and scope["path"].startswith(_MODEL_PATHS)
        await (self._cors if is_for_pages else self._app)(scope, receive, send)
