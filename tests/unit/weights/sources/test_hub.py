"""The hub's client against a hub on this machine that breaks, redirects and refuses on demand."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError, UnknownModelError
from shardcompute.core.settings import Secret, Settings
from shardcompute.weights.sources import disk
from shardcompute.weights.sources.hub import Hub
from shardcompute.weights.sources.progress import NullProgress
from shardcompute.weights.sources.reference import HubReference
from shardcompute.weights.sources.retry import ATTEMPTS, CONNECT_ATTEMPTS

REPO = HubReference("org/repo")
CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()
BIG = "model.safetensors"
SMALL = "config.json"


class Naps(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
def hub(fake_hub: Any, hub_settings: Settings, naps: Naps) -> Iterator[Hub]:
    fake_hub.put("org/repo", SMALL, b'{"a": 1}')
    fake_hub.put("org/repo", BIG, CONTENT, large=True)
    with Hub(hub_settings, sleep=naps) as client:
        yield client


def test_listing(hub: Hub, fake_hub: Any) -> None:
    fake_hub.page_size = 1
    listing = hub.list_files(REPO)
    assert listing.commit == "0123456789abcdef0123456789abcdef01234567"
    assert {name: (file.size, file.sha256) for name, file in listing.files.items()} == {
        SMALL: (8, None),
        BIG: (len(CONTENT), SHA256),
    }
    assert len(fake_hub.requests("/tree/")) == 3


def test_revision_is_one_part_of_the_address(hub: Hub, fake_hub: Any) -> None:
    hub.list_files(HubReference("org/repo", "refs/pr/1"))
    assert fake_hub.seen[0].path == "/api/models/org/repo/revision/refs/pr/1"


def test_small_file(hub: Hub) -> None:
    assert hub.read(hub.list_files(REPO), SMALL, 100) == b'{"a": 1}'
    with pytest.raises(CorruptModelError, match="8 bytes"):
        hub.read(hub.list_files(REPO), SMALL, 7)


def test_unknown_repository(hub: Hub) -> None:
    with pytest.raises(UnknownModelError, match="org/other") as caught:
        hub.list_files(HubReference("org/other"))
    assert "spelling" in caught.value.hint


def test_hidden_repository_is_unknown(hub: Hub, fake_hub: Any, fault: Any) -> None:
    fake_hub.fail("/api/", fault(401, {"X-Error-Code": "RepoNotFound"}))
    with pytest.raises(UnknownModelError):
        hub.list_files(REPO)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access_names_the_token_and_the_licence(
    hub: Hub, fake_hub: Any, fault: Any, naps: Naps, status: int
) -> None:
    listing = hub.list_files(REPO)
    fake_hub.fail("/resolve/", fault(status))
    with pytest.raises(SourceError, match="refuses") as caught:
        hub.open(listing, BIG).read(0, 10)
    assert "HF_TOKEN" in caught.value.hint
    assert "licence" in caught.value.hint
    assert "hf_secret" not in str(caught.value)
    assert naps == []


def test_token_goes_to_the_hub_and_not_to_the_storage(hub: Hub, fake_hub: Any, tmp_path: Path) -> None:
    fake_hub.token = "hf_secret"
    listing = hub.list_files(REPO)
    hub.download(listing, BIG, tmp_path / BIG, NullProgress())
    source = hub.open(listing, BIG)
    source.read(0, 4)
    source.read(4, 4)
    assert all(one.headers["authorization"] == "Bearer hf_secret" for one in fake_hub.requests("", "hub"))
    stored = fake_hub.requests("/storage/", "storage")
    assert len(stored) == 3
    assert not any("authorization" in one.headers for one in stored)


def test_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    settings = Settings(tmp_path, hub_url="http://mirror.example", hub_token=Secret("hf_secret"))
    with Hub(settings) as hub:
        assert hub._token is None


def test_offline_never_opens_a_connection(hub_settings: Settings) -> None:
    settings = Settings(hub_settings.data_dir, hub_settings.hub_url, offline=True)
    with pytest.raises(SourceError, match="offline"):
        Hub(settings)


def test_nobody_listens(fake_hub: Any, naps: Naps, tmp_path: Path) -> None:
    lost = Hub(Settings(tmp_path, hub_url="http://127.0.0.1:9"), sleep=naps)
    with lost, pytest.raises(SourceError, match="cannot be fetched") as caught:
        lost.list_files(REPO)
    assert "local folders" in caught.value.hint
    assert len(naps) == CONNECT_ATTEMPTS - 1


def test_busy_hub_is_asked_again_as_it_says(hub: Hub, fake_hub: Any, fault: Any, naps: Naps) -> None:
    fake_hub.fail("/revision/", fault(429, {"Retry-After": "7"}), fault(503), fault(500))
    assert hub.list_files(REPO).files
    assert naps == [7.0, 1.0, 2.0]


def test_retry_after_may_be_a_date(hub: Hub, fake_hub: Any, fault: Any, naps: Naps) -> None:
    fake_hub.fail("/revision/", fault(429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}))
    hub.list_files(REPO)
    assert naps == [0.0]


def test_attempts_are_bounded(hub: Hub, fake_hub: Any, fault: Any, naps: Naps) -> None:
    fake_hub.fail("/revision/", *[fault(503)] * 50)
    with pytest.raises(SourceError, match="503"):
        hub.list_files(REPO)
    assert len(fake_hub.requests("/revision/")) == ATTEMPTS
    assert len(naps) == ATTEMPTS - 1


def test_long_wait_is_refused_at_once(hub: Hub, fake_hub: Any, fault: Any, naps: Naps) -> None:
    fake_hub.fail("/revision/", fault(429, {"Retry-After": "3600"}))
    with pytest.raises(SourceError, match="429"):
        hub.list_files(REPO)
    assert naps == []


def test_answer_that_no_hub_gives(hub: Hub, fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_hub, "tree", lambda repo: "<html>login</html>")
    with pytest.raises(SourceError, match="not what a hub answers"):
        hub.list_files(REPO)


def test_next_page_must_be_on_the_hub(hub: Hub, fake_hub: Any, fault: Any) -> None:
    fake_hub.page_size = 1
    fake_hub.url = "http://elsewhere.example"
    with pytest.raises(SourceError, match="not what a hub answers"):
        hub.list_files(REPO)


def test_redirects_without_end(hub: Hub, fake_hub: Any, fault: Any, naps: Naps) -> None:
    fake_hub.fail("/revision/", *[fault(302, {"Location": "/api/models/org/repo/revision/main"})] * 50)
    with pytest.raises(SourceError, match="redirects"):
        hub.list_files(REPO)
    assert naps == []


# Ranges.


def test_ranges(hub: Hub, fake_hub: Any) -> None:
    source = hub.open(hub.list_files(REPO), BIG)
    assert (source.name, source.size) == (f"org/repo/{BIG}", len(CONTENT))
    assert bytes(source.read(300, 1000)) == CONTENT[300:1300]
    assert bytes(source.read(len(CONTENT) - 3, 3)) == CONTENT[-3:]
    assert bytes(source.read(5, 0)) == b""
    assert source.bytes_read == 1003
    assert [one.headers["range"] for one in fake_hub.requests("/storage/")] == [
        "bytes=300-1299",
        "bytes=10237-10239",
    ]
    with pytest.raises(CorruptModelError, match="cut short"):
        source.read(len(CONTENT) - 3, 4)


def test_storage_is_asked_directly_until_its_address_expires(
    hub: Hub, fake_hub: Any, fault: Any, naps: Naps
) -> None:
    source = hub.open(hub.list_files(REPO), BIG)
    source.read(0, 10)
    source.read(10, 10)
    assert len(fake_hub.requests("/resolve/")) == 1
    fake_hub.fail("/storage/", fault(403))
    assert bytes(source.read(20, 10)) == CONTENT[20:30]
    assert len(fake_hub.requests("/resolve/")) == 2
    assert naps == [0.0]


def test_broken_range_continues_where_it_broke(hub: Hub, fake_hub: Any, fault: Any) -> None:
    source = hub.open(hub.list_files(REPO), BIG)
    fake_hub.fail("/storage/", fault(cut_after=100), fault(503), fault(cut_after=50))
    assert bytes(source.read(1000, 500)) == CONTENT[1000:1500]
    ranges = [one.headers["range"] for one in fake_hub.requests("/storage/")]
    assert ranges == ["bytes=1000-1499", "bytes=1100-1499", "bytes=1100-1499", "bytes=1150-1499"]


def test_server_without_ranges(hub: Hub, fake_hub: Any) -> None:
    fake_hub.has_ranges = False
    with pytest.raises(SourceError, match="does not serve parts") as caught:
        hub.open(hub.list_files(REPO), BIG).read(0, 10)
    assert "pull" in caught.value.hint


def test_file_that_was_replaced_meanwhile(hub: Hub, fake_hub: Any) -> None:
    source = hub.open(hub.list_files(REPO), BIG)
    fake_hub.put("org/repo", BIG, CONTENT + b"more", large=True)
    with pytest.raises(CorruptModelError, match="not the file that was announced"):
        source.read(0, 10)


def test_ranges_from_several_threads(hub: Hub) -> None:
    source = hub.open(hub.list_files(REPO), BIG)
    results: dict[int, bytes] = {}

    def read(offset: int) -> None:
        results[offset] = bytes(source.read(offset, 100))

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(0, 800, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {offset: CONTENT[offset : offset + 100] for offset in range(0, 800, 100)}


# Downloads.


def test_download(hub: Hub, tmp_path: Path, progress: Any) -> None:
    listing = hub.list_files(REPO)
    assert hub.download(listing, BIG, tmp_path / "deep" / BIG, progress) == SHA256
    assert (tmp_path / "deep" / BIG).read_bytes() == CONTENT
    assert (progress.labels, progress.done, progress.open_tasks) == ([BIG], len(CONTENT), 0)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [BIG]


def test_download_continues_within_one_call(
    hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path, progress: Any
) -> None:
    fake_hub.fail("/storage/", fault(cut_after=3000), fault(503), fault(cut_after=2000))
    hub.download(hub.list_files(REPO), BIG, tmp_path / BIG, progress)
    assert (tmp_path / BIG).read_bytes() == CONTENT
    assert [one.headers.get("range") for one in fake_hub.requests("/storage/")] == [
        None,
        "bytes=3000-",
        "bytes=3000-",
        "bytes=5000-",
    ]
    assert progress.done == len(CONTENT)


def _interrupt(hub: Hub, fake_hub: Any, fault: Any, name: str, destination: Path, after: int) -> None:
    fake_hub.fail(f"/{name}", *[fault(cut_after=after), *[fault(503)] * (ATTEMPTS - 1)])
    # The first request of a redirected file meets the fault at the storage host only.
    with pytest.raises(SourceError, match="cannot be fetched"):
        hub.download(hub.list_files(REPO), name, destination, NullProgress())
    assert not destination.exists()


def test_download_continues_in_another_call(
    hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path, progress: Any
) -> None:
    fake_hub.storage_url = ""
    _interrupt(hub, fake_hub, fault, BIG, tmp_path / BIG, 4000)
    fake_hub.seen.clear()
    hub.download(hub.list_files(REPO), BIG, tmp_path / BIG, progress)
    (request,) = fake_hub.requests("/resolve/")
    assert request.headers["range"] == "bytes=4000-"
    assert "if-range" not in request.headers
    assert (tmp_path / BIG).read_bytes() == CONTENT
    assert progress.done == len(CONTENT)


def test_part_of_another_version_is_not_continued(
    hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path
) -> None:
    fake_hub.storage_url = ""
    _interrupt(hub, fake_hub, fault, BIG, tmp_path / BIG, 4000)
    fake_hub.put("org/repo", BIG, CONTENT[::-1], large=True)
    hub.download(hub.list_files(REPO), BIG, tmp_path / BIG, NullProgress())
    assert (tmp_path / BIG).read_bytes() == CONTENT[::-1]


def test_without_a_hash_the_server_decides_whether_to_continue(
    hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path, progress: Any
) -> None:
    fake_hub.put("org/repo", "merges.txt", CONTENT)
    _interrupt(hub, fake_hub, fault, "merges.txt", tmp_path / "merges.txt", 4000)
    fake_hub.seen.clear()
    fake_hub.fail("/merges.txt", fault(cut_after=1000))
    hub.download(hub.list_files(REPO), "merges.txt", tmp_path / "merges.txt", progress)
    headers = [one.headers for one in fake_hub.requests("/resolve/")]
    assert [(one["range"], one["if-range"]) for one in headers] == [
        ("bytes=4000-", '"one"'),
        ("bytes=5000-", '"one"'),
    ]
    assert (tmp_path / "merges.txt").read_bytes() == CONTENT


def test_changed_etag_starts_over(hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path, progress: Any) -> None:
    fake_hub.put("org/repo", "merges.txt", CONTENT)
    _interrupt(hub, fake_hub, fault, "merges.txt", tmp_path / "merges.txt", 4000)
    fake_hub.put("org/repo", "merges.txt", CONTENT[::-1])
    fake_hub.etag = '"two"'
    hub.download(hub.list_files(REPO), "merges.txt", tmp_path / "merges.txt", progress)
    assert (tmp_path / "merges.txt").read_bytes() == CONTENT[::-1]
    assert progress.done == len(CONTENT)


def test_without_hash_and_etag_it_starts_over(hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path) -> None:
    fake_hub.etag = None
    fake_hub.put("org/repo", "merges.txt", CONTENT)
    _interrupt(hub, fake_hub, fault, "merges.txt", tmp_path / "merges.txt", 4000)
    fake_hub.seen.clear()
    hub.download(hub.list_files(REPO), "merges.txt", tmp_path / "merges.txt", NullProgress())
    assert "range" not in fake_hub.requests("/resolve/")[0].headers
    assert (tmp_path / "merges.txt").read_bytes() == CONTENT


def test_server_without_ranges_sends_the_whole_again(
    hub: Hub, fake_hub: Any, fault: Any, tmp_path: Path, progress: Any
) -> None:
    fake_hub.has_ranges = False
    fake_hub.fail("/storage/", fault(cut_after=3000))
    hub.download(hub.list_files(REPO), BIG, tmp_path / BIG, progress)
    assert (tmp_path / BIG).read_bytes() == CONTENT
    assert progress.done == len(CONTENT)


def test_wrong_hash_is_refused_and_deleted(hub: Hub, fake_hub: Any, tmp_path: Path) -> None:
    fake_hub.announced_sha256[BIG] = "0" * 64
    with pytest.raises(CorruptModelError, match="SHA-256"):
        hub.download(hub.list_files(REPO), BIG, tmp_path / BIG, NullProgress())
    assert list(tmp_path.iterdir()) == []


def test_longer_file_than_announced_is_refused(hub: Hub, fake_hub: Any, tmp_path: Path) -> None:
    listing = hub.list_files(REPO)
    fake_hub.put("org/repo", SMALL, b'{"a": 1}' * 100)
    with pytest.raises(CorruptModelError, match="longer"):
        hub.download(listing, SMALL, tmp_path / SMALL, NullProgress())
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_already_there_is_checked_not_fetched(hub: Hub, fake_hub: Any, tmp_path: Path) -> None:
    listing = hub.list_files(REPO)
    (tmp_path / BIG).write_bytes(CONTENT)
    assert hub.download(listing, BIG, tmp_path / BIG, NullProgress()) == SHA256
    assert fake_hub.requests("/resolve/") == []
    (tmp_path / BIG).write_bytes(CONTENT[::-1])
    hub.download(listing, BIG, tmp_path / BIG, NullProgress())
    assert (tmp_path / BIG).read_bytes() == CONTENT


def test_empty_file(hub: Hub, fake_hub: Any, tmp_path: Path) -> None:
    fake_hub.put("org/repo", "empty.txt", b"")
    hub.download(hub.list_files(REPO), "empty.txt", tmp_path / "empty.txt", NullProgress())
    assert (tmp_path / "empty.txt").read_bytes() == b""


def test_full_disk_leaves_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Any
) -> None:
    class FullDisk(FileIO):
        def write(self, chunk: Any) -> int:  # type: ignore[override]
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_open_append", lambda path: FullDisk(path, "ab"))
    with pytest.raises(DiskFullError, match=r"10\.0 KiB more"):
        hub.download(hub.list_files(REPO), BIG, tmp_path / BIG, progress)
    assert list(tmp_path.iterdir()) == []
    assert progress.open_tasks == 0
