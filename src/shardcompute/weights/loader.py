"""Loader of a shard's tensors, read one by one as the decoder asks for them, already sliced and in the wanted form.

Only the bytes that a shard needs are read. A checkpoint's tensors must be exactly those its family has (see
`models.families`), and each must have the shape that its config calls for: anything else is an error, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shardcompute.backends.matrix import Array, BlockMatrix, DenseMatrix, Float32, Matrix, part_of
from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.layout import TOWER, Layout, TensorPlace
from shardcompute.models.tensor_share import WHOLE, TensorCut
from shardcompute.weights.formats.file_rows import ROW_TYPES, FileRows, open_file_rows
from shardcompute.weights.formats.quantise import convert
from shardcompute.weights.formats.tensor_file import (
    FoldedMatrices,
    Span,
    TensorEntry,
    TensorFile,
    find_entry,
    read_expert_matrix,
    read_flat,
    read_matrix,
    read_vector,
)

# Rounding these would change which experts a token goes to.
NEVER_ROUNDED = ("mlp.router", "mlp.shared_score", "attention.kv_up", "attention.k_up", "attention.v_up")
# In 4 bits these cost most of the perplexity that int4 loses (decision 4): the head, and what has outliers as inputs.
NEVER_INT4 = ("embedding", "head", ".down")


class ShardTensors:
    """Gives the decoder its tensors (see `models.decoder.TensorSource`), and ranks parts of them."""

    def __init__(self, file: TensorFile, layout: Layout, *, form: str = "native") -> None:
        self._file = file
        self._layout = layout
        self._form = form

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        return self.part(name, layer, WHOLE)

    def part(self, name: str, layer: int | None, cut: TensorCut) -> Matrix:
        """The rows and columns of a matrix that a tensor rank takes, with the numbers that they have in all of it."""
        place = self._place(name, layer)
        rows, columns = early_cut(name, place, cut, self._form)
        matrix = self._formed(name, read_place(self._file, place, rows, columns))
        return part_of(matrix, None if rows else cut.rows, None if columns else cut.columns)

    def _formed(self, name: str, matrix: Matrix) -> Matrix:
        if name in NEVER_ROUNDED:
            return DenseMatrix(matrix.to_dense())
        if name.startswith(TOWER):
            # Nobody has measured what rounding costs there: a tower stays as its file has it.
            return matrix
        is_in_4_bits = isinstance(matrix, BlockMatrix) and matrix.bits == 4
        is_kept = self._form == "int4" and name.endswith(NEVER_INT4) and not is_in_4_bits
        return convert(matrix, "int8" if is_kept else self._form)

    def stored_rows(self, name: str) -> FileRows | None:
        """A table that can stay in its file, see `stays_in_file`."""
        place = self._place(name, None)
        if isinstance(self._file, FoldedMatrices):
            return None
        entry = find_entry(self._file, place.stored)
        return open_file_rows(self._file, entry) if stays_in_file(place, entry, self._form) else None

    def vector(self, name: str, layer: int | None = None) -> Float32:
        return read_vector_place(self._file, self._place(name, layer))

    def _place(self, name: str, layer: int | None) -> TensorPlace:
        places = self._layout.model if layer is None else self._layout.layers[layer]
        return places[name]


def stays_in_file(place: TensorPlace, entry: TensorEntry, form: str) -> bool:
    """Whether rows of a table can be looked up in the file that it comes in, and give what reading it all would."""
    is_as_stored = TensorPlace(place.stored, place.shape) == place
    return (
        is_as_stored
        and entry.shape == place.shape
        and entry.dtype in ROW_TYPES
        and form in ("native", "float32")
    )


def stored_bytes(tensors: ShardTensors, layout: Layout) -> int:
    """What all of a model's matrices take in the form in which `tensors` gives them; a tied head counts once."""
    total = 0
    for layer, places in [(None, layout.model), *enumerate(layout.layers)]:
        seen: set[str] = set()
        for name, place in places.items():
            if len(place.shape) == 2 and (layer is not None or place.stored not in seen):
                total += tensors.matrix(name, layer).size_bytes
            seen.add(place.stored)
    return total


