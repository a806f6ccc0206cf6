"""`bench soak` and `bench prefix` on real processes, for seconds: that they measure something, and the right thing."""

from __future__ import annotations

import psutil
import pytest

from shardcompute.bench.prefix import PrefixBench, run_prefix_bench
from shardcompute.bench.soak.requests import Kind
from shardcompute.bench.soak.run import SoakBench, find_processes, run_soak_bench
from support.models.tiny_checkpoint import CONTEXT, save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


def _soak(model: str) -> SoakBench:
    return SoakBench(
        model,
        workers=2,
        streams=4,
        minutes=0.1,
        every_s=0.25,
        kv_tokens=2048,
        context=CONTEXT,
        system_tokens=80,
        long_tokens=200,
        most_tokens=24,
    )


def test_soak_looks_at_every_process_and_hears_every_answer(model: str) -> None:
    said: list[str] = []
    outcome = run_soak_bench(_soak(model), said.append)
    assert (outcome.total.failed, outcome.failures, outcome.lost) == (0, [], [])
    assert all(outcome.tallies[kind].done for kind in Kind if kind is not Kind.CANCELLED)
    assert outcome.tallies[Kind.CANCELLED].cancelled
    assert outcome.stages == 2
    processes = {sample.process for sample in outcome.samples}
    assert processes == {"coordinator", "worker-1", "worker-2"}
    assert all(sample.resident_bytes > 1 << 20 for sample in outcome.samples)
    assert all(sample.descriptors > 2 and sample.threads > 1 for sample in outcome.samples)
    assert outcome.samples[-1].cpu_s > outcome.samples[len(processes) - 1].cpu_s > 0
    assert len(outcome.trends) == 3 * len(processes)
    assert outcome.generated[-1][1] > outcome.generated[0][1]
    assert any("done" in line and "worker-2" in line for line in said)


def test_soak_ends_when_a_process_does(model: str) -> None:
    def kill(said: str) -> None:
        if "done" in said:
            [coordinator] = [
                each
                for each in psutil.Process().children()
                if "up" in each.cmdline() and model in each.cmdline()
            ]
            find_processes(coordinator.pid)["worker-2"].kill()

    outcome = run_soak_bench(_soak(model), kill)
    assert outcome.lost == ["worker-2"]
    assert not outcome.is_well


def test_prefix_is_remembered_for_the_same_salt_alone(model: str) -> None:
    bench = PrefixBench(
        model, workers=2, prompt_tokens=256, tokens=8, rounds=3, kv_tokens=2048, context=CONTEXT
    )
    outcome = run_prefix_bench(bench, lambda _: None)
    assert outcome.problems == []
    assert outcome.stages == 2
    assert [reply.cached_tokens for reply in outcome.of("cold")] == [0, 0, 0]
    assert all(reply.cached_tokens >= 256 for reply in outcome.of("warm"))
