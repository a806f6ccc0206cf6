"""The page's files: each served as what it is, under a strict policy, and none that asks anybody else."""

from __future__ import annotations

import asyncio
import re
from importlib import resources
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from shardcompute.web import page_routes

STATIC = Path(str(resources.files("shardcompute.web"))) / "static"
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())


def ask(path: str, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=Starlette(routes=page_routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def test_page_and_every_file_have_a_route() -> None:
    expected = {
        "/" if path.name == "index.html" else f"/page/{path.relative_to(STATIC).as_posix()}" for path in FILES
    }
    assert {route.path for route in page_routes()} == expected


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/design.css", "/page/icon.svg"])
def test_policy_lets_nothing_in_from_elsewhere(path: str) -> None:
    response = ask(path)
    assert response.status_code == 200
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_unchanged_file_is_not_sent_twice() -> None:
    first = ask("/page/app.js")
    again = ask("/page/app.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert ask("/page/../page.py").status_code == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_hold_no_foreign_address_and_no_markup_from_text(path: Path) -> None:
    text = path.read_text()
    foreign = [
        found
        for found in re.findall(r"https?://[^\s\"'`)]+", text)
        if "www.w3.org" not in found and "${" not in found
    ]
    assert foreign == []
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text)


def test_modules_import_files_that_exist() -> None:
    for path in FILES:
        for name in re.findall(r'from "(\.[^"]+)"', path.read_text()):
            assert (path.parent / name).resolve().is_file(), (path.name, name)