def check_stage(file: TensorFile, layout: Layout, start: int, stop: int) -> None:
    """Raise CorruptModelError where a tensor of layers `[start, stop)` (or of the ends) has another shape."""
    expected: dict[str, tuple[int, ...]] = {}
    also: dict[str, tuple[int, ...]] = {}
    for places in (layout.model, *layout.layers[start:stop]):
        for place in places.values():
            shape = _stored_shape(place)
            if place.stored_shape is not None:
                also[place.stored] = place.shape
            # Parts of one tensor (q, k and v, or experts) together reach its end.
            expected[place.stored] = tuple(map(max, expected.get(place.stored, shape), shape))
    for stored, wanted in expected.items():
        shape = find_entry(file, stored).shape
        if shape not in (wanted, also.get(stored)):
            raise CorruptModelError(
                f"{stored} in {file.name} has the shape {_shape(shape)} where the config calls for "
                f"{_shape(wanted)}",
                hint="the config and the weights do not belong together; fetch the model again",
            )


def stage_bytes(file: TensorFile, layout: Layout, start: int, stop: int) -> int:
    """File bytes of layers `[start, stop)`, without embedding and head."""
    total = 0
    for layer in layout.layers[start:stop]:
        total += sum(place_bytes(file, place) for place in layer.values())
    return total


def place_bytes(file: TensorFile, place: TensorPlace) -> int:
    entry = find_entry(file, place.stored)
    whole = math.prod(entry.shape)
    return entry.size_bytes * math.prod(place.shape) // whole if whole else 0


def early_cut(name: str, place: TensorPlace, cut: TensorCut, form: str) -> tuple[Span | None, Span | None]:
    """Which rows and columns of a matrix can be read alone: those that lie together in the file and come out as they
    would in all of it. What remains is cut when the matrix has its form."""
    is_rounded = name not in NEVER_ROUNDED and not name.startswith(TOWER) and form != "float32"
    if place.is_transposed:
        # Our columns are its rows. Blocks are along columns, so that a cut may change what they are made of.
        return None, None if is_rounded and form != "native" else cut.columns
    # Columns to be kept as they are in `mixed` are chosen by all rows.
    return None if is_rounded and form == "mixed" else cut.rows, None


def stored_rows(
    place: TensorPlace, entry: TensorEntry, rows: Span | None, columns: Span | None
) -> Span | None:
    """The rows of a stored matrix, counted through stacked ones, from which a part is read; None: all there are."""
    if len(entry.shape) < 2 or (place.stored_shape is not None and len(place.stored_shape) != 3):
        return None
    if place.stored_shape is not None and entry.shape != place.shape:
        return rows
    height = entry.shape[-2]
    first = 0 if place.expert is None else place.expert * height
    if place.is_transposed:
        start, stop = columns or (0, height)
    else:
        start, stop = rows or (0, place.shape[0])
        if place.every is not None:
            start, stop = place.every[1] * start, place.every[1] * stop
        elif place.rows is not None:
            start, stop = place.rows[0] + start, place.rows[0] + stop
    return first + start, first + stop


def read_place(
    file: TensorFile, place: TensorPlace, rows: Span | None = None, columns: Span | None = None
) -> Matrix:
    """One of our matrices, or rows (of one that is stored transposed: columns) of it, from where the checkpoint keeps
    it."""
    entry = find_entry(file, place.stored)
    if place.stored_shape is not None and entry.shape != place.shape:
        return _read_reshaped(file, place, rows or (0, place.shape[0]))
    span = stored_rows(place, entry, rows, columns)
    if place.expert is not None and span is not None:
        first = place.expert * entry.shape[-2]
        span = span[0] - first, span[1] - first
        matrix = read_expert_matrix(file, place.stored, place.expert, span)
    else:
        matrix = read_matrix(file, place.stored, span)
    if place.is_transposed or place.every is not None:
        return _rearranged(matrix, place)
    if place.interleaved_head_dim is not None:
        matrix = _take_rows(matrix, _halves_order(place, matrix.shape[0]))
    return matrix


