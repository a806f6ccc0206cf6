"""Tensors of one tensor rank, cut from those of a stage. Their form is the whole model's: nothing is rounded again, and
all ranks together have exactly the weights of one process. Sources that can read parts are asked for no more than that;
what others give is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from shardcompute.backends.host.low_rank import AdapterLayers, AdapterMatrix
from shardcompute.backends.matrix import Float32, Matrix, part_of
from shardcompute.models.decoder import TensorSource
from shardcompute.models.spec import ModelSpec
from shardcompute.models.tensor_share import TensorCut, TensorSplit, cut_of, tensor_cuts


@runtime_checkable
class PartedTensors(Protocol):
    """A `TensorSource` that reads parts of matrices."""

    def part(self, name: str, layer: int | None, cut: TensorCut) -> Matrix:
        """What `cut` leaves of a matrix, with the numbers that it has in all of it."""
        ...


class RankTensors:
    """Gives a rank's decoder its tensors (see `models.decoder.TensorSource`)."""

    def __init__(self, source: TensorSource, spec: ModelSpec, split: TensorSplit, rank: int) -> None:
        self._source = source
        self._cuts = tensor_cuts(spec, split.shares[rank], split.exchange)

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        cut = cut_of(self._cuts, name)
        if isinstance(self._source, PartedTensors):
            return self._source.part(name, layer, cut)
        return part_of(self._source.matrix(name, layer), cut.rows, cut.columns)

    def vector(self, name: str, layer: int | None = None) -> Float32:
        cut, values = cut_of(self._cuts, name), self._source.vector(name, layer)
        own = values if cut.rows is None else values[slice(*cut.rows)]
        return np.zeros_like(own) if cut.is_others else own


def rank_adapters(adapters: AdapterLayers, spec: ModelSpec, split: TensorSplit, rank: int) -> AdapterLayers:
    """What adapters add to a rank's tensors: outputs are cut with their rows, inputs with their columns."""
    cuts = tensor_cuts(spec, split.shares[rank], split.exchange)
    layers = {
        layer: [_cut_matrices(matrices, cuts) for matrices in each] for layer, each in adapters.layers.items()
    }
    return AdapterLayers(adapters.names, layers)


def _cut_matrices(
    matrices: Mapping[str, AdapterMatrix], cuts: Mapping[str, TensorCut]
) -> dict[str, AdapterMatrix]:
    found = {}
    for name, matrix in matrices.items():
        cut = cut_of(cuts, name)
        up = matrix.up if cut.rows is None else matrix.up[slice(*cut.rows)]
        down = matrix.down if cut.columns is None else matrix.down[:, slice(*cut.columns)]
        found[name] = AdapterMatrix(down, up)
    return found
