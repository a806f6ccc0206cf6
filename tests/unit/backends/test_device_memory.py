"""Memory that runs out is recognised in every library's words, freed where it can be, and told as one error."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from shardcompute.backends.device_memory import device_memory_error, is_out_of_memory, within_memory
from shardcompute.core.errors import BackendError, CapacityError, DeviceMemoryError
from support.models.full_device import OutOfMemoryError

SAID = [
    OutOfMemoryError(),
    MemoryError(),
    np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype("float32")),  # type: ignore[attr-defined]
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("[metal::malloc] Attempting to allocate 20000000000 bytes which is greater than …"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried …"
    ),
    RuntimeError("std::bad_alloc"),
    RuntimeError("vk::Device::allocateMemory: ErrorOutOfDeviceMemory"),
    Exception("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer"),
    OSError(12, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("a row has 3 columns"),
    CapacityError("KV memory is full"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", SAID, ids=lambda error: str(error)[:30] or type(error).__name__)
def test_every_library_has_its_words_for_it(error: Exception) -> None:
    assert is_out_of_memory(error)
    told = device_memory_error(error, "layers were loaded")
    assert isinstance(told, CapacityError)
    assert told.message.startswith("memory ran out while layers were loaded: ")
    assert "--max-memory" in told.hint


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_nothing_else_is_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_cause_of_our_own_error_counts() -> None:
    error = BackendError("ONNX Runtime refused a graph")
    assert not is_out_of_memory(error)
    error.__cause__ = RuntimeError("std::bad_alloc")
    assert is_out_of_memory(error)


class Tensor:
    """Something large."""


def test_what_the_failed_call_held_is_gone_before_the_next() -> None:
    held: list[weakref.ref[Tensor]] = []
    seen: list[bool] = []

    def compute() -> str:
        if held:
            seen.append(held[0]() is None)
            return "computed"
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        raise OutOfMemoryError

    assert within_memory(compute, lambda: gc.collect() and None, "testing") == "computed"
    assert seen == [True]


def test_memory_is_tried_twice_and_then_told() -> None:
    tries, freed = [], []

    def compute() -> None:
        tries.append(1)
        raise OutOfMemoryError

    with pytest.raises(DeviceMemoryError, match=r"2\.00 GiB"):
        within_memory(compute, lambda: freed.append(1), "testing")
    assert (len(tries), len(freed)) == (2, 2)


def test_other_errors_pass_at_once() -> None:
    freed: list[int] = []

    def compute() -> None:
        raise CapacityError("KV memory is full")

    with pytest.raises(CapacityError, match="KV"):
        within_memory(compute, lambda: freed.append(1), "testing")
    assert freed == []
