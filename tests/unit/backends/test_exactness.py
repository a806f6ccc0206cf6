"""Exactness classes: their names, and what is promised inside and between them."""

from __future__ import annotations

import pytest

from shardcompute.backends.devices import ComputeDevice
from shardcompute.backends.exactness import (
    ExactnessClass,
    chain_tolerance,
    class_of,
    describe_exactness,
    is_mixed,
    parse_class,
    tolerance,
    with_kv,
)
from shardcompute.backends.processor import instruction_set, own_class, read_instruction_set

ONNX = class_of("onnx", "cpu", release="1.31", kernels="avx2")
TORCH = class_of("torch", "cpu", release="2.13", kernels="avx2")
H200 = class_of("torch", "cuda:0", release="2.13", kernels="NVIDIA H200", arch="sm_90", has_triton=True)
MAC = class_of("mlx", "mlx", release="0.32", kernels="Apple M4")


@pytest.mark.parametrize(
    ("found", "name", "has_exact_rows"),
    [
        (ONNX, "onnx-1.31/float32/avx2", True),
        (TORCH, "torch-2.13/float32/avx2", False),
        (H200, "torch-2.13/bfloat16/cuda NVIDIA H200 triton", True),
        (MAC, "mlx-0.32/bfloat16/metal Apple M4", False),
        (class_of("mlx", "cpu", release="0.32", kernels="avx2"), "mlx-0.32/float32/avx2", True),
        (
            class_of("llamacpp", "cpu", release="2026", kernels="avx2"),
            "llamacpp-2026/float32+kv-float16/avx2",
            True,
        ),
        (
            class_of("torch", "cuda", release="2", kernels="GTX 1080", arch="sm_61", has_triton=True),
            "torch-2/float16/cuda GTX 1080",
            False,
        ),
        (
            class_of("torch", "cuda", release="2", kernels="MI300", arch="gfx942", has_triton=True),
            "torch-2/bfloat16/cuda MI300",
            False,
        ),
        (
            class_of("onnx", "cpu", release="1", kernels="x", kv_type="float16"),
            "onnx-1/float32+kv-float16/x",
            True,
        ),
    ],
)
def test_names_tell_everything(found: ExactnessClass, name: str, has_exact_rows: bool) -> None:
    assert found.name == name
    assert parse_class(name) == found
    assert found.has_exact_rows is has_exact_rows


@pytest.mark.parametrize("name", ["", "onnx", "onnx-1/float32", "onnx-1/float64/avx2", "/float32/avx2"])
def test_what_is_no_class(name: str) -> None:
    assert parse_class(name) is None
    assert tolerance(name, ONNX.name, "native") >= 1.0
    assert tolerance(name, name, "native") >= 1.0


def test_equal_inside_a_class_and_near_between_them() -> None:
    assert tolerance(ONNX.name, ONNX.name, "native") == 0.0
    near = tolerance(ONNX.name, TORCH.name, "float32")
    # Beside blocks, ONNX Runtime's kernels round activations to 8 bits.
    assert 0.0 < near < tolerance(TORCH.name, H200.name, "float32") < tolerance(ONNX.name, H200.name, "int4")
    assert chain_tolerance([ONNX.name, TORCH.name, TORCH.name], "float32") == near
    half = class_of("onnx", "cpu", release="1.31", kernels="avx2", kv_type="float16")
    assert half.own_error("float32") > ONNX.own_error("float32")


def test_keys_and_values_of_a_model_are_part_of_its_class() -> None:
    assert with_kv(ONNX.name, "float32") == ONNX.name
    assert with_kv(ONNX.name, "int8") == "onnx-1.31/float32+kv-int8/avx2"
    assert with_kv(TORCH.name, "int8") == TORCH.name  # keeps them as it computes
    assert with_kv("", "int8") == ""


def test_promises_in_words() -> None:
    assert "whatever the split and the company" in describe_exactness([ONNX.name] * 3, "native")
    assert "company in a step may change logits" in describe_exactness([MAC.name], "native")
    mixed = describe_exactness([ONNX.name, MAC.name, ONNX.name], "float32")
    assert mixed.startswith("mixes 2 exactness classes")
    assert "within 0.06" in mixed
    assert describe_exactness(["", ""], "native").startswith("exactness unknown")
    assert "unknown" in describe_exactness(["", ONNX.name], "native")
    assert is_mixed([ONNX.name, MAC.name])
    assert not is_mixed([ONNX.name, ONNX.name])


@pytest.mark.parametrize(
    ("machine", "flags", "model", "expected"),
    [
        ("x86_64", {"avx2", "avx512f", "avx512_vnni"}, "", "avx512-vnni"),
        ("x86_64", {"avx2", "avx512f"}, "", "avx512"),
        ("x86_64", {"avx2", "avx_vnni"}, "", "avx2-vnni"),
        ("x86_64", {"sse2"}, "some model", "x86"),
        (
            "AMD64",
            set(),
            "Intel64 Family 6 Model 183, GenuineIntel",
            "x86 Intel64 Family 6 Model 183- GenuineIntel",
        ),
        ("aarch64", {"asimddp"}, "", "arm64-dotprod"),
        ("arm64", set(), "arm", "arm64 arm"),
        ("riscv64", set(), "", "riscv64"),
    ],
)
def test_instruction_sets(machine: str, flags: set[str], model: str, expected: str) -> None:
    assert instruction_set(machine, flags, model) == expected


def test_what_this_machine_says() -> None:
    cpu = ComputeDevice(name="cpu", backend="onnx", label="a CPU", total_bytes=1, free_bytes=1)
    own = own_class(cpu)
    assert (own.backend, own.numbers, own.kernels) == ("onnx", "float32", read_instruction_set())
    assert own.release != "?"
    assert parse_class(own.name) == own
    gpu = ComputeDevice(
        name="cuda:1", backend="torch", label="NVIDIA L4", total_bytes=1, free_bytes=1, arch="sm_89"
    )
    assert own_class(gpu).numbers == "bfloat16"
    assert own_class(gpu).kernels.startswith("cuda NVIDIA L4")
