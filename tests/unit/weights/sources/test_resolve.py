"""From a reference to files, for every kind of reference."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import (
    CorruptModelError,
    DiskFullError,
    SourceError,
    UnknownModelError,
    UnsupportedModelError,
    UsageError,
)
from shardcompute.core.settings import Settings
from shardcompute.weights.sources import outlines
from shardcompute.weights.sources import resolve as sources
from shardcompute.weights.sources.cache import CacheEntry, FileRecord, ModelCache
from shardcompute.weights.sources.outlines import RangeRecorder
from shardcompute.weights.sources.progress import NullProgress
from shardcompute.weights.sources.reference import (
    EmbeddedReference,
    FolderReference,
    GgufReference,
    HubReference,
    parse_reference,
)
from shardcompute.weights.sources.resolve import ModelFiles, resolve
from support.network.fake_hub import Fault

Usage = namedtuple("Usage", "total used free")
WEIGHTS = bytes(range(200))


def _bytes(files: ModelFiles, name: str) -> bytes:
    with contextlib.closing(files.open(name)) as source:
        return bytes(source.read(0, source.size))


def _write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


# Local.


def test_folder_with_safetensors(tmp_path: Path) -> None:
    folder = _write(tmp_path / "tiny", config__json=b'{"x": "\xc3\xa9"}', model__safetensors=WEIGHTS)
    with resolve(parse_reference(str(folder)), Settings(tmp_path / "data")) as files:
        assert (files.name, files.kind, files.folder) == ("tiny", "safetensors", folder)
        assert (files.main_file, files.weight_files) == ("model.safetensors", ("model.safetensors",))
        assert files.total_bytes == 211
        assert files.read_text("config.json") == '{"x": "é"}'
        assert files.read_text("tokenizer.json") is None
        assert _bytes(files, "model.safetensors") == WEIGHTS
        with pytest.raises(CorruptModelError, match=r"lacks other\.safetensors"):
            files.open("other.safetensors")
    assert not (tmp_path / "data").exists()


def test_folder_with_an_index(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "s2.safetensors", "b": "s1.safetensors"}}).encode()
    folder = _write(
        tmp_path, config__json=b"{}", s1__safetensors=b"1", s2__safetensors=b"22", x__gguf=b"GGUF"
    )
    (folder / "model.safetensors.index.json").write_bytes(index)
    files = resolve(FolderReference(folder), Settings(tmp_path))
    assert files.main_file == "model.safetensors.index.json"
    assert files.weight_files == ("s1.safetensors", "s2.safetensors")
    assert files.read_text(files.main_file) == index.decode()
    assert files.total_bytes == len(index) + 5


def test_folder_with_one_gguf_and_the_file_itself(tmp_path: Path) -> None:
    folder = _write(tmp_path / "m", tiny__Q8_0__gguf=WEIGHTS)
    for reference, name in [
        (FolderReference(folder), "m"),
        (GgufReference(folder / "tiny.Q8_0.gguf"), "tiny.Q8_0"),
    ]:
        files = resolve(reference, Settings(tmp_path))
        assert (files.name, files.kind, files.main_file) == (name, "gguf", "tiny.Q8_0.gguf")
        assert _bytes(files, files.main_file) == WEIGHTS


def test_a_model_in_parts_is_found_by_any_of_them(tmp_path: Path) -> None:
    names = tuple(f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    for name in names:
        (tmp_path / name).write_bytes(WEIGHTS)
    for reference in [FolderReference(tmp_path), *(GgufReference(tmp_path / name) for name in names)]:
        files = resolve(reference, Settings(tmp_path / "data"))
        assert (files.kind, files.main_file, files.weight_files) == ("gguf", names[0], names)
        assert files.total_bytes == 3 * len(WEIGHTS)
        assert files.name == (tmp_path.name if isinstance(reference, FolderReference) else "tiny")
    (tmp_path / names[1]).unlink()
    for reference in (FolderReference(tmp_path), GgufReference(tmp_path / names[2])):
        with pytest.raises(CorruptModelError, match=names[1]):
            resolve(reference, Settings(tmp_path / "data"))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("a-Q4_K_M.gguf", "a-Q8_0.gguf"), UsageError),
        (("config.json", "pytorch_model.bin"), UnsupportedModelError),
        (("model.safetensors",), UnsupportedModelError),
        (("config.json",), UnknownModelError),
        ((), UnknownModelError),
    ],
)
def test_folders_that_hold_no_one_model(
    tmp_path: Path, names: tuple[str, ...], kind: type[Exception]
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(kind) as caught:
        resolve(FolderReference(tmp_path), Settings(tmp_path / "data"))
    assert str(tmp_path) in str(caught.value)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="no folder"):
        resolve(FolderReference(tmp_path / "none"), Settings(tmp_path))
    with pytest.raises(UnknownModelError, match="no file"):
        resolve(GgufReference(tmp_path / "none.gguf"), Settings(tmp_path))


def test_text_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, config__json=b"\xff\xff\xff", model__safetensors=WEIGHTS)
    files = resolve(FolderReference(tmp_path), Settings(tmp_path))
    with pytest.raises(CorruptModelError, match="not text"):
        files.read_text("config.json")
    monkeypatch.setattr(sources, "_TEXT_LIMIT_BYTES", 2)
    with pytest.raises(CorruptModelError, match="3 bytes"):
        files.read_text("config.json")


# Embedded.


def _publish_embedded(cache: ModelCache, settings: Settings, progress: Any) -> CacheEntry:
    reference = EmbeddedReference()
    (cache.open_incoming(reference) / "tiny.Q4_1.gguf").write_bytes(WEIGHTS)
    return cache.publish(reference, [FileRecord("tiny.Q4_1.gguf", len(WEIGHTS))], commit="tiny==1")


def test_embedded_comes_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_installed", lambda: None)
    monkeypatch.setattr(sources, "provide_embedded", _publish_embedded)
    files = resolve(EmbeddedReference(), Settings(tmp_path))
    assert (files.name, files.kind, files.commit) == ("SmolLM2-135M-Instruct", "gguf", "tiny==1")
    assert _bytes(files, files.main_file) == WEIGHTS
    monkeypatch.setattr(sources, "provide_embedded", lambda *_: pytest.fail("it is there already"))
    assert resolve(EmbeddedReference(), Settings(tmp_path, offline=True)).folder == files.folder


def test_installed_package_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "site", tiny__gguf=WEIGHTS) / "tiny.gguf"
    monkeypatch.setattr(sources, "find_installed", lambda: path)
    files = resolve(EmbeddedReference(), Settings(tmp_path / "data", offline=True))
    assert (files.name, files.folder) == ("SmolLM2-135M-Instruct", path.parent)
    assert not (tmp_path / "data").exists()


# Hub.


@pytest.fixture
def model(fake_hub: Any) -> Any:
    fake_hub.put("org/repo", "config.json", b'{"a": 1}')
    fake_hub.put("org/repo", "tokenizer.json", b"{}")
    fake_hub.put("org/repo", "README.md", b"#")
    fake_hub.put("org/repo", "pytorch_model.bin", b"pickle", large=True)
    fake_hub.put("org/repo", "model.safetensors", WEIGHTS, large=True)
    return fake_hub


def test_pull_brings_what_is_needed_and_is_remembered(
    model: Any, hub_settings: Settings, progress: Any
) -> None:
    files = resolve(HubReference("org/repo"), hub_settings, progress)
    assert (files.name, files.kind) == ("org/repo", "safetensors")
    assert files.commit == "0123456789abcdef0123456789abcdef01234567"
    assert files.folder is not None
    assert {path.name for path in files.folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "shardcompute.json",
    }
    assert _bytes(files, "model.safetensors") == WEIGHTS
    assert progress.labels == ["config.json", "tokenizer.json", "model.safetensors"]
    model.seen.clear()
    again = resolve(HubReference("org/repo"), dataclasses.replace(hub_settings, offline=True), fetch="lazy")
    assert again.folder == files.folder
    assert model.seen == []


def test_lazy_leaves_the_weights_where_they_are(model: Any, hub_settings: Settings) -> None:
    with resolve(HubReference("org/repo"), hub_settings, fetch="lazy") as files:
        assert files.folder is None
        assert files.total_bytes == 210
        assert files.read_text("config.json") == '{"a": 1}'
        assert files.read_text("config.json") == '{"a": 1}'
        source = files.open("model.safetensors")
        assert bytes(source.read(50, 10)) == WEIGHTS[50:60]
        source.close()
    assert [one.headers["range"] for one in model.requests("/storage/")] == ["bytes=50-59"]
    assert len(model.requests("config.json")) == 1
    assert not hub_settings.data_dir.exists()


@pytest.mark.parametrize("is_offline", [False, True], ids=["unreachable", "offline"])
def test_a_model_that_was_kept_opens_without_its_hub(
    model: Any, hub_settings: Settings, is_offline: bool
) -> None:
    with resolve(HubReference("org/repo"), hub_settings, fetch="lazy") as files:
        with contextlib.closing(files.open("model.safetensors")) as source:
            source.read(0, 20)
            files.keep()
            source.read(100, 50)
        commit, listing = files.commit, files.listing
    assert commit is not None
    model.every["/"] = Fault(status=503, headers={"Retry-After": "0"})
    settings = dataclasses.replace(hub_settings, offline=is_offline)
    for reference in (HubReference("org/repo"), HubReference("org/repo", commit)):
        with resolve(reference, settings, fetch="lazy") as files:
            assert (files.commit, files.listing, files.total_bytes) == (commit, listing, 210)
            assert files.read_text("config.json") == '{"a": 1}'
            with contextlib.closing(files.open("model.safetensors")) as source:
                assert bytes(source.read(0, 20)) == WEIGHTS[:20]
                assert bytes(source.read(5, 10)) == WEIGHTS[5:15]
                with pytest.raises(SourceError):
                    source.read(100, 50)
    with pytest.raises(SourceError):
        resolve(HubReference("org/repo", "other"), settings, fetch="lazy")
    model.every.clear()
    if not is_offline:
        with resolve(HubReference("org/repo"), settings, fetch="lazy") as files:
            assert _bytes(files, "model.safetensors") == WEIGHTS, "the hub is back"


def test_an_outline_that_cannot_be_read_is_none(model: Any, hub_settings: Settings) -> None:
    with resolve(HubReference("org/repo"), hub_settings, fetch="lazy") as files:
        files.keep()
    [path] = (hub_settings.data_dir / "outlines").iterdir()
    whole = path.read_bytes()
    settings = dataclasses.replace(hub_settings, offline=True)
    with resolve(HubReference("org/repo"), settings, fetch="lazy") as files:
        assert files.read_text("config.json") == '{"a": 1}'
    for damaged in (whole[:-5], b"", b"\xc1" * 50):
        path.write_bytes(damaged)
        with pytest.raises(SourceError, match="offline"):
            resolve(HubReference("org/repo"), settings, fetch="lazy")


def test_what_is_too_much_to_keep_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "_MOST_BYTES", 100)
    recorder = RangeRecorder()
    recorder.note("a", 0, memoryview(bytes(60)))
    recorder.note("a", 60, memoryview(bytes(60)))
    assert recorder.take() is None


def test_lazy_with_an_index(model: Any, hub_settings: Settings) -> None:
    del model.files["org/repo"]["model.safetensors"]
    index = json.dumps({"weight_map": {"a": "s1.safetensors"}}).encode()
    model.put("org/repo", "model.safetensors.index.json", index)
    model.put("org/repo", "s1.safetensors", b"one", large=True)
    with resolve(HubReference("org/repo"), hub_settings, fetch="lazy") as files:
        assert files.read_text("model.safetensors.index.json") == index.decode()
        assert _bytes(files, "s1.safetensors") == b"one"


def test_quant_chosen_by_default_and_by_name_share_one_copy(fake_hub: Any, hub_settings: Settings) -> None:
    fake_hub.put("org/repo", "deep/m-Q4_K_M.gguf", WEIGHTS, large=True)
    fake_hub.put("org/repo", "m-Q8_0.gguf", b"8", large=True)
    for first, second in [("org/repo:q4_k_m", "org/repo"), ("org/repo@v1", "org/repo@v1:Q4_K_M")]:
        one = resolve(parse_reference(first), hub_settings)
        assert (one.kind, one.main_file) == ("gguf", "deep/m-Q4_K_M.gguf")
        assert _bytes(one, one.main_file) == WEIGHTS
        assert resolve(parse_reference(second), hub_settings).folder == one.folder
    assert len(ModelCache(hub_settings.data_dir).list_entries()) == 2
    eight = resolve(parse_reference("org/repo:Q8_0"), hub_settings)
    assert _bytes(eight, "m-Q8_0.gguf") == b"8"


def test_a_quantisation_in_parts_comes_whole_or_lazily(fake_hub: Any, hub_settings: Settings) -> None:
    names = tuple(f"Q2_K/m-Q2_K-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    for name in names:
        fake_hub.put("org/repo", name, name.encode() * 20, large=True)
    fake_hub.put("org/repo", "m-Q8_0.gguf", b"8", large=True)
    with resolve(parse_reference("org/repo:Q2_K"), hub_settings, fetch="lazy") as files:
        assert (files.kind, files.main_file, files.weight_files) == ("gguf", names[0], names)
        source = files.open(names[1])
        assert bytes(source.read(3, 9)) == (names[1].encode() * 20)[3:12]
    assert [one.headers["range"] for one in fake_hub.requests("/storage/")] == ["bytes=3-11"]
    pulled = resolve(parse_reference("org/repo:Q2_K"), hub_settings)
    assert pulled.weight_files == names
    assert [_bytes(pulled, name) for name in names] == [name.encode() * 20 for name in names]
    fake_hub.seen.clear()
    offline = dataclasses.replace(hub_settings, offline=True)
    assert resolve(parse_reference("org/repo:Q2_K"), offline).weight_files == names
    del fake_hub.files["org/repo"][names[2]]
    with pytest.raises(CorruptModelError, match="m-Q2_K-00003-of-00003"):
        resolve(parse_reference("org/repo@v2:Q2_K"), hub_settings)


def test_damaged_entry_says_how_to_remove_it(model: Any, hub_settings: Settings) -> None:
    files = resolve(HubReference("org/repo"), hub_settings)
    assert files.folder is not None
    (files.folder / "shardcompute.json").write_text("{")
    with pytest.raises(CorruptModelError, match="damaged") as caught:
        resolve(HubReference("org/repo"), hub_settings)
    assert "shardcompute rm org/repo" in caught.value.hint


def test_interrupted_pull_leaves_no_entry_and_is_continued(
    model: Any, fault: Any, hub_settings: Settings
) -> None:
    cache = ModelCache(hub_settings.data_dir)
    model.fail("/storage/", fault(cut_after=120), fault(404))
    with pytest.raises(UnknownModelError):
        resolve(HubReference("org/repo"), hub_settings)
    assert cache.find(HubReference("org/repo")) is None
    model.seen.clear()
    files = resolve(HubReference("org/repo"), hub_settings)
    assert [one.headers["range"] for one in model.requests("/storage/")] == ["bytes=120-"]
    assert _bytes(files, "model.safetensors") == WEIGHTS


def test_offline_and_not_in_the_cache(model: Any, hub_settings: Settings) -> None:
    offline = dataclasses.replace(hub_settings, offline=True)
    for fetch in ("full", "lazy"):
        with pytest.raises(SourceError, match="offline"):
            resolve(HubReference("org/repo"), offline, fetch=fetch)  # type: ignore[arg-type]
    assert model.seen == []


def test_no_room_is_said_before_the_first_byte(
    model: Any, hub_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1, 1, 1000))
    with pytest.raises(DiskFullError, match="org/repo needs 210 bytes"):
        resolve(HubReference("org/repo"), hub_settings, NullProgress())
    assert model.requests("/resolve/") == []
    assert ModelCache(hub_settings.data_dir).list_entries() == ()


def test_failed_lazy_resolve_closes_its_connection(fake_hub: Any, hub_settings: Settings) -> None:
    fake_hub.put("org/pickles", "pytorch_model.bin", b"x")
    with pytest.raises(UnsupportedModelError, match="pickled"):
        resolve(HubReference("org/pickles"), hub_settings, fetch="lazy")
