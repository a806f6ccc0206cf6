"""Entries appear whole, are found again, survive damage and can be removed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from shardcompute.core.errors import UnknownModelError, UsageError
from shardcompute.weights.sources.cache import (
    MANIFEST_FILE,
    CachedReference,
    CacheEntry,
    FileRecord,
    ModelCache,
)
from shardcompute.weights.sources.progress import NullProgress
from shardcompute.weights.sources.reference import EmbeddedReference, FolderReference, HubReference

REFERENCE = HubReference("org/repo")


def _add(cache: ModelCache, reference: CachedReference = REFERENCE, quant: str | None = None) -> CacheEntry:
    with cache.lock(reference, NullProgress()):
        incoming = cache.open_incoming(reference)
        (incoming / "sub").mkdir(exist_ok=True)
        (incoming / "config.json").write_bytes(b"{}")
        (incoming / "sub" / "m.gguf").write_bytes(b"12345")
        files = [FileRecord("config.json", 2), FileRecord("sub/m.gguf", 5, "ab" * 32)]
        return cache.publish(reference, files, commit="c0ffee", quant=quant)


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "data")


def test_empty_cache_creates_nothing(cache: ModelCache) -> None:
    assert cache.list_entries() == ()
    assert cache.find(REFERENCE) is None
    assert cache.size_bytes == 0
    assert not cache.folder.exists()


def test_entry_is_found_with_its_manifest(cache: ModelCache) -> None:
    added = _add(cache)
    entry = cache.find(REFERENCE)
    assert entry == added
    assert not added.is_damaged
    assert added.manifest is not None
    assert (added.manifest.reference, added.manifest.commit) == ("org/repo", "c0ffee")
    assert added.manifest.files[1] == FileRecord("sub/m.gguf", 5, "ab" * 32)
    assert added.size_bytes == 7 + (added.path / MANIFEST_FILE).stat().st_size
    assert cache.size_bytes == added.size_bytes
    assert cache.list_entries() == (added,)


def test_references_do_not_share_entries(cache: ModelCache) -> None:
    references = [
        EmbeddedReference(),
        REFERENCE,
        HubReference("org/repo", "refs/pr/1"),
        HubReference("org/repo", "main", "Q4_0"),
        HubReference("org/repo", "v1+2", "Q4_0"),
    ]
    for reference in references:
        assert cache.find(reference) is None
        _add(cache, reference)
    assert {entry.reference for entry in cache.list_entries()} == set(references)


def test_what_is_incoming_is_no_entry(cache: ModelCache) -> None:
    (cache.open_incoming(REFERENCE) / "m.gguf.partial").write_bytes(b"123")
    assert cache.find(REFERENCE) is None
    assert cache.list_entries() == ()
    assert cache.size_bytes == 3


def test_leftovers_do_not_enter_the_entry(cache: ModelCache) -> None:
    incoming = cache.open_incoming(REFERENCE)
    (incoming / "old").mkdir()
    (incoming / "old" / "m.gguf.partial").write_bytes(b"123")
    entry = _add(cache)
    names = {path.relative_to(entry.path).as_posix() for path in entry.path.rglob("*")}
    assert names == {MANIFEST_FILE, "config.json", "sub", "sub/m.gguf"}


def test_quant_is_found_where_it_was_chosen_by_default(cache: ModelCache) -> None:
    entry = _add(cache, quant="Q4_K_M")
    assert cache.find(HubReference("org/repo", "main", "Q4_K_M")) == entry
    assert cache.find(HubReference("org/repo", "main", "Q8_0")) is None
    assert cache.find(HubReference("org/repo", "v2", "Q4_K_M")) is None


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (None, "missing"),
        (b"", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[]", "damaged"),
        (b'{"format": 1}', "damaged"),
        (b"[" * 100_000, "damaged"),
    ],
)
def test_damaged_manifest_is_shown_and_can_be_removed(
    cache: ModelCache, content: bytes | None, damage: str
) -> None:
    path = _add(cache).path / MANIFEST_FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (entry,) = cache.list_entries()
    assert entry.is_damaged
    assert damage in (entry.damage or "")
    assert entry.hint == "remove it with: shardcompute rm org/repo"
    assert cache.find(REFERENCE) == entry
    cache.remove(REFERENCE)
    assert cache.list_entries() == ()


def _change(path: Path, **values: object) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | values))


def test_files_that_do_not_fit_the_manifest_are_damage(cache: ModelCache) -> None:
    entry = _add(cache)
    (entry.path / "sub" / "m.gguf").write_bytes(b"1234")
    assert cache.list_entries()[0].damage == "sub/m.gguf has 4 bytes instead of 5"
    (entry.path / "sub" / "m.gguf").unlink()
    assert cache.list_entries()[0].damage == "sub/m.gguf is missing"
    _change(entry.path / MANIFEST_FILE, files=[{"name": "../../x", "size": 1}])
    assert cache.list_entries()[0].damage == f"{MANIFEST_FILE} is damaged"
    _change(entry.path / MANIFEST_FILE, files=[])
    assert cache.list_entries()[0].damage == "it names no file"
    _change(entry.path / MANIFEST_FILE, format=2)
    assert "another version" in (cache.list_entries()[0].damage or "")


def test_remove_frees_entry_and_parts(cache: ModelCache) -> None:
    size = _add(cache).size_bytes
    (cache.open_incoming(REFERENCE) / "m.gguf.partial").write_bytes(b"123")
    assert cache.remove(REFERENCE) == size + 3
    assert cache.find(REFERENCE) is None
    assert cache.size_bytes == 0


def test_remove_what_is_not_there(cache: ModelCache, tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="org/repo"):
        cache.remove(REFERENCE)
    with pytest.raises(UsageError, match="local"):
        cache.remove(FolderReference(tmp_path))
    assert tmp_path.is_dir()


def test_foreign_folders_are_left_alone(cache: ModelCache) -> None:
    _add(cache)
    (cache.folder / "notes").mkdir()
    (cache.folder / "file.txt").write_text("")
    assert len(cache.list_entries()) == 1


def test_waiting_is_told(cache: ModelCache) -> None:
    labels: list[str] = []
    finished = threading.Event()
    is_asked = threading.Event()

    class Watcher(NullProgress):
        def start(self, label: str, total_bytes: int | None) -> None:
            labels.append(label)
            is_asked.set()

        def finish(self) -> None:
            finished.set()

    def second() -> None:
        with cache.lock(REFERENCE, Watcher()):
            labels.append("in")

    with cache.lock(REFERENCE, NullProgress()):
        thread = threading.Thread(target=second)
        thread.start()
        assert is_asked.wait(60)
        assert labels == ["waiting for another process that is fetching org/repo"]
    thread.join()
    assert labels[1:] == ["in"]
    assert finished.is_set()
