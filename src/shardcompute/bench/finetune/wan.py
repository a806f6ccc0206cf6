"""Fine-tuning between machines far apart: what packed activations and gradients do to its loss, speed and bytes.

Two workers on an emulated ring teach the same steps in every arm; arms differ by the codec between the stages. One more
arm is exact and draws its data in another order: how far its loss is off is what chance does, and what packing does has
to be seen beside that.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardcompute.bench.finetune.taught_run import TaughtRun, run_finetune
from shardcompute.bench.finetune.text import write_text
from shardcompute.bench.report import Result, Say
from shardcompute.bench.wan.cluster import WanCluster, WanServing, wan_cluster
from shardcompute.core.errors import BackendError
from shardcompute.sim import Emulator, initial_conditions, load_topology, open_network, ring_topology

_MACHINES = ("home", "worker-1", "worker-2")
_MEMORY_BYTES = 4 << 30
_RUN_S = 1500.0
_LONGEST = 96
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


def run_wan_teaching(bench: WanTeaching, say: Say) -> list[Result]:
    arms = [(codec, codec, 1) for codec in bench.arms] + [("another order", bench.arms[0], 2)]
    found: dict[str, TaughtRun] = {}
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


def _results(found: dict[str, TaughtRun], labels: dict[str, str | float | int]) -> list[Result]:
    losses = {name: statistics.fmean(run.losses[-_LAST:]) for name, run in found.items()}
    exact = next(iter(losses.values()))
    results = []
    for place, (name, run) in enumerate(found.items()):
        if run.wire_bytes is None:
            raise BackendError(f"the run with {name} has not said what it sent")
        tags = {"arm": name, **labels, "idle": ", ".join(f"{share:.0%}" for share in run.idle_shares)}
        results += [
            Result("loss of the last steps", losses[name], "", tags),
            Result("training speed", run.median_speed(_SKIPPED), "tok/s", tags),
            Result("bytes between stages", run.wire_bytes, "bytes", tags),
        ]
        if place:
            off = abs(losses[name] - exact) / exact
            results.append(Result("loss off from exact", off, "", tags))
    return results


def _teach(
    bench: WanTeaching, cluster: WanCluster, data: Path, out: Path, codec: str, seed: int
) -> TaughtRun:
    network = cluster.network
    options = (
        "--rate", "1e-3", "--micro-batches", 8, "--swarm", "--codec", codec, "--seed", seed,
        "--data-dir", cluster.folder,
    )  # fmt: skip
    return run_finetune(
        bench.model_path,
        data,
        out,
        options,
        steps=bench.steps,
        longest=_LONGEST,
        timeout_s=_RUN_S,
        within=lambda command: network.command(network.machines[0], command),
    )
