"""Quantisation scheme: which tensors of a checkpoint make one matrix, and what reading it gives.

A method (`gptq`, `fp8`, …) turns its `quantization_config` into a `Scheme`. A scheme has one or more `PartNames`: a
matrix `layer.q_proj.weight` may lie in `layer.q_proj.qweight`, `.scales` and `.qzeros`. Names alone say what is
quantised, so a checkpoint of many files is understood from its index. `fold` then checks types and shapes of the parts
against each other and gives a `QuantisedMatrix`; only its `read` touches weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from shardcompute.backends.footprint import MatrixForm
from shardcompute.backends.matrix import Matrix
from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.formats.tensor_file import Span, TensorEntry, TensorFile

Read = Callable[[TensorFile, Span, Span], Matrix]
"""Rows and columns of a matrix, from the file of its parts; rows of stacked experts are counted through."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """One matrix, or experts' matrices stacked: `label` is what its number type is called, `form` what `read` gives."""

    label: str
    shape: tuple[int, ...]
    form: MatrixForm
    read: Read


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of matrix `name` that are there, by the ends of their names. `file` is None where only entries are at
    hand: then nothing may be read, and what only contents tell stays open."""

    name: str
    entries: Mapping[str, TensorEntry]
    file: TensorFile | None

    def __contains__(self, end: str) -> bool:
        return end in self.entries

    def entry(self, end: str) -> TensorEntry:
        if end not in self.entries:
            raise self.corrupt(f"lacks its {end.strip('._')}")
        return self.entries[end]

    def corrupt(self, fault: str) -> CorruptModelError:
        return CorruptModelError(
            f"the quantised matrix {self.name!r} {fault}",
            hint="the configuration and the weights may belong to different models; fetch both again",
        )


@dataclass(frozen=True, slots=True)
class PartNames:
    """How the tensors of a matrix are named: behind one beginning comes `matrix` in the matrix's own name, `marker` in
    the name of the tensor that tells it is quantised, and `others` in those of the rest."""

    matrix: str
    marker: str
    others: tuple[str, ...]
    fold: Callable[[Parts], QuantisedMatrix]

    def beginning(self, name: str) -> str | None:
        return name[: len(name) - len(self.matrix)] if name.endswith(self.matrix) else None

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.marker, *self.others)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to quantise a checkpoint. Tensors whose names end in one of `dropped` belong to activations or to a
    quantised KV cache; neither is rounded here."""

    method: str
    names: tuple[PartNames, ...]
    dropped: tuple[str, ...] = ()
    writes_biases: bool = False
    """Every matrix has a `.bias` beside it, zero where the model has none."""
    note: str = ""
    """What of the config is not done here, for people."""

    def find(self, name: str, stored: Container[str]) -> tuple[PartNames, str] | None:
        """How the matrix `name` is stored, and the beginning of its names; None where it is not quantised."""
        for each in self.names:
            beginning = each.beginning(name)
            if beginning is not None and beginning + each.marker in stored:
                return each, beginning
        return None

    def parts(self, name: str, stored: Container[str]) -> tuple[str, ...]:
        """The stored tensors of the matrix or vector `name`."""
        found = self.find(name, stored)
        if found is None:
            return (name,)
        each, beginning = found
        return tuple(beginning + end for end in each.ends if beginning + end in stored)
