"""What is said where a backend is asked for that is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.errors import BackendError
from shardcompute.runtime import shard


@pytest.mark.parametrize(
    ("system", "machine", "hint"),
    [
        ("linux", "x86_64", "pip install 'shardcompute[mlx]'"),
        ("darwin", "arm64", "pip install 'shardcompute[mlx]'"),
        ("darwin", "x86_64", "no mlx for this machine"),
        ("win32", "AMD64", "no mlx for this machine"),
    ],
)
def test_mlx_that_is_not_installed(
    system: str, machine: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network: Any = None
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlx" else find(name))
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(BackendError, match="needs mlx") as refused:
        shard._run_by("mlx", network, ExecutorOptions(kv_bytes=1))
    assert hint in str(refused.value.hint)
