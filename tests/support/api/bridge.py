"""Clients that speak to an application in the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

LOCAL_SECRET = "local-secret-of-tests"
"""What applications of tests take for the secret of commands on their own machine."""


class Bridge(httpx.BaseTransport):
    """A synchronous way into an ASGI application, as if from `address`."""

    def __init__(self, app: Any, address: str = "127.0.0.1") -> None:
        self._app, self._address = app, address

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def run() -> httpx.Response:
            forwarded = httpx.Request(
                request.method, request.url, headers=request.headers, content=request.read()
            )
            transport = httpx.ASGITransport(app=self._app, client=(self._address, 1))
            response = await transport.handle_async_request(forwarded)
            body = await response.aread()
            return httpx.Response(response.status_code, headers=response.headers, content=body)

        return asyncio.run(run())
