"""Models on the Hugging Face hub or a mirror of it, over HTTP.

`Hub` lists a repository at one commit and downloads files so that an interrupted download continues where it
stopped; `HubBytes` reads ranges of a remote file, for shards that need only some of it. What fails for the
moment (timeouts, broken connections, 429, 5xx) is tried again a bounded number of times; what fails for good
says why.

The access token goes to the hub alone, never to the host a redirect points to, and only encrypted (or to this
machine). Downloads redirect to storage hosts, so a message names the repository and file, never a signed
address.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from shardcompute.core.closing import Closing
from shardcompute.core.errors import CorruptModelError, SourceError
from shardcompute.core.settings import Settings
from shardcompute.weights.formats.bytes import check_range
from shardcompute.weights.sources.disk import PartialFile, disk_errors, hash_file
from shardcompute.weights.sources.hub_files import HubFile, HubListing
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.sources.reference import HubReference
from shardcompute.weights.sources.retry import BusyError, check_status, retry

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_LISTING_LIMIT_BYTES = 32 << 20
_MAX_LISTING_PAGES = 100
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
_EXPIRED = (401, 403, 404, 410)

T = TypeVar("T")


class _Revision(msgspec.Struct):
    sha: str


class _LargeFile(msgspec.Struct):
    oid: str


class _TreeItem(msgspec.Struct):
    type: str
    path: str
    size: int = 0
    lfs: _LargeFile | None = None


class Hub(Closing):
    """A connection to the hub; safe to use from several threads. `sleep` waits between attempts."""

    def __init__(self, settings: Settings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        if settings.offline:
            raise SourceError(
                "the hub is not asked because this is set to work offline",
                hint="unset SHARDCOMPUTE_OFFLINE and HF_HUB_OFFLINE, or use a model that is on this machine",
            )
        self.url = settings.hub_url
        self.host = httpx.URL(self.url).host
        self._sleep = sleep
        is_private = self.url.startswith("https://") or self.host in _LOOPBACK_HOSTS
        self._token = settings.hub_token if is_private else None
        self._client = _open_client()

    def close(self) -> None:
        self._client.close()

    def list_files(self, reference: HubReference) -> HubListing:
        """The files of a repository, at the commit that the reference's revision stands for now."""
        api = f"{self.url}/api/models/{quote(reference.repo)}"
        what = f"{reference.repo}@{reference.revision}"
        commit, _ = self._get_json(f"{api}/revision/{quote(reference.revision, safe='')}", what, _Revision)
        if not _COMMIT.fullmatch(commit.sha):
            self._refuse_answer(what)
        files: dict[str, HubFile] = {}
        url: str | None = f"{api}/tree/{commit.sha}?recursive=1"
        for _ in range(_MAX_LISTING_PAGES):
            if url is None:
                return HubListing(reference.repo, commit.sha, files)
            items, url = self._get_json(url, what, list[_TreeItem])
            for item in items:
                if item.type == "file" and item.size >= 0:
                    match = _SHA256.fullmatch(item.lfs.oid) if item.lfs else None
                    files[item.path] = HubFile(item.path, item.size, match[1] if match else None)
        self._refuse_answer(what)

    def read(self, listing: HubListing, name: str, limit_bytes: int) -> bytes:
        """The whole of a small file."""
        file = listing.files[name]
        if file.size > limit_bytes:
            raise CorruptModelError(
                f"{listing.repo}/{name} has {file.size} bytes, more than such a file can have",
                hint="check that the repository holds what its name says",
            )
        return self.attempt(name, lambda: self._get_body(self.file_url(listing, name), name, file.size)[0])

    def open(self, listing: HubListing, name: str) -> HubBytes:
        """A remote file of which ranges can be read. It must be used before this hub is closed."""
        url = self.file_url(listing, name)
        return HubBytes(self, f"{listing.repo}/{name}", url, listing.files[name], listing.commit)

    def download(self, listing: HubListing, name: str, destination: Path, progress: Progress) -> str:
        """Bring a file to `destination`, continuing an earlier attempt; gives its SHA-256."""
        file = listing.files[name]
        progress.start(name, file.size)
        try:
            if file.sha256 is not None and destination.is_file():
                with disk_errors(destination):
                    if hash_file(destination) == file.sha256:
                        progress.advance(file.size)
                        return file.sha256
            with PartialFile(destination, file.size, file.sha256) as partial:
                url = self.file_url(listing, name)
                progress.advance(_keep_or_drop(partial, file))
                self.attempt(
                    name, lambda: self._continue(url, file, partial, progress), position=lambda: partial.size
                )
                return partial.finish()
        finally:
            progress.finish()

    def file_url(self, listing: HubListing, name: str) -> str:
        return f"{self.url}/{quote(listing.repo)}/resolve/{listing.commit}/{quote(name)}"

    @contextlib.contextmanager
    def stream(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """One request, as bytes on the wire: nothing is compressed, so ranges count the file's own bytes."""
        sent = {"Accept-Encoding": "identity", **headers}
        if self._token is not None and url.startswith(f"{self.url}/"):
            sent["Authorization"] = f"Bearer {self._token.reveal()}"
        with self._client.stream("GET", url, headers=sent) as response:
            if response.is_success and response.headers.get("Content-Encoding", "identity") != "identity":
                raise SourceError(
                    f"{self.host} compresses files although it was asked not to", hint="use another mirror"
                )
            yield response

    def _continue(self, url: str, file: HubFile, partial: PartialFile, progress: Progress) -> None:
        """One attempt to get what is still missing."""
        if partial.size == file.size and partial.size > 0:
            return
        headers = {}
        if partial.size:
            headers["Range"] = f"bytes={partial.size}-"
            if file.sha256 is None:
                headers["If-Range"] = partial.identity
        with self.stream(url, headers) as response:
            etag = _strong_etag(response)
            if response.status_code == 416 or (
                response.status_code == 206 and not _follows(response, partial, file)
            ):
                progress.advance(-partial.size)
                partial.restart("")
                raise BusyError("the part already here does not fit the file")
            check_status(response, file.name, self.host)
            if response.status_code == 200:
                progress.advance(-partial.size)
                partial.restart(file.sha256 or etag)
            for chunk in response.iter_raw():
                partial.write(chunk)
                progress.advance(len(chunk))
        if partial.size < file.size:
            raise BusyError(f"the answer ended after {partial.size} of {file.size} bytes")

    def _get_json(self, url: str, what: str, kind: type[T]) -> tuple[T, str | None]:
        """A decoded answer and the address of the next page, if any."""
        body, response = self.attempt(what, lambda: self._get_body(url, what, None))
        following = response.links.get("next", {}).get("url")
        try:
            answer = msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._refuse_answer(what)
        if following is not None and not following.startswith(f"{self.url}/"):
            self._refuse_answer(what)
        return answer, following

    def _get_body(self, url: str, what: str, size: int | None) -> tuple[bytes, httpx.Response]:
        body = bytearray()
        with self.stream(url, {}) as response:
            check_status(response, what, self.host)
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > (_LISTING_LIMIT_BYTES if size is None else size):
                    self._refuse_answer(what)
        if size is not None and len(body) < size:
            raise BusyError(f"the answer ended after {len(body)} of {size} bytes")
        return bytes(body), response

    def _refuse_answer(self, what: str) -> NoReturn:
        raise SourceError(
            f"{self.host} gave an answer about {what} that is not what a hub answers",
            hint="check SHARDCOMPUTE_HUB_URL and HF_ENDPOINT, and that no login page is in between",
        )

    def attempt(self, what: str, action: Callable[[], T], position: Callable[[], int] = lambda: 0) -> T:
        return retry(action, what=what, host=self.host, sleep=self._sleep, position=position)


def open_hubs(settings: Settings) -> list[Hub]:
    """The hub and its mirrors, to be asked for the same files; none where the network is not to be used. The token goes
    to the hub alone."""
    if settings.offline:
        return []
    mirrors = [replace(settings, hub_url=url, hub_token=None) for url in settings.hub_mirrors]
    with contextlib.ExitStack() as on_error:
        hubs = [on_error.enter_context(Hub(each)) for each in (settings, *mirrors)]
        on_error.pop_all()
        return hubs


class HubBytes:
    """A file on the hub of which only ranges are fetched. `bytes_read` counts what was read so far."""

    def __init__(self, hub: Hub, name: str, url: str, file: HubFile, commit: str) -> None:
        self.name = name
        self.size = file.size
        self.bytes_read = 0
        self._file = file
        self._commit = commit
        self._etag = ""
        self._hub = hub
        self._url = url
        # Where the hub redirected to last: asking there directly halves the round trips of the next reads.
        self._storage_url: str | None = None

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self.name, self.size, offset, length)
        view = memoryview(bytearray(length))
        done = 0

        def fetch() -> None:
            nonlocal done
            for chunk in self.stream(offset + done, offset + length):
                view[done : done + len(chunk)] = chunk
                done += len(chunk)

        if length:
            self._hub.attempt(self.name, fetch, position=lambda: done)
        self.bytes_read += length
        return view

    def close(self) -> None:
        """Nothing to free: the connection belongs to the hub."""

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop` as they come, from one request. `BusyError` and what httpx raises may pass;
        `SourceError`, `UnknownModelError` and `CorruptModelError` do not."""
        storage_url = self._storage_url
        with self._hub.stream(storage_url or self._url, {"Range": f"bytes={start}-{stop - 1}"}) as response:
            if storage_url is not None and response.status_code in _EXPIRED:
                self._storage_url = None
                raise BusyError("the storage address expired", wait_s=0.0)
            check_status(response, self.name, self._hub.host)
            if response.status_code != 206:
                raise SourceError(
                    f"{self._hub.host} does not serve parts of {self.name}",
                    hint="fetch the whole model first with: shardcompute pull",
                )
            if _range_of(response) != (start, stop - 1, self.size):
                raise CorruptModelError(
                    f"{self.name} is not the file that was announced: other bytes were given than asked for",
                    hint="try again; the file may have been replaced meanwhile",
                )
            self._check_identity(response)
            self._storage_url = str(response.url)
            left = stop - start
            for chunk in response.iter_raw():
                if len(chunk) > left:
                    raise CorruptModelError(
                        f"{self.name}: more bytes were given than asked for", hint="try again"
                    )
                left -= len(chunk)
                yield chunk
        if left:
            raise BusyError(f"the answer ended {left} bytes early")

    def _check_identity(self, response: httpx.Response) -> None:
        """CorruptModelError where the hub itself says that this is another version of the file."""
        answers = (*response.history, response)
        commits = {answer.headers.get("X-Repo-Commit", self._commit) for answer in answers}
        linked = {answer.headers.get("X-Linked-ETag", "").strip('"') for answer in answers}
        hashes = {text for text in linked if _SHA256.fullmatch(text)}
        etag = _strong_etag(response)
        was_replaced = bool(self._etag and etag and etag != self._etag)
        if commits != {self._commit} or (self._file.sha256 and hashes - {self._file.sha256}) or was_replaced:
            raise CorruptModelError(
                f"{self.name} at {self._hub.host} is not the file of commit {self._commit[:12]} any more",
                hint="the mirror may mix versions; use another one, or load the model again",
            )
        self._etag = etag or self._etag


def _open_client() -> httpx.Client:
    try:
        return httpx.Client(
            timeout=_TIMEOUT, follow_redirects=True, max_redirects=10, headers={"User-Agent": "shardcompute"}
        )
    except (ImportError, ValueError, httpx.InvalidURL, OSError) as error:
        raise SourceError(
            f"the proxy or certificate settings of this system cannot be used: {error}",
            hint="check HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE",
        ) from error


def _keep_or_drop(partial: PartialFile, file: HubFile) -> int:
    """Keep what an earlier attempt left if it is of this very file; gives its size."""
    is_same = partial.identity == file.sha256 if file.sha256 else partial.identity.startswith('"')
    # Without a hash only the server can say whether a file is still the same, and a whole file asks for
    # nothing.
    if partial.size and (not is_same or (file.sha256 is None and partial.size == file.size)):
        partial.restart("")
    return partial.size


def _follows(response: httpx.Response, partial: PartialFile, file: HubFile) -> bool:
    is_next = _range_of(response) == (partial.size, file.size - 1, file.size)
    return is_next and (file.sha256 is not None or _strong_etag(response) in ("", partial.identity))


def _range_of(response: httpx.Response) -> tuple[int, int, int] | None:
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _strong_etag(response: httpx.Response) -> str:
    etag = str(response.headers.get("ETag", ""))
    return etag if etag.startswith('"') else ""
