"""A hub on this machine: the routes that are used, with ranges, redirects, tokens, and failures and lies on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What happens to one request in place of a good answer."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    flips: bool = False
    """Every byte of the answer is wrong."""
    shifts: bool = False
    """The answer is said to be of the bytes behind those that were asked for."""


@dataclass
class Seen:
    """One request as it arrived."""

    server: str
    path: str
    headers: dict[str, str]


class FakeHub:
    """`files` by repository and name; names in `large` have a hash and are served by the storage host."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes | mmap.mmap]] = {}
        self._sha256: dict[tuple[str, str], str] = {}
        self.large: set[str] = set()
        self.announced_sha256: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.seen: list[Seen] = []
        self.token: str | None = None
        self.has_ranges = True
        self.page_size = 1000
        self.etag: str | None = '"one"'
        self.every: dict[str, Fault] = {}
        """What happens to every request whose path holds this."""
        self.sent_bytes = 0
        """Of files, by both hosts."""
        self.url = ""
        self.storage_url = ""

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def put(self, repo: str, name: str, content: bytes | mmap.mmap, *, large: bool = False) -> None:
        self._sha256.pop((repo, name), None)
        self.files.setdefault(repo, {})[name] = content
        if large:
            self.large.add(name)

    def fail(self, route: str, *faults: Fault) -> None:
        """The next requests whose path holds `route` go wrong, one fault each."""
        self.faults.setdefault(route, []).extend(faults)

    def put_folder(self, repo: str, folder: Path) -> None:
        """All files of a folder, the weights as large ones, which are not read into memory."""
        for path in sorted(folder.iterdir()):
            if path.suffix not in (".safetensors", ".gguf"):
                self.put(repo, path.name, path.read_bytes())
                continue
            with path.open("rb") as file:
                self.put(repo, path.name, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), large=True)

    def take_fault(self, path: str) -> Fault | None:
        found = next(
            (faults.pop(0) for route, faults in self.faults.items() if route in path and faults), None
        )
        return found or next((fault for route, fault in self.every.items() if route in path), None)

    def requests(self, route: str, server: str | None = None) -> list[Seen]:
        return [one for one in self.seen if route in one.path and server in (None, one.server)]

    def _hash(self, repo: str, name: str) -> str:
        if (repo, name) not in self._sha256:
            self._sha256[repo, name] = hashlib.sha256(self.files[repo][name]).hexdigest()
        return self._sha256[repo, name]

    def tree(self, repo: str) -> list[dict[str, object]]:
        items: list[dict[str, object]] = [{"type": "directory", "path": "folder", "oid": "x", "size": 0}]
        for name, content in self.files[repo].items():
            item: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": "x"}
            if name in self.large:
                sha = self.announced_sha256.get(name) or self._hash(repo, name)
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
                return self.answer(200, content[:], headers, cut)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last or len(content) - 1) + 1
            if start >= len(content):
                return self.answer(416, b"")
            shift = 1 if fault and fault.shifts else 0
            headers["Content-Range"] = f"bytes {start + shift}-{stop - 1 + shift}/{len(content)}"
            body = content[start:stop]
            if fault is not None and fault.flips:
                body = bytes(byte ^ 1 for byte in body)
            hub.sent_bytes += len(body[:cut])
            return self.answer(206, body, {**headers, **(fault.headers if fault else {})}, cut)

        def answer(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a reader may be killed
                self.wfile.write(body[:cut])

    return Requests


def _serve(hub: FakeHub, server: str) -> tuple[ThreadingHTTPServer, threading.Thread]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), _requests_class(hub, server))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    return http, thread


@contextlib.contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub at `url` and its storage host, another origin, at `storage_url`, until the block ends."""
    servers = [_serve(hub, "hub"), _serve(hub, "storage")]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{http.server_address[1]}" for http, _ in servers)
    try:
        yield hub
    finally:
        for http, thread in servers:
            http.shutdown()
            thread.join()
            http.server_close()
