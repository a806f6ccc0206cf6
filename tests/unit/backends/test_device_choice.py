"""`--device` and `--backend`: either settles the other, lists give several places, and what is not there is said."""

from __future__ import annotations

import pytest

from shardcompute.backends.device_choice import check_choice, choose_device, choose_devices
from shardcompute.backends.device_probes import DeviceReport, ReportedGpu, SeenGpu, TorchBuild
from shardcompute.core.errors import BackendError, UsageError
from support.fake_devices import GIB, H200, SEEN_H200, FakeMachine, cuda_machine, pretend, second

MAC = FakeMachine(
    seen=(SeenGpu(maker="apple", label="Apple M4"),),
    build=TorchBuild("2.13.0"),
    has_mlx=True,
    report=DeviceReport(gpus=(ReportedGpu(total_bytes=16 * GIB, free_bytes=12 * GIB),)),
    platform="Darwin",
)
MACHINES = {
    "none": FakeMachine(),
    "one": cuda_machine(),
    "two": cuda_machine(H200, second()),
    "useless": FakeMachine(seen=(SEEN_H200,)),
    "mac": MAC,
}
_AUTO = {
    ("none", "auto", "auto"): "cpu/onnx",
    ("none", "all", "auto"): "cpu/onnx",
    ("none", "auto", "torch"): "cpu/torch",
    ("none", "cpu", "torch"): "cpu/torch",
    ("none", "cpu", "auto"): "cpu/onnx",
    ("one", "auto", "auto"): "cuda:0/torch",
    ("one", "auto", "torch"): "cuda:0/torch",
    ("one", "auto", "onnx"): "cpu/onnx",
    ("one", "auto", "numpy"): "cpu/numpy",
    ("one", "auto", "transformers"): "cuda:0/transformers",
    ("none", "auto", "transformers"): "cpu/transformers",
    ("one", "auto", "mlx"): "cpu/mlx",
    ("one", "all", "auto"): "cuda:0/torch cpu/onnx",
    ("one", "all", "torch"): "cuda:0/torch cpu/torch",
    ("one", "all", "onnx"): "cpu/onnx",
    ("one", "cuda", "auto"): "cuda:0/torch",
    ("one", "cpu", "auto"): "cpu/onnx",
    ("two", "auto", "auto"): "cuda:0/torch cuda:1/torch",
    ("two", "cuda:1", "auto"): "cuda:1/torch",
    ("two", "cuda:1, cpu", "auto"): "cuda:1/torch cpu/onnx",
    ("two", "cuda:0,cpu", "torch"): "cuda:0/torch cpu/torch",
    ("two", "all", "auto"): "cuda:0/torch cuda:1/torch cpu/onnx",
    ("useless", "auto", "auto"): "cpu/onnx",
    ("useless", "all", "auto"): "cpu/onnx",
    ("mac", "auto", "auto"): "mlx/mlx",
    ("mac", "mlx", "auto"): "mlx/mlx",
    ("mac", "all", "auto"): "mlx/mlx cpu/onnx",
    ("mac", "auto", "onnx"): "cpu/onnx",
    ("mac", "auto", "torch"): "mps/torch",
}


@pytest.mark.parametrize(("machine", "device", "backend"), _AUTO)
def test_what_is_chosen(machine: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, MACHINES[machine])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    chosen = choose_devices(device, backend)
    assert (
        " ".join(f"{each.name}/{each.backend}" for each in chosen.devices) == _AUTO[machine, device, backend]
    )


def test_what_is_useless_is_told_beside_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, MACHINES["useless"])
    chosen = choose_devices("auto", "auto")
    assert [each.label for each in chosen.unused] == ["NVIDIA H200"]
    used, useless = chosen.describe()
    assert used.startswith("cpu: ")
    assert useless == (
        "NVIDIA H200, 140.0 GiB: cannot be used, torch is not installed; pip install 'shardcompute[torch]'"
    )


@pytest.mark.parametrize(
    ("machine", "device", "said", "fix"),
    [
        ("useless", "cuda:0", "torch is not installed", "pip install 'shardcompute[torch]'"),
        ("one", "cuda:7", "there is no cuda:7 here", "this machine has cuda:0, cpu"),
        ("one", "cpu,mps", "there is no mps here", "this machine has cuda:0, cpu"),
        ("none", "cuda", "there is no cuda here", "this machine has cpu"),
    ],
)
def test_a_device_that_was_named_must_be_there(
    machine: str, device: str, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, MACHINES[machine])
    with pytest.raises(BackendError, match=said) as caught:
        choose_devices(device, "auto")
    assert caught.value.hint == fix


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_backend_that_was_named_must_be_installed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, MACHINES["none"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=f"the {backend} backend needs {backend}") as caught:
        choose_devices("auto", backend)
    assert caught.value.hint == f"pip install 'shardcompute[{backend}]'"


@pytest.mark.parametrize(
    ("device", "backend", "said"),
    [
        ("gpu", "auto", "'gpu' is not a device"),
        ("", "auto", "'' is not a device"),
        ("cuda:0,", "auto", "'' is not a device"),
        ("cuda:0,cuda", "auto", "names a device twice"),
        ("auto,cpu", "auto", "names a device and asks for a choice"),
        ("cuda", "onnx", "the onnx backend computes on cpu, not on cuda"),
        ("cuda:1", "mlx", "the mlx backend computes on mlx or cpu, not on cuda:1"),
        ("cuda,mps", "numpy", "the numpy backend computes on cpu, not on cuda"),
    ],
)
def test_what_no_machine_can(device: str, backend: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_choice(device, backend)


def test_one_process_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, MACHINES["two"])
    [device] = choose_device("auto", "auto").devices
    assert device.name == "cuda:0"
    for several in ("all", "cuda:0,cuda:1"):
        with pytest.raises(UsageError, match="one process computes on one device"):
            choose_device(several, "auto")
