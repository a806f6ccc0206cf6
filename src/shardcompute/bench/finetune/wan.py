"""Fine-tuning between machines far apart: what packed activations and gradients do to its loss, speed and bytes.

Two workers on an emulated ring teach the same steps in every arm; arms differ by the codec between the stages. One more
arm is exact and draws its data in another order: how far its loss is off is what chance does, and what packing does has
to be seen beside that.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.bench.finetune.text import write_text
from shardcompute.bench.report import Result, Say
from shardcompute.bench.wan.cluster import WanCluster, WanServing, wan_cluster
from shardcompute.core.errors import BackendError
from shardcompute.sim import Emulator, initial_conditions, load_topology, open_network, ring_topology

_MACHINES = ("home", "worker-1", "worker-2")
_STEP = re.compile(r"step (\d+)/\d+: loss ([\d.]+)[^,]*(?:, held out [\d.]+)?, ([\d.]+) tok/s")
_BYTES = re.compile(r"\((\d+) bytes\) went between")
_IDLE = re.compile(r"workers were idle (\S.*?) of the time")
_MEMORY_BYTES = 4 << 30
_RUN_S = 1500.0
_SKIPPED = 1
_LAST = 3
"""Steps at the end whose losses are averaged."""


@dataclass(frozen=True, slots=True)
class WanTeaching:
    """`arms` are codecs, the first of them what the others are compared with."""

    model_path: str
    ring_ms: float = 20.0
    mbit: float = 100.0
    steps: int = 8
    arms: tuple[str, ...] = ("exact", "bf16", "int8")
    emulator: Emulator = Emulator.AUTO


@dataclass(frozen=True, slots=True)
class TaughtArm:
    losses: tuple[float, ...]
    speed: float
    wire_bytes: int
    idle: str

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-_LAST:])


def run_wan_teaching(bench: WanTeaching, say: Say) -> list[Result]:
    arms = [(codec, codec, 1) for codec in bench.arms] + [("another order", bench.arms[0], 2)]
    found: dict[str, TaughtArm] = {}
    serving = WanServing(bench.model_path, max_memory_bytes=_MEMORY_BYTES, stages=1, kv_tokens=2048)
    with (
        tempfile.TemporaryDirectory(prefix="sc-") as folder,
        open_network(load_topology("lan"), _MACHINES, bench.emulator) as network,
        wan_cluster(network, serving) as cluster,
    ):
        data = write_text(Path(folder) / "data.jsonl")
        network.impose(
            initial_conditions(ring_topology(len(_MACHINES), bench.ring_ms, bench.mbit), _MACHINES)
        )
        for name, codec, seed in arms:
            say(f"{name} over {bench.ring_ms:g} ms and {bench.mbit:g} Mbit/s")
            found[name] = _teach(bench, cluster, data, Path(folder) / name.replace(" ", "-"), codec, seed)
        labels = {"ring_ms": bench.ring_ms, "mbit": bench.mbit, "steps": bench.steps}
        return _results(found, {**labels, "emulator": str(network.emulator)})


def _results(found: dict[str, TaughtArm], labels: dict[str, str | float | int]) -> list[Result]:
    exact = next(iter(found.values()))
    results = []
    for name, arm in found.items():
        tags = {"arm": name, **labels, "idle": arm.idle}
        results += [
            Result("loss of the last steps", arm.last_loss, "", tags),
            Result("training speed", arm.speed, "tok/s", tags),
            Result("bytes between stages", arm.wire_bytes, "bytes", tags),
        ]
        if arm is not exact:
            off = abs(arm.last_loss - exact.last_loss) / exact.last_loss
            results.append(Result("loss off from exact", off, "", tags))
    return results


def _teach(
    bench: WanTeaching, cluster: WanCluster, data: Path, out: Path, codec: str, seed: int
) -> TaughtArm:
    command = [
        sys.executable, "-m", "shardcompute", "finetune", bench.model_path, data, "--out", out, "--rate", "1e-3",
        "--steps", bench.steps, "--batch", 8, "--micro-batches", 8, "--swarm", "--codec", codec, "--seed", seed,
        "--data-dir", cluster.folder, "--no-samples", "--max-length", 96,
    ]  # fmt: skip
    whole = cluster.network.command(cluster.network.machines[0], [str(part) for part in command])
    done = subprocess.run(whole, capture_output=True, text=True, timeout=_RUN_S, check=False)
    return read_arm(done.stderr, done.returncode, codec)


def read_arm(said: str, code: int, name: str) -> TaughtArm:
    """What a run has said. BackendError where it has failed."""
    steps: Sequence[tuple[str, str, str]] = _STEP.findall(said)
    size, idle = _BYTES.search(said), _IDLE.search(said)
    if code or not steps or size is None:
        raise BackendError(f"the run with {name} failed: {said[-500:]}")
    speeds = [float(speed) for _, _, speed in steps]
    return TaughtArm(
        tuple(float(loss) for _, loss, _ in steps),
        statistics.median(speeds[_SKIPPED:] or speeds),
        int(size[1]),
        "" if idle is None else idle[1],
    )
