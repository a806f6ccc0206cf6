"""Folded tensor file: a quantised checkpoint shown as if each matrix were one tensor.

`entries` has one entry for a matrix, of its true shape, with the bytes of all its parts; `read_matrix` and its kin (see
`formats.tensor_file`) then give its rows. What is not quantised reads as it is. The file beneath, `stored`, is what
travels: a worker is sent the original tensors and folds them itself, by the same scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardcompute.backends.footprint import MatrixForm
from shardcompute.backends.matrix import Matrix
from shardcompute.weights.formats.tensor_file import Span, TensorEntry, TensorFile
from shardcompute.weights.quantised.scheme import Parts, QuantisedMatrix, Scheme


class FoldedEntries(Mapping[str, TensorEntry]):
    """Entries in which the parts of a matrix are one. Reading one may open the file it lies in."""

    def __init__(
        self, stored: Mapping[str, TensorEntry], scheme: Scheme, file: TensorFile | None = None
    ) -> None:
        self._stored = stored
        self._scheme = scheme
        self._file = file
        self._names = tuple(self._folded_names())
        self._known = frozenset(self._names)

    def __getitem__(self, name: str) -> TensorEntry:
        if name not in self._known:
            raise KeyError(name)
        matrix = self.matrix(name)
        if matrix is None:
            return self._stored[name]
        size = sum(self._stored[part].size_bytes for part in self._scheme.parts(name, self._stored))
        return TensorEntry(name, matrix.label, matrix.shape, 0, size)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def matrix(self, name: str) -> QuantisedMatrix | None:
        """The matrix `name` if it is quantised; `CorruptModelError` where its parts do not make one."""
        found = self._scheme.find(name, self._stored)
        if found is None:
            return None
        names, beginning = found
        entries = {
            end: self._stored[beginning + end] for end in names.ends if beginning + end in self._stored
        }
        return names.fold(Parts(name, entries, self._file))

    def form(self, name: str) -> MatrixForm | None:
        """What reading the matrix `name` gives, None where it is not quantised."""
        matrix = self.matrix(name)
        return None if matrix is None else matrix.form

    def _folded_names(self) -> Iterator[str]:
        hidden: set[str] = set()
        matrices: dict[str, str] = {}
        for stored in self._stored:
            for names in self._scheme.names:
                if not stored.endswith(names.marker):
                    continue
                beginning = stored[: len(stored) - len(names.marker)]
                name = beginning + names.matrix
                # A scale marks a matrix only where there is one.
                if names.matrix not in names.ends or name in self._stored:
                    matrices[stored] = name
                    hidden.update(beginning + end for end in names.ends)
        seen: set[str] = set()
        for stored in self._stored:
            is_part = stored in hidden or stored.endswith(self._scheme.dropped)
            name = matrices.get(stored, "" if is_part else stored)
            if name and name not in seen:
                seen.add(name)
                yield name


class FoldedTensorFile:
    """A `TensorFile` of folded entries. Bytes can be read of tensors that are not quantised."""

    def __init__(self, stored: TensorFile, scheme: Scheme) -> None:
        self.stored = stored
        self.name = stored.name
        self.metadata: Mapping[str, Any] = stored.metadata
        self.entries = FoldedEntries(stored.entries, scheme, stored)

    def read_folded(self, name: str, rows: Span, columns: Span) -> Matrix | None:
        """Rows and columns of a quantised matrix, None where `name` is not one."""
        matrix = self.entries.matrix(name)
        return None if matrix is None else matrix.read(self.stored, rows, columns)

    def read_bytes(self, name: str, offset: int, length: int) -> memoryview:
        return self.stored.read_bytes(name, offset, length)

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        return self.stored.read_rows(name, start, stop)

    def close(self) -> None:
        self.stored.close()


def stored_file(file: TensorFile) -> TensorFile:
    """The file beneath a folded one; any other file itself."""
    return file.stored if isinstance(file, FoldedTensorFile) else file
