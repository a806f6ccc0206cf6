"""How workers share a machine: a device each, host memory and threads once."""

from __future__ import annotations

import pytest

from shardcompute.backends.device_choice import ChosenDevices, choose_devices
from shardcompute.backends.device_probes import DeviceReport, ReportedGpu, SeenGpu
from shardcompute.node.process.local_workers import LocalWorkers, decode_found, encode_found, share_machine
from support.fake_devices import GIB, H200, SEEN_H200, FakeMachine, cuda_machine, pretend, second

MAC = FakeMachine(
    seen=(SeenGpu(maker="apple", label="Apple M4"),),
    has_mlx=True,
    report=DeviceReport(gpus=(ReportedGpu(total_bytes=16 * GIB, free_bytes=12 * GIB),)),
)


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.node.process.local_workers.default_threads", lambda: 16)


def _chosen(monkeypatch: pytest.MonkeyPatch, machine: FakeMachine, device: str = "auto") -> ChosenDevices:
    pretend(monkeypatch, machine)
    return choose_devices(device, "auto")


def _told(workers: LocalWorkers) -> list[tuple[str, str, int, float]]:
    return [
        (each.title, each.device.name, each.threads, each.max_memory_bytes / GIB) for each in workers.each
    ]


def test_the_cpu_alone_has_three_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_machine(_chosen(monkeypatch, FakeMachine()), title="box")
    third = 8 * GIB // 3 / GIB
    assert _told(shared) == [(f"worker-{number}", "cpu", 5, third) for number in (1, 2, 3)]
    assert _told(share_machine(_chosen(monkeypatch, FakeMachine()), count=1))[0][3] == 8


def test_each_gpu_has_a_worker_with_the_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_machine(_chosen(monkeypatch, cuda_machine(H200, second())), title="box")
    assert _told(shared) == [("box/cuda:0", "cuda:0", 8, 136), ("box/cuda:1", "cuda:1", 8, 136)]
    assert [each.name for each in shared.each] == ["cuda-0", "cuda-1"]


def test_more_workers_than_gpus_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_machine(_chosen(monkeypatch, cuda_machine()), count=2, title="box")
    assert _told(shared) == [("box/cuda:0", "cuda:0", 8, 68), ("box/cuda:0-2", "cuda:0", 8, 68)]
    assert len({each.name for each in shared.each}) == 2


def test_the_cpu_beside_a_gpu_offers_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_machine(_chosen(monkeypatch, cuda_machine(), "cuda:0,cpu"), title="box")
    assert _told(shared) == [("box/cuda:0", "cuda:0", 8, 136), ("box/cpu", "cpu", 8, 8)]


def test_unified_memory_is_offered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_machine(_chosen(monkeypatch, MAC, "all"), title="mac")
    assert _told(shared) == [("mac/mlx", "mlx", 8, 4), ("mac/cpu", "cpu", 8, 4)]


def test_a_limit_is_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = share_machine(_chosen(monkeypatch, cuda_machine(), "all"), max_memory_bytes=GIB, threads=3)
    assert [(each.threads, each.max_memory_bytes) for each in shared.each] == [(3, GIB), (3, GIB)]


def test_what_is_useless_is_told_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _chosen(monkeypatch, FakeMachine(seen=(SEEN_H200,)))
    first, *others = share_machine(chosen, count=3).each
    assert first.unused == chosen.unused
    assert not any(each.unused for each in others)


def test_what_was_found_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _chosen(monkeypatch, FakeMachine(seen=(SEEN_H200,)))
    assert chosen.unused
    assert decode_found(encode_found(chosen)) == chosen
