"""A packed file: the decoder's own tensors, converted once, in one safetensors file.

A dense matrix or a vector lies under its own name; a quantised matrix as `name#codes`, `name#scales`,
`name#shifts`, and where it has outliers `name#columns` and `name#values`. Any range of its rows can be read
alone. `PackedTensors` gives exactly the matrices that `PackWriter` was given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shardcompute.backends.matrix import (
    Array,
    BlockMatrix,
    DenseMatrix,
    Float32,
    Matrix,
    MixedMatrix,
    part_of,
)
from shardcompute.core.errors import CorruptModelError
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.tensor_share import WHOLE, TensorCut
from shardcompute.security.private_files import private_opener
from shardcompute.weights.card import PARTS
from shardcompute.weights.formats.tensor_file import Span, TensorFile, find_entry
from shardcompute.weights.loader import read_place, read_vector_place
from shardcompute.weights.sources.disk import disk_errors

# JSON around one entry's name: type, shape and offsets of 64-bit numbers.
_ENTRY_BYTES = 200
_METADATA_BYTES = 1024
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8", "int64": "I64"}


class PackWriter:
    """A file on its way to `path`, which appears only when it is whole. `names` are those to come.

    The header comes first in the file but is known last: room for it is left, and filled up with spaces.
    """

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._reserved = _METADATA_BYTES + sum(
            len(PARTS) * (_ENTRY_BYTES + len(json.dumps(name))) for name in names
        )
        self._entries: dict[str, Any] = {}
        self._digest = hashlib.sha256()
        self._end = 0
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = FileIO(self._partial, "wb", opener=private_opener)
            self._file.seek(8 + self._reserved)
        return self

    def add(self, name: str, values: Array) -> None:
        """Append one tensor of its array's shape and type; uint16 is raw bfloat16."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self._digest.update(raw)
        self._write(raw)
        self._entries[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [self._end, self._end + len(raw)],
        }
        self._end += len(raw)

    def add_matrix(self, name: str, matrix: Matrix) -> None:
        """Append a matrix, in parts if it is quantised."""
        if isinstance(matrix, DenseMatrix):
            self.add(name, matrix.values)
            return
        blocks = matrix.blocks if isinstance(matrix, MixedMatrix) else matrix
        self.add(f"{name}#codes", blocks.codes)
        self.add(f"{name}#scales", blocks.scales)
        if blocks.shifts is not None:
            self.add(f"{name}#shifts", blocks.shifts)
        if isinstance(matrix, MixedMatrix):
            self.add(f"{name}#columns", matrix.columns)
            self.add(f"{name}#values", matrix.values)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header, with the SHA-256 of all tensors among `metadata`, and put the file in place."""
        named = {"__metadata__": {**metadata, "sha256": self._digest.hexdigest()}, **self._entries}
        header = json.dumps(named, separators=(",", ":")).encode()
        if len(header) > self._reserved:
            raise ValueError(f"a header of {len(header)} bytes does not fit the {self._reserved} left for it")
        with disk_errors(self.path):
            assert self._file is not None
            self._file.seek(0)
            self._write(memoryview(self._reserved.to_bytes(8, "little") + header.ljust(self._reserved)))
            os.fsync(self._file.fileno())
            self._file.close()  # before the rename: Windows does not rename open files
            os.replace(self._partial, self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _write(self, raw: memoryview) -> None:
        with disk_errors(self.path, lambda: len(raw)):
            assert self._file is not None
            done = 0
            while done < len(raw):
                done += self._file.write(raw[done:])


class PackedTensors:
    """Gives the decoder its tensors from a packed file (see `models.decoder.TensorSource`), and ranks parts of them."""

    def __init__(self, file: TensorFile, layout: Layout) -> None:
        self._file = file
        self._layout = layout

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        return self.part(name, layer, WHOLE)

    def part(self, name: str, layer: int | None, cut: TensorCut) -> Matrix:
        """The rows and columns of a matrix that a tensor rank takes; its rows are all that is read of it."""
        place = self._place(name, layer)
        if place.stored in self._file.entries:
            matrix = read_place(self._file, place, cut.rows)
        else:
            matrix = self._quantised(place, cut.rows or (0, place.shape[0]))
        return part_of(matrix, None, cut.columns)

    def _quantised(self, place: TensorPlace, rows: Span) -> Matrix:
        blocks = self._blocks(place, rows)
        if f"{place.stored}#columns" not in self._file.entries:
            return blocks
        loud = self._part(place, "columns", np.int64, (0, self._count(place, "columns")))
        if loud.size and not 0 <= loud.min() <= loud.max() < place.shape[1]:
            raise _wrong_parts(self._file, place)
        values = self._part(place, "values", np.float16, rows).reshape(-1, loud.size)
        return MixedMatrix(blocks, loud, values)

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return read_vector_place(self._file, self._place(name, layer))

    def _place(self, name: str, layer: int | None) -> TensorPlace:
        return (self._layout.model if layer is None else self._layout.layers[layer])[name]

    def _blocks(self, place: TensorPlace, rows: Span) -> BlockMatrix:
        shape = find_entry(self._file, f"{place.stored}#codes").shape
        height, width = place.shape
        if len(shape) != 3 or shape[0] != height or not shape[1] or width % shape[1]:
            raise _wrong_parts(self._file, place)
        size, bits = width // shape[1], 8 * shape[2] * shape[1] // width
        if bits not in (4, 8) or shape[2] * 8 != bits * size:
            raise _wrong_parts(self._file, place)
        count = rows[1] - rows[0]

        def part(name: str, dtype: type[np.generic], *inner: int) -> Array:
            return self._part(place, name, dtype, rows).reshape(count, *inner)

        has_shifts = f"{place.stored}#shifts" in self._file.entries
        return BlockMatrix(
            bits,
            size,
            part("codes", np.uint8, *shape[1:]),
            part("scales", np.float32, shape[1]),
            part("shifts", np.float32, shape[1]) if has_shifts else None,
        )

    def _count(self, place: TensorPlace, part: str) -> int:
        return find_entry(self._file, f"{place.stored}#{part}").shape[0]

    def _part(self, place: TensorPlace, part: str, dtype: type[np.generic], rows: Span) -> Array:
        name = f"{place.stored}#{part}"
        entry = find_entry(self._file, name)
        if entry.dtype != _DTYPES[np.dtype(dtype).name] or (
            part != "columns" and entry.shape[0] != place.shape[0]
        ):
            raise _wrong_parts(self._file, place)
        return np.frombuffer(self._file.read_rows(name, *rows), dtype)


def _wrong_parts(file: TensorFile, place: TensorPlace) -> CorruptModelError:
    return CorruptModelError(
        f"the parts of {place.stored!r} in {file.name} do not make a matrix of {place.shape[0]}×{place.shape[1]}",
        hint="delete the packed file so that it is made again, and run the same release on every node",
    )
