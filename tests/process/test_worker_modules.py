"""A worker that is kept alive imports what serving takes, and nothing else: what it does not hold, layers can have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardcompute.client import Client
from support.swarm.processes import swarm_of

pytestmark = pytest.mark.timeout(120)
UNUSED = (
    "asyncio",
    "click",
    "httpx",
    "jinja2",
    "llguidance",
    "onnx",
    "plistlib",
    "pydantic",
    "pygments",
    "rich",
    "shardcompute.api",
    "shardcompute.bench",
    "shardcompute.cli.main",
    "shardcompute.cli.options",
    "shardcompute.models.tokenizer",
    "shardcompute.node.coordinator",
    "shardcompute.node.driver",
    "shardcompute.sim",
    "sqlite3",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
    "xml",
)


def test_a_supervised_worker_imports_no_more_than_it_serves_with(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python then tells on stderr, which is the worker's log, of every module that it imports.
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with swarm_of(smollm2_gguf, tmp_path / "cluster", "--workers", "1", "--kv-tokens", "2048") as swarm:
        with Client(swarm.url) as client:
            assert client.chat("Say hello.", max_tokens=4, temperature=0).text is not None
        told = (tmp_path / "cluster" / "logs" / "worker-1.log").read_text(encoding="utf-8")
    imported = set(re.findall(r"import time: .*\| +(\S+)$", told, re.MULTILINE))
    assert {"onnxruntime", "shardcompute.node.worker.worker"} <= imported
    assert not [name for name in imported if name.startswith(tuple(f"{each}." for each in UNUSED))]
    assert not imported & set(UNUSED)
