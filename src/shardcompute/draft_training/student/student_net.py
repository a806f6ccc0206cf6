"""Student net: a student (`shape`) in torch, over whole conversations at once. Its layers and its last norm learn; the
embedding and the head are the parent's and stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from shardcompute.backends.matrix import Float32
from shardcompute.draft_training.draft_net import rms, turned
from shardcompute.draft_training.student.shape import StudentShape
from shardcompute.models.families.places import Slot, layer_slots
from shardcompute.models.spec import ModelSpec, whole
from shardcompute.weights.checkpoint import Checkpoint

NORM = "norm"


@dataclass(frozen=True, slots=True)
class StudentNet:
    """The weights that learn, as float32 on the device: `norm`, and `{layer}.{our name}` of each layer."""

    shape: StudentShape
    weights: dict[str, torch.Tensor]

    def matrices(self) -> list[torch.Tensor]:
        return [each for each in self.weights.values() if each.ndim == 2]

    def vectors(self) -> list[torch.Tensor]:
        return [each for each in self.weights.values() if each.ndim == 1]

    def run(self, embedded: torch.Tensor) -> torch.Tensor:
        """The state `[conversations, rows, hidden]` of every row, from its token's embedding and the rows before it."""
        spec, u = self.shape.spec, embedded
        turns = _turns(spec, u.shape[1], u.device)
        for layer in range(spec.layer_count):
            normed = rms(u, spec.norm_eps) * self.weights[f"{layer}.attention.norm"]
            u = u + self._linear(layer, "attention.out", self._attend(layer, normed, turns)).float()
            normed = rms(u, spec.norm_eps) * self.weights[f"{layer}.mlp.norm"]
            gate, up = self._linear(layer, "mlp.gate", normed), self._linear(layer, "mlp.up", normed)
            u = u + self._linear(layer, "mlp.down", functional.silu(gate) * up).float()
        return u

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """States as the head takes them."""
        return rms(states, self.shape.spec.norm_eps) * self.weights[NORM]

    def _attend(
        self, layer: int, rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        spec = self.shape.spec
        q, k, v = (
            self._linear(layer, f"attention.{name}", rows).unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        if spec.qk_norm == "head":
            q = rms(q, spec.norm_eps) * self.weights[f"{layer}.attention.q_norm"]
            k = rms(k, spec.norm_eps) * self.weights[f"{layer}.attention.k_norm"]
        q, k = turned(q, turns), turned(k, turns)
        k, v = (each.to(q.dtype).repeat_interleave(spec.group, dim=1) for each in (k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.attention_scale)
        return seen.transpose(1, 2).flatten(2)

    def _linear(self, layer: int, name: str, rows: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{layer}.{name}.bias")
        return functional.linear(rows, self.weights[f"{layer}.{name}"], bias)


def new_student(shape: StudentShape, parent: Checkpoint, device: torch.device) -> StudentNet:
    """With the parent's weights of the layers that are kept."""
    source = parent.source(whole(parent.spec), form="float32")
    gains = _folded_gains(parent.spec)

    def load(values: Float32, name: str) -> torch.Tensor:
        scaled = np.ascontiguousarray(values, dtype=np.float32) * np.float32(gains.get(name, 1.0))
        return torch.from_numpy(scaled).to(device).requires_grad_()

    weights = {NORM: load(source.vector(NORM), NORM)}
    for layer, kept in enumerate(shape.kept):
        for slot in layer_slots(parent.spec, kept):
            if len(slot.shape) == 2:
                values = source.matrix(slot.name, kept).to_dense()
            else:
                values = source.vector(slot.name, kept)
            weights[f"{layer}.{slot.name}"] = load(values, slot.matrix)
    return StudentNet(shape, weights)


def student_slots(shape: StudentShape) -> Iterator[tuple[str, Slot]]:
    """The weights of all layers, by name."""
    for layer in range(shape.spec.layer_count):
        for slot in layer_slots(shape.spec, layer):
            yield f"{layer}.{slot.name}", slot


def _folded_gains(parent: ModelSpec) -> dict[str, float]:
    """By which factor each of these is multiplied, where the student does without one that the parent has."""
    queries = "attention.q_norm" if parent.qk_norm == "head" else "attention.q"
    return {
        queries: parent.attention_scale * parent.head_dim**0.5,
        "attention.out": parent.residual_scale,
        "mlp.down": parent.residual_scale,
        NORM: parent.logit_scale,
    }


def _turns(spec: ModelSpec, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rope = spec.ropes[0]
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(rows, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
