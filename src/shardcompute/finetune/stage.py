"""A stage that learns: layers `[start, stop)` of a model, frozen, with additions of its own and their optimiser.

The layers are the serving decoder's, computed by differentiable primitives (`training_ops`). A micro-batch goes forward
once and backward once; between the two the stage keeps either all that its gradients need, or only what came into each
layer, computing the rest again (`recomputes`). Numbers are the same both ways, and however the model is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import CorruptModelError
from shardcompute.finetune.adamw import CopyGroup, SplitAdamW
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.modules import AdaptedMap, choose_modules, first_numbers
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.training_ops import Addition, TaughtLinear, TrainingOps
from shardcompute.models.decoder import Decoder, LayerWeights, TensorSource
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.loader import placed_rows

DOWN, UP = "lora_A.weight", "lora_B.weight"
_FIRST, _SECOND = "first moment of ", "second moment of "
_Place = tuple[int, int]
"""From where to where in the flat vector."""
_QKV = ("attention.q", "attention.k", "attention.v")


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Where and how a stage computes."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    """Of frozen weights and activations; what is learned is always float32."""
    recomputes: bool = False
    is_gguf: bool = False


@dataclass(slots=True)
class _KeptBatch:
    """What is kept of a micro-batch between forward and backward."""

    batch: MicroBatch
    inputs: list[torch.Tensor]
    """What came into each layer; without recomputation into the first."""
    output: torch.Tensor


class FinetuneStage:
    """`source` is read while this is made, and not needed afterwards. Not safe for several threads."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        stage: Stage,
        source: TensorSource,
        plan: FinetunePlan,
        options: StageOptions | None = None,
        copies: CopyGroup | None = None,
        modules: Sequence[AdaptedMap] | None = None,
    ) -> None:
        """`modules`: those of the stage that are adapted, where `layout` does not tell what PEFT calls them."""
        options = options or StageOptions()
        self.stage, self.plan, self._options, self._layout = stage, plan, options, layout
        self._device = torch.device(options.device)
        self._ops = TrainingOps(plan.longest, self._device, options.dtype)
        self._decoder = Decoder(spec, stage, source)
        if modules is None:
            modules = choose_modules(spec, layout, plan.lora, is_gguf=options.is_gguf, stage=stage)
        self.modules = tuple(modules)
        sizes = [module.parameters(plan.lora.rank) for module in self.modules]
        self.values = torch.empty(sum(sizes), device=self._device)
        self._gradients = torch.zeros_like(self.values)
        self._parameters = self._cut_parameters()
        self.load_state(self._first_state())
        per_layer = [
            sum(size for size, module in zip(sizes, self.modules, strict=True) if module.layer == layer)
            for layer in range(stage.start, stage.stop)
        ]
        self._optimizer = SplitAdamW(self.values, per_layer, plan, copies)
        self._load(spec)
        self._kept: dict[int, _KeptBatch] = {}

    # What comes and goes

    def forward(self, batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """A micro-batch one stage on: hidden rows, or at the last stage its part of the step's loss. The first stage
        begins with token ids, others with rows of the stage before."""
        x = self._enter(batch, hidden)
        number = batch.key[1]
        with self._rows_of(batch, learns=True):
            if self._options.recomputes:
                inputs = [x]
                with torch.no_grad():
                    for layer in range(self.stage.count):
                        inputs.append(self._layer(layer, inputs[-1]))
                    output = inputs[-1] if not self.stage.is_last else self._loss(inputs[-1], batch)
            else:
                inputs = [x.requires_grad_(not self.stage.is_first)]
                output = self._whole(x, batch)
        self._kept[number] = _KeptBatch(batch, inputs, output)
        return output.detach()

    def backward(self, number: int, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """What its output changes by, back through the layers: adds to this stage's gradients and returns that of its
        input, None at the first stage. The last stage begins with its loss."""
        kept = self._kept.pop(number)
        if gradient is not None:
            gradient = gradient.to(self._device, self._options.dtype)
        if self._options.recomputes:
            with self._rows_of(kept.batch, learns=True):
                return self._backward_by_layer(kept, gradient)
        return self._backward_through(kept.output, kept.inputs[0], gradient, self._all_parameters())

    def evaluate(self, batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """`forward` of which nothing is kept, without dropout."""
        with torch.no_grad(), self._rows_of(batch, learns=False):
            return self._whole(self._enter(batch, hidden), batch)

    def forget(self) -> None:
        """Drop what is kept of micro-batches and gathered of gradients: the step begins anew."""
        self._kept.clear()
        self._gradients.zero_()

    # The optimiser

    def gather_gradients(self) -> NDArray[np.float64]:
        """All micro-batches of a step are back: the squared sums of gradients, by layer."""
        squares = self._optimizer.gather(self._gradients)
        self._gradients.zero_()
        return squares

    def apply_gradients(self, step: int, scale: float) -> None:
        """Learn from them, each times `scale`."""
        self._optimizer.step(step, self.plan.rate_at(step), scale)

    @property
    def optimizer_bytes(self) -> int:
        return self._optimizer.state_bytes

    # State

    def state(self) -> dict[str, Float32]:
        """What is learned, by PEFT's names, and the optimiser's moments."""
        found = self.learned()
        for prefix, moment in zip((_FIRST, _SECOND), self._optimizer.moments(), strict=True):
            found |= {prefix + name: part for name, part in self._cut_flat(moment)}
        return found

    def learned(self) -> dict[str, Float32]:
        return dict(self._cut_flat(self.values))

    def load_state(self, state: Mapping[str, Float32]) -> None:
        """Go on from what `state` has given, of these layers at least. CorruptModelError where something is missing."""
        self.values.copy_(self._join_flat(state, ""))
        if any(name.startswith(_FIRST) for name in state):
            self._optimizer.load_moments(self._join_flat(state, _FIRST), self._join_flat(state, _SECOND))

    def gradients(self) -> dict[str, Float32]:
        """What the micro-batches since the last step have added up to, by PEFT's names."""
        return dict(self._cut_flat(self._gradients))

    # Inside

    def _load(self, spec: ModelSpec) -> None:
        decoder, ops = self._decoder, self._ops
        with torch.no_grad():
            self._shared = decoder.load_shared(ops)
            self._embedding = decoder.load_embedding(ops) if self.stage.is_first else None
            self._layers = [
                self._taught(decoder.load_layer(ops, layer), self.stage.start + layer, spec.has_gate)
                for layer in range(self.stage.count)
            ]
            self._head = decoder.load_head(ops) if self.stage.is_last else None

    def _taught(self, weights: LayerWeights, layer: int, has_gate: bool) -> LayerWeights:
        """The layer's weights with additions around those maps that have some."""
        maps: dict[str, Sequence[str]] = {
            "qkv": _QKV,
            "out": ("attention.out",),
            "gate_up": ("mlp.gate", "mlp.up") if has_gate else ("mlp.up",),
            "down": ("mlp.down",),
        }
        changed: dict[str, Any] = {}
        for field, names in maps.items():
            base = getattr(weights, field)
            additions = None if base is None else self._additions(layer, names)
            if additions is not None:
                changed[field] = TaughtLinear(base, additions, self.plan.lora.scale)
        return replace(weights, **changed)

    def _additions(self, layer: int, names: Sequence[str]) -> tuple[tuple[int, Addition | None], ...] | None:
        found: list[tuple[int, Addition | None]] = []
        widths = {name: self._layout.layers[layer][name].shape[0] for name in names}
        done: set[str] = set()
        for name in names:
            if name in done:
                continue
            owner = self._owner(layer, name)
            if owner is None:
                found.append((widths[name], None))
                continue
            parts = [each for each in names if each in dict(owner.module.places)]
            done.update(parts)
            found.append((sum(widths[each] for each in parts), self._addition(owner, parts, widths)))
        return tuple(found) if any(addition is not None for _, addition in found) else None

    def _owner(self, layer: int, name: str) -> AdaptedMap | None:
        here = (module for module in self.modules if module.layer == layer)
        return next((module for module in here if name in dict(module.module.places)), None)

    def _addition(self, owner: AdaptedMap, parts: Sequence[str], widths: Mapping[str, int]) -> Addition:
        places, rows = dict(owner.module.places), []
        stored = np.arange(owner.module.width_out, dtype=np.float32)[:, None]
        for name in parts:
            place = places[name]
            rows.append(np.arange(widths[name]) if place is None else placed_rows(place, stored)[:, 0])
        order = np.concatenate(rows).astype(np.int64)
        is_same = np.array_equal(order, np.arange(owner.module.width_out))
        down, up = self._parameters[owner.name]
        placed = None if is_same else torch.from_numpy(order).to(self._device)
        return Addition(owner.name, down, up, placed, len(order))

    @contextmanager
    def _rows_of(self, batch: MicroBatch, *, learns: bool) -> Iterator[None]:
        key = (self.plan.seed, *batch.key)
        dropout = self.plan.lora.dropout if learns else 0.0
        self._ops.begin_rows(
            batch.lengths, torch.from_numpy(batch.rows).to(torch.int64), dropout=dropout, key=key
        )
        yield

    def _enter(self, batch: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is not None:
            return hidden.detach().to(self._device, self._options.dtype)
        ids = torch.from_numpy(batch.ids).to(self._device, torch.int64)
        with torch.no_grad():
            embedded: torch.Tensor = self._decoder.embed(self._ops, self._embedding, ids)
        return embedded

    def _whole(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        for layer in range(self.stage.count):
            x = self._layer(layer, x)
        return self._loss(x, batch) if self.stage.is_last else x

    def _layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._decoder.layer(self._ops, self._shared, self._layers[layer], layer, x)
        return out

    def _loss(self, x: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        assert self._head is not None
        logits: Any = self._decoder.head(
            self._ops, self._head, self._decoder.normed(self._ops, self._head, x)
        )
        targets = torch.from_numpy(batch.targets).to(self._device, torch.int64)
        return functional.cross_entropy(logits.float(), targets, reduction="sum") / batch.total

    def _backward_by_layer(self, kept: _KeptBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if self.stage.is_last:
            x = kept.inputs[-1].requires_grad_()
            gradient = self._backward_through(self._loss(x, kept.batch), x, gradient, {})
        for layer in reversed(range(self.stage.count)):
            is_first = self.stage.is_first and layer == 0
            x = kept.inputs[layer].requires_grad_(not is_first)
            parameters = self._layer_parameters(self.stage.start + layer)
            gradient = self._backward_through(self._layer(layer, x), x, gradient, parameters)
        return gradient

    def _backward_through(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        gradient: torch.Tensor | None,
        parameters: Mapping[_Place, torch.Tensor],
    ) -> torch.Tensor | None:
        inputs = [*([x] if x.requires_grad else []), *parameters.values()]
        if not output.requires_grad or not inputs:
            return None
        found = list(torch.autograd.grad(output, inputs, gradient, allow_unused=True))
        passed = found.pop(0) if x.requires_grad else None
        for place, part in zip(parameters, found, strict=True):
            if part is not None:
                self._gradients[slice(*place)] += part.flatten()
        return passed

    # The flat vector

    def _places(self) -> Iterator[tuple[AdaptedMap, str, _Place, tuple[int, int]]]:
        start, rank = 0, self.plan.lora.rank
        for module in self.modules:
            shapes = ((DOWN, (rank, module.module.width_in)), (UP, (module.module.width_out, rank)))
            for part, shape in shapes:
                stop = start + shape[0] * shape[1]
                yield module, part, (start, stop), shape
                start = stop

    def _cut_parameters(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Leaves of the graph that share the memory of the flat vector."""
        self._slices: dict[int, dict[_Place, torch.Tensor]] = {}
        found: dict[str, list[torch.Tensor]] = {}
        for module, _, place, shape in self._places():
            leaf = self.values[slice(*place)].view(shape).detach().requires_grad_()
            found.setdefault(module.name, []).append(leaf)
            self._slices.setdefault(module.layer, {})[place] = leaf
        return {name: (down, up) for name, (down, up) in found.items()}

    def _layer_parameters(self, layer: int) -> Mapping[_Place, torch.Tensor]:
        return self._slices.get(layer, {})

    def _all_parameters(self) -> Mapping[_Place, torch.Tensor]:
        return {place: leaf for layer in self._slices.values() for place, leaf in layer.items()}

    def _cut_flat(self, flat: torch.Tensor) -> Iterator[tuple[str, Float32]]:
        for module, part, place, shape in self._places():
            yield f"{module.name}.{part}", flat[slice(*place)].view(shape).cpu().numpy().copy()

    def _join_flat(self, state: Mapping[str, Float32], prefix: str) -> torch.Tensor:
        flat = np.empty(len(self.values), dtype=np.float32)
        for module, part, place, shape in self._places():
            name = f"{prefix}{module.name}.{part}"
            found = state.get(name)
            if found is None or found.shape != shape:
                raise CorruptModelError(
                    f"the checkpoint has no {name} of the shape {shape}",
                    hint="it is of another run; begin anew with --fresh",
                )
            flat[slice(*place)] = found.ravel()
        return torch.from_numpy(flat).to(self._device)

    def _first_state(self) -> dict[str, Float32]:
        found = {}
        for module in self.modules:
            numbers = first_numbers(module, self.plan.lora.rank, self.plan.seed)
            for part, values in zip((DOWN, UP), numbers, strict=True):
                found[f"{module.name}.{part}"] = values
        return found
