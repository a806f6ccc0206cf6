"""A stage that learns: layers `[start, stop)` of a model, frozen, with additions of its own and their optimiser.

The layers are the serving decoder's, computed by differentiable primitives (`training_ops`). A micro-batch goes forward
once and backward once; between the two the stage keeps either all that its gradients need, or only what came into each
layer, computing the rest again (`recomputes`). Numbers are the same both ways, and however the model is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.backends.matrix import Float32
from shardcompute.backends.torch.weights import DeviceLinear
from shardcompute.core.errors import UsageError
from shardcompute.finetune.adamw import CopyGroup, SplitAdamW
from shardcompute.finetune.adapters.flat_vector import FlatVector, Place
from shardcompute.finetune.adapters.parts import DOWN, MAGNITUDE, UP, first_numbers
from shardcompute.finetune.adapters.taught_linear import (
    BottleneckChange,
    DoraChange,
    InputSpan,
    LowRankChange,
    OutputChange,
    TaughtLinear,
    dense_bias,
    dense_weight,
)
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.losses.functions import (
    preference_loss,
    sequence_log_probs,
    teacher_loss,
    token_loss,
)
from shardcompute.finetune.modules import AdaptedMap, choose_modules
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.tensor_ranks import LearningRank
from shardcompute.finetune.training_ops import TrainingOps
from shardcompute.models.decoder import Decoder, LayerWeights, TensorSource
from shardcompute.models.layout import Layout
from shardcompute.models.rank_tensors import RankTensors
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.models.tensor_share import cut_of
from shardcompute.weights.loader import placed_rows

_FIRST, _SECOND = "first moment of ", "second moment of "
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
    reference: torch.Tensor | None
    """Of preferences, at the last stage: how likely the frozen model finds each sequence."""


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
        rank: LearningRank | None = None,
    ) -> None:
        """`modules`: those of the stage that are adapted, where `layout` does not tell what PEFT calls them. A `rank`
        cuts its share from `source`; all ranks of all copies are members of `copies` then."""
        options = options or StageOptions()
        self.stage, self.plan, self._options, self._layout = stage, plan, options, layout
        self._device = torch.device(options.device)
        self._ops = TrainingOps(plan.longest, self._device, options.dtype)
        self._rank = rank
        self._cuts = {} if rank is None else rank.cuts()
        if rank is not None:
            source = RankTensors(source, spec, rank.split, rank.group.rank)
        self._decoder = Decoder(spec, stage, source, rank=rank)
        if modules is None:
            modules = choose_modules(spec, layout, plan.lora, is_gguf=options.is_gguf, stage=stage)
        self.modules = tuple(modules)
        self._learned = FlatVector(self.modules, plan.lora, self._device)
        self._learned.values.copy_(self._learned.join(self._first_state()))
        sizes = self._learned.layer_sizes(range(stage.start, stage.stop))
        self._optimizer = SplitAdamW(self._learned.values, sizes, plan, copies)
        self._load(spec)
        self._kept: dict[int, _KeptBatch] = {}

    # What comes and goes

    def forward(self, batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """A micro-batch one stage on: hidden rows, or at the last stage its part of the step's loss. The first stage
        begins with token ids, others with rows of the stage before. Where preferences are learned, a row is that of
        the model that learns and that of the frozen one, side by side."""
        x, frozen = self._enter(batch, hidden)
        number = batch.key[1]
        reference = self._refer(frozen, batch)
        with self._rows_of(batch, learns=True):
            if self._options.recomputes:
                inputs = [x]
                with torch.no_grad():
                    for layer in range(self.stage.count):
                        inputs.append(self._layer(layer, inputs[-1]))
                    output = self._loss(inputs[-1], batch, reference) if self.stage.is_last else inputs[-1]
            else:
                inputs = [x.requires_grad_(not self.stage.is_first)]
                output = self._whole(x, batch, reference)
        self._kept[number] = _KeptBatch(batch, inputs, output, reference)
        return self._beside(output.detach(), reference)

    def backward(self, number: int, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """What its output changes by, back through the layers: adds to this stage's gradients and returns that of its
        input, None at the first stage. The last stage begins with its loss."""
        kept = self._kept.pop(number)
        if gradient is not None:
            gradient = gradient.to(self._device, self._options.dtype)
        if self._options.recomputes:
            with self._rows_of(kept.batch, learns=True):
                return self._backward_by_layer(kept, gradient)
        return self._backward_through(kept.output, kept.inputs[0], gradient, self._learned.of_all())

    def evaluate(self, batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """`forward` of which nothing is kept, without dropout."""
        x, frozen = self._enter(batch, hidden)
        reference = self._refer(frozen, batch)
        with torch.no_grad(), self._rows_of(batch, learns=False):
            return self._beside(self._whole(x, batch, reference), reference)

    def predict(self, batch: MicroBatch, *, is_taught: bool = True) -> torch.Tensor:
        """Logits of a batch's rows, of a stage that is the whole model: with what is learned, or of the frozen one."""
        with torch.no_grad(), self._rows_of(batch, learns=False), ExitStack() as stack:
            if not is_taught:
                stack.enter_context(self._ops.untaught())
            x, _ = self._enter(batch, None)
            for layer in range(self.stage.count):
                x = self._layer(layer, x)
            return self._logits(x)

    def embed(self, ids: NDArray[np.int32]) -> Float32:
        """Embeddings of tokens, at the first stage."""
        with torch.no_grad():
            places = torch.from_numpy(ids).to(self._device, torch.int64)
            found: torch.Tensor = self._decoder.embed(self._ops, self._embedding, places)
            return np.array(found.float().cpu().numpy())

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def forget(self) -> None:
        """Drop what is kept of micro-batches and gathered of gradients: the step begins anew."""
        self._kept.clear()
        self._learned.gradients.zero_()

    # The optimiser

    def gather_gradients(self) -> NDArray[np.float64]:
        """All micro-batches of a step are back: the squared sums of gradients, by layer."""
        squares = self._optimizer.gather(self._learned.gradients)
        self._learned.gradients.zero_()
        return squares

    def apply_gradients(self, step: int, scale: float) -> None:
        """Learn from them, each times `scale`."""
        self._optimizer.step(step, self.plan.rate_at(step), scale)
        self._forget_lengths()

    @property
    def learned_numbers(self) -> int:
        """How many these layers learn."""
        return len(self._learned.values)

    @property
    def optimizer_bytes(self) -> int:
        return self._optimizer.state_bytes

    # State

    def state(self) -> dict[str, Float32]:
        """What is learned, by PEFT's names, and the optimiser's moments."""
        found = self.learned()
        for prefix, moment in zip((_FIRST, _SECOND), self._optimizer.moments(), strict=True):
            found |= {prefix + name: part for name, part in self._learned.cut(moment)}
        return found

    def learned(self) -> dict[str, Float32]:
        return dict(self._learned.cut(self._learned.values))

    def load_state(self, state: Mapping[str, Float32]) -> None:
        """Go on from what `state` has given, of these layers at least. CorruptModelError where something is missing."""
        self._learned.values.copy_(self._learned.join(state))
        self._forget_lengths()
        if any(name.startswith(_FIRST) for name in state):
            first, second = (self._learned.join(state, prefix) for prefix in (_FIRST, _SECOND))
            self._optimizer.load_moments(first, second)

    def gradients(self) -> dict[str, Float32]:
        """What the micro-batches since the last step have added up to, by PEFT's names."""
        return dict(self._learned.cut(self._learned.gradients))

    # Inside

    def _load(self, spec: ModelSpec) -> None:
        decoder, ops = self._decoder, self._ops
        self._taught_maps: list[TaughtLinear] = []
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
            stretches = None if base is None else self._stretches(base, layer, names)
            if stretches is not None:
                changed[field] = TaughtLinear(base, stretches)
                self._taught_maps.append(changed[field])
        return replace(weights, **changed)

    def _stretches(
        self, base: DeviceLinear, layer: int, names: Sequence[str]
    ) -> tuple[tuple[int, OutputChange | None], ...] | None:
        """What is changed in the outputs of a map that is made of these, in order."""
        found: list[tuple[int, OutputChange | None]] = []
        here = {name: self._rows_here(layer, name) for name in names}
        done: set[str] = set()
        start = 0
        for name in names:
            if name in done:
                continue
            owner = self._owner(layer, name)
            parts = [name] if owner is None else [each for each in names if each in dict(owner.module.places)]
            done.update(parts)
            width = sum(len(here[each]) for each in parts)
            rows = None if owner is None else self._stored_rows(owner, parts, here)
            change = None if owner is None else self._change(owner, rows, base, slice(start, start + width))
            found.append((width, change))
            start += width
        return tuple(found) if any(change is not None for _, change in found) else None

    def _rows_here(self, layer: int, name: str) -> range:
        """Which outputs of a map are computed here."""
        rows = cut_of(self._cuts, name).rows
        return range(self._layout.layers[layer][name].shape[0]) if rows is None else range(*rows)

    def _owner(self, layer: int, name: str) -> AdaptedMap | None:
        here = (module for module in self.modules if module.layer == layer)
        return next((module for module in here if name in dict(module.module.places)), None)

    def _stored_rows(
        self, owner: AdaptedMap, parts: Sequence[str], here: Mapping[str, range]
    ) -> torch.Tensor | None:
        """Which stored row each of our outputs is; None where they are the same."""
        places, rows = dict(owner.module.places), []
        stored = np.arange(owner.module.width_out, dtype=np.float32)[:, None]
        for name in parts:
            place = places[name]
            own = here[name]
            rows.append(np.array(own) if place is None else placed_rows(place, stored)[own, 0])
        order = np.concatenate(rows).astype(np.int64)
        if np.array_equal(order, np.arange(owner.module.width_out)):
            return None
        return torch.from_numpy(order).to(self._device)

    def _change(
        self, owner: AdaptedMap, rows: torch.Tensor | None, base: DeviceLinear, outputs: slice
    ) -> OutputChange:
        lora, leaves = self.plan.lora, self._learned.leaves[owner.name]
        if lora.kind == "bottleneck":
            down, down_bias, up, up_bias = leaves.values()
            return BottleneckChange(owner.name, down, down_bias, up, up_bias)
        low_rank = LowRankChange(owner.name, leaves[DOWN], leaves[UP], lora.scale, rows, self._inputs(owner))
        if lora.kind == "lora":
            return low_rank
        weight, bias = dense_weight(base, self._options.dtype)[outputs], dense_bias(base)
        change = DoraChange(low_rank, leaves[MAGNITUDE], weight, None if bias is None else bias[outputs])
        change.begin()
        return change

    def _inputs(self, owner: AdaptedMap) -> InputSpan | None:
        """Of its inputs those that are here."""
        columns = cut_of(self._cuts, owner.module.places[0][0]).columns
        return None if columns is None else InputSpan(*columns, owner.module.width_in)

    def _forget_lengths(self) -> None:
        for each in self._taught_maps:
            each.forget()

    def _first_state(self) -> dict[str, Float32]:
        return {
            f"{module.name}.{part}": values
            for module in self.modules
            for part, values in first_numbers(module, self.plan.lora, self.plan.seed).items()
        }

    @contextmanager
    def _rows_of(self, batch: MicroBatch, *, learns: bool) -> Iterator[None]:
        key = (self.plan.seed, *batch.key)
        dropout = self.plan.lora.dropout if learns else 0.0
        self._ops.begin_rows(
            batch.lengths, torch.from_numpy(batch.rows).to(torch.int64), dropout=dropout, key=key
        )
        yield

    def _enter(
        self, batch: MicroBatch, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the model that learns, and of the frozen one where it is referred to."""
        is_paired = self.plan.loss.kind == "dpo"
        if hidden is not None:
            rows = hidden.detach().to(self._device, self._options.dtype)
            if not is_paired:
                return rows, None
            learning, frozen = rows.chunk(2, dim=-1)
            return learning.contiguous(), frozen.contiguous()
        ids = torch.from_numpy(batch.ids).to(self._device, torch.int64)
        with torch.no_grad():
            embedded: torch.Tensor = self._decoder.embed(self._ops, self._embedding, ids)
        return embedded, embedded if is_paired else None

    def _refer(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor | None:
        """Rows of the frozen model one stage on; at the last stage how likely it finds each sequence."""
        if x is None:
            return None
        with torch.no_grad(), self._ops.untaught(), self._rows_of(batch, learns=False):
            for layer in range(self.stage.count):
                x = self._layer(layer, x)
            return sequence_log_probs(self._logits(x), batch, self._rank) if self.stage.is_last else x

    def _beside(self, output: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
        """What goes on to the next stage."""
        if reference is None or self.stage.is_last:
            return output
        return torch.cat([output, reference], dim=-1)

    def _whole(self, x: torch.Tensor, batch: MicroBatch, reference: torch.Tensor | None) -> torch.Tensor:
        for layer in range(self.stage.count):
            x = self._layer(layer, x)
        return self._loss(x, batch, reference) if self.stage.is_last else x

    def _layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._decoder.layer(self._ops, self._shared, self._layers[layer], layer, x)
        return out

    def _loss(self, x: torch.Tensor, batch: MicroBatch, reference: torch.Tensor | None) -> torch.Tensor:
        logits, loss = self._logits(x), self.plan.loss
        if loss.kind == "dpo" and reference is not None:
            found = preference_loss(sequence_log_probs(logits, batch, self._rank), reference, loss.beta)
        elif loss.kind == "kl":
            if batch.teacher is None:
                raise UsageError(
                    "a batch came without its teacher's words",
                    hint="keep the last layers here: --keep-local 1",
                )
            teacher = torch.from_numpy(batch.teacher).to(self._device)
            found = teacher_loss(logits, teacher, loss.temperature)
        else:
            found = token_loss(logits, batch, self._rank)
        return found / batch.total

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        assert self._head is not None
        rows = self._decoder.normed(self._ops, self._head, x)
        if self._rank is not None:
            rows = self._rank.enter_head(rows)
        logits: torch.Tensor = self._decoder.head(self._ops, self._head, rows)
        return logits.float()

    def _backward_by_layer(self, kept: _KeptBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if self.stage.is_last:
            x = kept.inputs[-1].requires_grad_()
            gradient = self._backward_through(self._loss(x, kept.batch, kept.reference), x, gradient, {})
        for layer in reversed(range(self.stage.count)):
            is_first = self.stage.is_first and layer == 0
            x = kept.inputs[layer].requires_grad_(not is_first)
            parameters = self._learned.of_layer(self.stage.start + layer)
            gradient = self._backward_through(self._layer(layer, x), x, gradient, parameters)
        return gradient

    def _backward_through(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        gradient: torch.Tensor | None,
        parameters: Mapping[Place, torch.Tensor],
    ) -> torch.Tensor | None:
        inputs = [*([x] if x.requires_grad else []), *parameters.values()]
        if not output.requires_grad or not inputs:
            return None
        found = list(torch.autograd.grad(output, inputs, gradient, allow_unused=True))
        passed = found.pop(0) if x.requires_grad else None
        for place, part in zip(parameters, found, strict=True):
            if part is not None:
                self._learned.add_gradient(place, part)
        return passed
