from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from shardcompute.api import create_app


def _load_fakes() -> ModuleType:
    """Test folders are no packages, so the module beside this file is loaded by its path, once."""
    name = "shardcompute_api_fakes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fakes.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


fakes_module = _load_fakes()


@pytest.fixture
def fakes() -> Any:
    return fakes_module


@pytest.fixture
def service(fakes: Any) -> Any:
    return fakes.FakeService()


@pytest.fixture
def app(service: Any) -> Starlette:
    return create_app(service)


Call = Callable[..., httpx.Response]


@pytest.fixture
def call() -> Call:
    """Sends one request to an application in this process."""

    def send(app: Starlette, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    return send


@pytest.fixture
def chat(app: Starlette, call: Call) -> Call:
    """Posts to chat completions with a default message."""

    def post(**fields: Any) -> httpx.Response:
        body = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return call(app, "POST", "/v1/chat/completions", json=body)

    return post


@pytest.fixture
def complete(app: Starlette, call: Call) -> Call:
    """Posts to plain completions with a default prompt."""

    def post(**fields: Any) -> httpx.Response:
        return call(app, "POST", "/v1/completions", json={"model": "org/tiny", "prompt": "hi", **fields})

    return post
