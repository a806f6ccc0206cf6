"""A hub on this machine for tests of sources, and files of given bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardcompute.core.settings import Secret, Settings
from shardcompute.weights.formats.bytes import LocalBytes
from support.network.fake_hub import FakeHub, Fault, serving


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub at `url` and its storage host, another origin, at `storage_url`."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with serving(FakeHub()) as hub:
        yield hub


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
