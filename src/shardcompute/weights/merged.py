"""Merged tensors: a checkpoint read as if an adapter had been merged into it, a matrix at a time, when it is read.

A matrix is widened to float32, what the adapter adds to it is added, and it is rounded back to the numbers of the file,
as PEFT does it. Where the adapter has lengths of rows (DoRA), rows get these. Files are not changed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardcompute.backends.host.low_rank import AdapterMatrix
from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.weights.adapters import Adapter
from shardcompute.weights.formats.bytes import check_range
from shardcompute.weights.formats.tensor_file import TensorEntry, TensorFile, find_entry, read_matrix

_MERGEABLE = ("F32", "F16", "BF16")


class MergedTensors:
    """A `TensorFile` with an adapter in it; closing it closes the file beneath."""

    def __init__(self, tensors: TensorFile, adapter: Adapter) -> None:
        self._tensors = tensors
        self.name = tensors.name
        self.metadata: Mapping[str, Any] = tensors.metadata
        self.entries: Mapping[str, TensorEntry] = tensors.entries
        self._added: dict[str, AdapterMatrix] = {}
        self._lengths: dict[str, Float32] = {}
        self._is_transposed: dict[str, bool] = {}
        for modules in adapter.modules.values():
            for module in modules:
                self._added[module.stored] = module.added
                if module.lengths is not None:
                    self._lengths[module.stored] = module.lengths
                self._is_transposed[module.stored] = any(
                    place is not None and place.is_transposed for _, place in module.places
                )
        for stored in self._added:
            self._check(stored)
        self._lock = threading.Lock()
        self._recent: tuple[str, bytes] | None = None

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        if name not in self._added:
            return self._tensors.read_bytes(name, offset, length)
        check_range(name, self.entries[name].size_bytes, offset, length)
        # Matrices are mostly read in pieces, one after the other.
        with self._lock:
            if self._recent is None or self._recent[0] != name:
                self._recent = name, self._merge(name)
            content = self._recent[1]
        return memoryview(content)[offset : offset + length]

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        if name not in self._added:
            return self._tensors.read_rows(name, start, stop)
        entry = self.entries[name]
        stop = entry.shape[0] if stop is None else stop
        return self.read_bytes(name, start * entry.row_bytes, (stop - start) * entry.row_bytes)

    def close(self) -> None:
        self._recent = None
        self._tensors.close()

    def _check(self, stored: str) -> None:
        entry = find_entry(self._tensors, stored)
        if entry.dtype not in _MERGEABLE:
            raise UnsupportedModelError(
                f"{stored} in {self.name} is quantised ({entry.dtype}), and merging would round it a second time",
                hint="keep the adapter beside the model with --adapter, or take the base in 16 bits",
            )

    def _merge(self, name: str) -> bytes:
        added = self._added[name].product()
        weight: Float32 = read_matrix(self._tensors, name).to_dense()
        is_transposed, lengths = self._is_transposed[name], self._lengths.get(name)
        total = weight + (added.T if is_transposed else added)
        if lengths is not None:
            axis = 0 if is_transposed else 1
            factors = lengths / np.linalg.norm(total, axis=axis)
            total = total * (factors[None, :] if is_transposed else factors[:, None])
        kind = self.entries[name].dtype
        if kind == "BF16":
            return _to_bfloat16(total).tobytes()
        return total.astype("<f2" if kind == "F16" else "<f4").tobytes()


def adapter_digest(adapter: Adapter) -> str:
    """What tells the numbers of an adapter from others."""
    digest = hashlib.sha256()
    for layer, modules in sorted(adapter.modules.items()):
        for module in modules:
            digest.update(f"{layer} {module.stored} {module.added.rank} ".encode())
            digest.update(np.ascontiguousarray(module.added.down).tobytes())
            digest.update(np.ascontiguousarray(module.added.up).tobytes())
            if module.lengths is not None:
                digest.update(b"lengths" + np.ascontiguousarray(module.lengths).tobytes())
    return digest.hexdigest()


def _to_bfloat16(values: Float32) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """To the nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
