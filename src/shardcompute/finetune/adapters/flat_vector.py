"""The flat vector: all that a stage learns, layer by layer, one tensor behind the other, with their gradients.

Optimiser, split state and checkpoints then are about stretches of one vector. Tensors that are computed with are leaves
of autograd's graph that share its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import CorruptModelError
from shardcompute.finetune.adapters.parts import Shape, part_shapes
from shardcompute.finetune.modules import AdaptedMap
from shardcompute.finetune.plan import LoraShape

Place = tuple[int, int]
"""From where to where in the vector."""


class FlatVector:
    """`values` change in place; `leaves` are those of each adapted map, by the names of their parts."""

    def __init__(self, modules: Sequence[AdaptedMap], lora: LoraShape, device: torch.device) -> None:
        self._modules, self._lora, self._device = tuple(modules), lora, device
        size = sum(math.prod(shape) for _, _, shape in self._parts())
        self.values = torch.zeros(size, device=device)
        self.gradients = torch.zeros_like(self.values)
        self.leaves: dict[str, dict[str, torch.Tensor]] = {}
        self._by_layer: dict[int, dict[Place, torch.Tensor]] = {}
        for module, part, place, shape in self._places():
            leaf = self.values[slice(*place)].view(shape).detach().requires_grad_()
            self.leaves.setdefault(module.name, {})[part] = leaf
            self._by_layer.setdefault(module.layer, {})[place] = leaf

    def layer_sizes(self, layers: Sequence[int]) -> list[int]:
        """How much of it belongs to each of these layers."""
        return [sum(stop - start for start, stop in self.of_layer(layer)) for layer in layers]

    def of_layer(self, layer: int) -> Mapping[Place, torch.Tensor]:
        return self._by_layer.get(layer, {})

    def of_all(self) -> Mapping[Place, torch.Tensor]:
        return {place: leaf for layer in self._by_layer.values() for place, leaf in layer.items()}

    def add_gradient(self, place: Place, part: torch.Tensor) -> None:
        self.gradients[slice(*place)] += part.flatten()

    def cut(self, flat: torch.Tensor) -> Iterator[tuple[str, Float32]]:
        """A vector like this one as tensors by name."""
        for module, part, place, shape in self._places():
            yield f"{module.name}.{part}", flat[slice(*place)].view(shape).cpu().numpy().copy()

    def join(self, tensors: Mapping[str, Float32], prefix: str = "") -> torch.Tensor:
        """The other way round. CorruptModelError where something is missing."""
        flat = np.empty(len(self.values), dtype=np.float32)
        for module, part, place, shape in self._places():
            name = f"{prefix}{module.name}.{part}"
            found = tensors.get(name)
            if found is None or found.shape != shape:
                raise CorruptModelError(
                    f"the checkpoint has no {name} of the shape {shape}",
                    hint="it is of another run; begin anew with --fresh",
                )
            flat[slice(*place)] = found.ravel()
        return torch.from_numpy(flat).to(self._device)

    def _parts(self) -> Iterator[tuple[AdaptedMap, str, Shape]]:
        for module in self._modules:
            for part, shape in part_shapes(module, self._lora).items():
                yield module, part, shape

    def _places(self) -> Iterator[tuple[AdaptedMap, str, Place, Shape]]:
        start = 0
        for module, part, shape in self._parts():
            stop = start + math.prod(shape)
            yield module, part, (start, stop), shape
            start = stop
