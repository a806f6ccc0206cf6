"""`--max-memory` is a promise: a worker's process stays within it, whatever it holds and serves, or does not start."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from shardcompute.backends.footprint import holding_of, process_bytes
from shardcompute.client import Client
from shardcompute.control.sizes import sizes_of
from shardcompute.core.settings import Settings
from shardcompute.node.admin.dry_run import size_up
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models import tiny_checkpoint
from support.swarm.processes import FREE_PORTS, Swarm, run, swarm_of

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc"),
]
KV_TOKENS, CONTEXT = 4096, 2048
MIB = 1 << 20
AT_REST_BYTES = 100 * MIB
"""What a worker that nobody asks is resident with, beyond 1.1 times its file and the KV that is used."""
SLACK_BYTES = 4 * MIB
"""Between what is least by our own count and what is promised: less than rounding one number up in a message."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> dict[str, Path]:
    """The default model, and one of 20 million weights in 32 bits and in 16."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        larger = {"HIDDEN": 512, "CONTEXT": CONTEXT, "_HEADS": 8, "_HEAD_DIM": 64, "_INTERMEDIATE": 1536}
        for name, value in larger.items():
            patch.setattr(tiny_checkpoint, name, value)
        wide = tiny_checkpoint.save_tiny_llama(folder / "float32")
        narrow = tiny_checkpoint.save_tiny_llama(folder / "bfloat16")
    _halve(narrow / "model.safetensors")
    return {"default": smollm2_gguf, "float32": wide, "bfloat16": narrow}


def _halve(path: Path) -> None:
    """Write a file's tensors anew as bfloat16, which numpy does not know."""
    header, parts, offset = {}, [], 0
    for name, values in load_file(path).items():
        part = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": values.shape,
            "data_offsets": [offset, offset + len(part)],
        }
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def least_bytes(model: Path, form: str) -> int:
    """What one worker needs for the whole model, by our own count."""
    with open_checkpoint(resolve(parse_reference(str(model)), Settings(model.parent))) as checkpoint:
        sizes = sizes_of(size_up(checkpoint, form, kv_tokens=KV_TOKENS, context_length=CONTEXT))
    return process_bytes("onnx") + sizes.on(holding_of("onnx", "cpu")).total_bytes


def peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def serve_all(swarm: Swarm) -> None:
    """A prompt that fills most of the context, and short ones beside each other."""
    with Client(swarm.url) as client:
        assert client.chat("long " * 330, max_tokens=8, temperature=0).text is not None
        for number in range(4):
            client.chat(f"Count to {number}.", max_tokens=16, temperature=0)


@pytest.mark.parametrize(
    ("model", "form", "budget"),
    [
        ("default", "native", "least"),
        ("default", "native", "ample"),
        ("float32", "int8", "least"),
        ("bfloat16", "native", "least"),
        ("float32", "float32", "least"),
    ],
)
def test_a_worker_stays_within_its_promise(
    models: dict[str, Path], tmp_path: Path, model: str, form: str, budget: str
) -> None:
    promised = least_bytes(models[model], form) + SLACK_BYTES
    if budget == "ample":
        promised *= 2
    room = ("--kv-tokens", KV_TOKENS, "--context", CONTEXT, "--max-memory", promised)
    options = ("--workers", "1", "--threads", "1", "--weights", form, *map(str, room))
    with swarm_of(models[model], tmp_path / "cluster", *options) as swarm:
        serve_all(swarm)
        worker = swarm.worker("worker-1")
        peak = peak_bytes(worker)
        state = swarm.state()
        if (model, budget) == ("default", "least"):
            used = state["nodes"][0]["kv_used_bytes"]
            rested = int(1.1 * models[model].stat().st_size) + used + AT_REST_BYTES
            swarm.wait_until(lambda: worker.memory_info().rss <= rested)
    (node,) = state["nodes"]
    assert peak <= promised, f"{peak / MIB:.0f} MiB of {promised / MIB:.0f}: {json.dumps(node)}"
    assert node["used_bytes"] <= promised


def test_a_promise_smaller_than_the_process_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """At once, with what would do."""
    told = run(
        "up", models["float32"], "--data-dir", tmp_path, *FREE_PORTS, "--workers", "1", "--max-memory", "100M"
    )
    assert told.returncode == 2
    assert "cannot keep within 100.0 MiB" in told.stderr
    assert re.search(r"give it --max-memory \d+M or more", told.stderr)
