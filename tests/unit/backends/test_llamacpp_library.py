"""llama.cpp's library: missing or of another release, it is refused with the line that installs the right one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from shardcompute.backends.llamacpp import library
from shardcompute.backends.llamacpp.stream_kv import plan_streams
from shardcompute.core.errors import BackendError, CapacityError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    library.open_library.cache_clear()
    yield
    library.open_library.cache_clear()


def test_the_release_is_the_one_that_the_extra_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [requirement] = project["optional-dependencies"]["llamacpp"]
    assert requirement.startswith(f"{library.PACKAGE}=={library.VERSION}")


def test_without_the_wheel_it_says_what_to_install() -> None:
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(BackendError, match="not installed") as caught,
    ):
        library.open_library()
    assert "shardcompute[llamacpp]" in caught.value.hint


def test_another_release_is_not_even_loaded(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.abi3.so").write_bytes(b"not a library")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=spec),
        mock.patch.object(importlib.metadata, "version", return_value="2026.9.11063"),
        pytest.raises(BackendError, match=r"2026\.9\.11063") as caught,
    ):
        library.open_library()
    assert f"{library.PACKAGE}=={library.VERSION}" in caught.value.hint


def test_a_wheel_without_a_library_that_loads_is_refused(tmp_path: Path) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=spec),
        mock.patch.object(importlib.metadata, "version", return_value=library.VERSION),
    ):
        with pytest.raises(BackendError, match="no library"):
            library.open_library()
        (tmp_path / "xllamacpp.abi3.so").write_bytes(b"not a library")
        with pytest.raises(BackendError, match="cannot be loaded"):
            library.open_library()


@pytest.mark.skipif(library.installed_version() is None, reason="xllamacpp is not installed")
def test_records_that_are_laid_out_otherwise_are_refused() -> None:
    with (
        mock.patch.dict(library._CONTEXT_DEFAULTS, {"n_batch": 4096}),
        pytest.raises(BackendError, match="ContextParams are laid out in another way"),
    ):
        library.open_library()


def test_half_of_the_kv_memory_is_streams_and_the_rest_bounds_the_sessions() -> None:
    plan = plan_streams(kv_bytes=100_000 * 10, token_bytes=10, context_length=1000)
    assert plan.stream_tokens == 1024
    assert plan.streams == 16
    assert plan.total_tokens == 100_000 - 16 * 1024
    small = plan_streams(kv_bytes=3000 * 10, token_bytes=10, context_length=8192)
    assert (small.streams, small.stream_tokens, small.total_tokens) == (1, 1280, 1720)


def test_too_little_kv_memory_is_said() -> None:
    with pytest.raises(CapacityError, match="are too few"):
        plan_streams(kv_bytes=5000, token_bytes=10, context_length=512)
