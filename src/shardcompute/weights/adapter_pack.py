"""Adapters beside a model that is served: each layer of each travels as an attachment (`weights.attached`).

So a stage fetches what is added to its own layers, from whoever has it, checked and cached like weights. Stored names
tell which adapters a model has, and in which layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from shardcompute.backends.host.low_rank import NO_ADAPTERS, AdapterLayers, AdapterMatrix
from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import CorruptModelError
from shardcompute.models.layout import Layout
from shardcompute.models.spec import Stage
from shardcompute.weights.adapters import ADAPTABLE, MAX_RANK, Adapter
from shardcompute.weights.attached import find_attachment, read_attachment, stored_name
from shardcompute.weights.formats.tensor_file import TensorFile

_MARK = "@adapter/"


class _PackedMatrix(msgspec.Struct, frozen=True, array_like=True):
    name: str
    rank: int
    down: bytes
    up: bytes


_decoder = msgspec.msgpack.Decoder(list[_PackedMatrix])


def adapter_attachments(adapters: Sequence[Adapter]) -> dict[str, bytes]:
    """What travels of these beside the weights."""
    return {
        _name(adapter.name, layer): _encode(adapter, layer)
        for adapter in adapters
        for layer in adapter.modules
    }


def adapter_names(stored: Iterable[str]) -> tuple[str, ...]:
    """The adapters among stored tensors, in the order of their numbers."""
    return tuple(sorted({name.split("/")[1] for name in stored if name.startswith(_MARK)}))


def adapters_key(stored: Iterable[str]) -> str:
    """What tells the adapters among stored tensors from others, by their contents; "" where there are none."""
    own = sorted(name for name in stored if name.startswith(_MARK))
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:32] if own else ""


def key_of_adapters(adapters: Sequence[Adapter]) -> str:
    """The same, of adapters that are not served yet."""
    return adapters_key(stored_name(name, content) for name, content in adapter_attachments(adapters).items())


def is_of_adapter(stored: str) -> bool:
    return stored.startswith(_MARK)


def adapter_tensors(stored: Iterable[str], layer: int) -> tuple[str, ...]:
    """The stored tensors of all adapters of a layer."""
    parts = ((name, name.split("/")) for name in stored if name.startswith(_MARK))
    return tuple(name for name, split in parts if split[2] == str(layer))


def served_adapters(tensors: TensorFile, layout: Layout, stage: Stage) -> AdapterLayers:
    """What the adapters of a served model add to the layers of a stage. CorruptModelError where it does not fit."""
    names = adapter_names(tensors.entries)
    if not names:
        return NO_ADAPTERS
    layers = {}
    for index in range(stage.start, stage.stop):
        shapes = {name: place.shape for name, place in layout.layers[index].items() if name in ADAPTABLE}
        layers[index] = [_read(tensors, name, index, shapes) for name in names]
    return AdapterLayers(names, layers)


def _read(
    tensors: TensorFile, name: str, layer: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, AdapterMatrix]:
    if find_attachment(tensors.entries, _name(name, layer)) is None:
        return {}
    content = read_attachment(tensors, _name(name, layer))
    try:
        packed = _decoder.decode(content or b"")
        return {each.name: _unpack(each, shapes[each.name]) for each in packed}
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise CorruptModelError(
            f"the adapter {name} of {tensors.name} does not fit layer {layer}: {error!r}",
            hint="run the same release on every node",
        ) from error


def _unpack(packed: _PackedMatrix, shape: tuple[int, ...]) -> AdapterMatrix:
    rank = packed.rank
    if not 0 < rank <= MAX_RANK:
        raise ValueError(f"no rank is {rank}")
    return AdapterMatrix(
        _floats(packed.down).reshape(rank, shape[1]), _floats(packed.up).reshape(shape[0], rank)
    )


def _floats(content: bytes) -> Float32:
    return np.frombuffer(content, dtype="<f4").astype(np.float32)


def _encode(adapter: Adapter, layer: int) -> bytes:
    return msgspec.msgpack.encode(
        [
            _PackedMatrix(
                name, added.rank, added.down.astype("<f4").tobytes(), added.up.astype("<f4").tobytes()
            )
            for name, added in sorted(adapter.layer(layer).items())
        ]
    )


def _name(adapter: str, layer: int) -> str:
    return f"adapter/{adapter}/{layer}"