def placed_rows(place: TensorPlace, values: Float32) -> Float32:
    """The rows of one of our matrices, of values `[stored rows, …]` in the order in which the checkpoint has them."""
    offset, step = place.every or (0, 1)
    first = place.rows[0] if place.rows is not None else 0
    rows = values[offset::step][first : first + place.shape[0]]
    if place.interleaved_head_dim is not None:
        rows = rows[_halves_order(place, len(rows))]
    return np.ascontiguousarray(rows)


def read_vector_place(file: TensorFile, place: TensorPlace) -> Float32:
    offset, step = place.every or (0, 1)
    first, count = place.rows[0] if place.rows is not None else 0, place.shape[0]
    if place.expert is not None:
        row = read_matrix(file, place.stored, (place.expert, place.expert + 1)).to_dense()[0]
        values = row[first:][offset::step][:count]
    elif step > 1:
        values = read_vector(file, place.stored)[first:][offset::step][:count]
    else:
        values = read_vector(file, place.stored, first, first + count)
    if place.interleaved_head_dim is not None:
        values = values[_halves_order(place, len(values))]
    return values + np.float32(1) if place.plus_one else np.ascontiguousarray(values)


def _rearranged(matrix: Matrix, place: TensorPlace) -> Matrix:
    """A matrix whose rows do not lie together in the file: stored transposed, or every other row."""
    offset, step = place.every or (0, 1)
    if not place.is_transposed:
        return _take_rows(matrix, np.arange(offset, matrix.shape[0], step))
    if not isinstance(matrix, DenseMatrix):
        raise UnsupportedModelError(
            f"{place.stored} is quantised in an order that cannot be rearranged without rounding it again",
            hint="use a full-precision checkpoint of this model",
        )
    first = place.rows[0] if place.rows is not None else 0
    values = matrix.values.T[offset::step][first : first + place.shape[0]]
    return DenseMatrix(np.ascontiguousarray(values))


def _read_reshaped(file: TensorFile, place: TensorPlace, rows: Span) -> Matrix:
    """Rows of a matrix that is stored as a vector, or as one matrix for each unit of it."""
    shape = place.stored_shape
    if shape is None or len(shape) != 3:
        return DenseMatrix(read_flat(file, place.stored).reshape(place.shape)[rows[0] : rows[1]])
    units = range(rows[0] // shape[1], rows[1] // shape[1])
    parts = [read_expert_matrix(file, place.stored, unit).to_dense() for unit in units]
    return DenseMatrix(np.concatenate(parts))


def _stored_shape(place: TensorPlace) -> tuple[int, ...]:
    """The least shape of the stored tensor: this part is its end, this expert its last."""
    shape = place.stored_shape or place.shape
    if place.every is not None:
        shape = (shape[0] * place.every[1], *shape[1:])
    if place.rows is not None:
        shape = (place.rows[1], *shape[1:])
    if place.is_transposed:
        shape = shape[::-1]
    if place.expert is not None:
        shape = (place.expert + 1, *shape)
    return shape


def _halves_order(place: TensorPlace, rows: int) -> Array:
    """Indices that turn pairs (0, 1), (2, 3), … at the beginning of each head into halves."""
    heads = np.arange(rows).reshape(-1, place.interleaved_head_dim or rows)
    turning = place.interleaved_dim or heads.shape[1]
    pairs = heads[:, :turning].reshape(len(heads), -1, 2)
    halves = pairs.transpose(0, 2, 1).reshape(len(heads), -1)
    return np.concatenate([halves, heads[:, turning:]], axis=1).reshape(-1)


def _take_rows(matrix: Matrix, order: Array) -> Matrix:
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.values[order])
    if isinstance(matrix, BlockMatrix):
        shifts = None if matrix.shifts is None else matrix.shifts[order]
        return replace(matrix, codes=matrix.codes[order], scales=matrix.scales[order], shifts=shifts)
    raise UnsupportedModelError("rows of a mixed matrix cannot be rearranged")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "nothing"
