"""Towers of backends that compute at once: one picture after the other, layer after layer."""

from __future__ import annotations

from typing import Any, Protocol

from shardcompute.backends.executor import PatchRows, PictureNetwork
from shardcompute.backends.matrix import Float32
from shardcompute.backends.ops import PatchOps, Tensor
from shardcompute.core.pictures import PictureSpan


class EagerPatchOps(PatchOps, Protocol):
    def begin_patches(self, patches: PatchRows) -> None:
        """The next calls are about this picture."""
        ...

    def upload(self, values: Float32) -> Tensor: ...

    def download(self, x: Tensor) -> Float32: ...


class EagerTower:
    """A tower with its weights, computed by `ops`."""

    def __init__(self, network: PictureNetwork, ops: EagerPatchOps) -> None:
        self._network = network
        self._ops = ops
        self._front = network.load_front(ops)
        self._layers: list[Any] = [network.load_layer(ops, layer) for layer in range(network.layer_count)]
        self._back = network.load_back(ops)

    def encode(self, span: PictureSpan, patches: bytes) -> Float32:
        network, ops = self._network, self._ops
        given = network.patch_rows(span, patches)
        ops.begin_patches(given)
        added = None if given.added is None else ops.upload(given.added)
        x = network.front(ops, self._front, ops.upload(given.numbers), added)
        for layer, weights in enumerate(self._layers):
            x = network.layer(ops, weights, layer, x)
        rows = ops.download(network.back(ops, self._back, x))
        return rows if given.order is None else rows[given.order]
