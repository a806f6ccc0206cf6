"""A hub on this machine: the routes that are used, with ranges, redirects, tokens and failures on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from shardcompute.core.settings import Secret, Settings
from shardcompute.weights.formats.bytes import LocalBytes

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What happens to one request in place of a good answer."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None


@dataclass
class Seen:
    """One request as it arrived."""

    server: str
    path: str
    headers: dict[str, str]


class FakeHub:
    """`files` by repository and name; names in `large` have a hash and are served by the storage host."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: set[str] = set()
        self.announced_sha256: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.seen: list[Seen] = []
        self.token: str | None = None
        self.has_ranges = True
        self.page_size = 1000
        self.etag: str | None = '"one"'
        self.url = ""
        self.storage_url = ""

    def put(self, repo: str, name: str, content: bytes, *, large: bool = False) -> None:
        self.files.setdefault(repo, {})[name] = content
        if large:
            self.large.add(name)

    def fail(self, route: str, *faults: Fault) -> None:
        """The next requests whose path holds `route` go wrong, one fault each."""
        self.faults.setdefault(route, []).extend(faults)

    def take_fault(self, path: str) -> Fault | None:
        return next(
            (faults.pop(0) for route, faults in self.faults.items() if route in path and faults), None
        )

    def requests(self, route: str, server: str | None = None) -> list[Seen]:
        return [one for one in self.seen if route in one.path and server in (None, one.server)]

    def tree(self, repo: str) -> list[dict[str, object]]:
        items: list[dict[str, object]] = [{"type": "directory", "path": "folder", "oid": "x", "size": 0}]
        for name, content in self.files[repo].items():
            item: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": "x"}
            if name in self.large:
                sha = self.announced_sha256.get(name, hashlib.sha256(content).hexdigest())
                item["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 130}
            items.append(item)
        return items


def _requests_class(hub: FakeHub, server: str) -> type[BaseHTTPRequestHandler]:
    class Requests(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path)
            hub.seen.append(Seen(server, path, {name.lower(): value for name, value in self.headers.items()}))
            fault = hub.take_fault(path) if server == "hub" or "/storage/" in path else None
            if fault is not None and fault.status is not None:
                self.answer(fault.status, b"", fault.headers)
            elif server == "hub" and hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, b"{}")
            else:
                self.route(path, url.query, fault)

        def route(self, path: str, query: str, fault: Fault | None) -> None:
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in hub.files:
                self.api("/".join(parts[2:4]), parts[4], query)
            elif "resolve" in parts and "/".join(parts[:2]) in hub.files:
                self.file("/".join(parts[:2]), "/".join(parts[4:]), fault, is_storage=False)
            elif parts[0] == "storage":
                self.file("/".join(parts[1:3]), "/".join(parts[3:]), fault, is_storage=True)
            else:
                self.answer(404, b"{}")

        def api(self, repo: str, route: str, query: str) -> None:
            if route == "revision":
                return self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())
            items = hub.tree(repo)
            start = int(query.partition("cursor=")[2] or 0)
            stop = start + hub.page_size
            following = f"{hub.url}/api/models/{repo}/tree/{COMMIT}?recursive=1&cursor={stop}"
            headers = {"Link": f'<{following}>; rel="next"'} if stop < len(items) else {}
            return self.answer(200, json.dumps(items[start:stop]).encode(), headers)

        def file(self, repo: str, name: str, fault: Fault | None, *, is_storage: bool) -> None:
            content = hub.files[repo].get(name)
            if content is None:
                return self.answer(404, b"")
            if name in hub.large and hub.storage_url and not is_storage:
                return self.answer(
                    302, b"", {"Location": f"{hub.storage_url}/storage/{repo}/{name}?signature=s"}
                )
            headers = {"ETag": hub.etag} if hub.etag else {}
            wanted = self.headers.get("Range")
            is_same = self.headers.get("If-Range") in (None, hub.etag)
            cut = fault.cut_after if fault else None
            if not (wanted and is_same and hub.has_ranges):
                return self.answer(200, content, headers, cut)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last or len(content) - 1) + 1
            if start >= len(content):
                return self.answer(416, b"")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return self.answer(206, content[start:stop], headers, cut)

        def answer(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut])

    return Requests


def _serve(hub: FakeHub, server: str) -> tuple[ThreadingHTTPServer, threading.Thread]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), _requests_class(hub, server))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    return http, thread


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub at `url` and its storage host, another origin, at `storage_url`."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    hub = FakeHub()
    servers = [_serve(hub, "hub"), _serve(hub, "storage")]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{http.server_address[1]}" for http, _ in servers)
    yield hub
    for http, thread in servers:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[bytes], LocalBytes]]:
    """Opens a file of these bytes."""
    sources: list[LocalBytes] = []

    def open_bytes(content: bytes) -> LocalBytes:
        path = tmp_path / "model"
        path.write_bytes(content)
        sources.append(LocalBytes(path))
        return sources[-1]

    yield open_bytes
    for source in sources:
        source.close()


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture
def hub_settings(fake_hub: FakeHub, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", hub_url=fake_hub.url, hub_token=Secret("hf_secret"))


@dataclass
class RecordedProgress:
    """What was told to a watcher."""

    labels: list[str] = field(default_factory=list)
    done: int = 0
    open_tasks: int = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        assert self.open_tasks == 0
        self.labels.append(label)
        self.done = 0
        self.open_tasks += 1

    def advance(self, count_bytes: int) -> None:
        self.done += count_bytes

    def finish(self) -> None:
        self.open_tasks -= 1


@pytest.fixture
def progress() -> RecordedProgress:
    return RecordedProgress()
