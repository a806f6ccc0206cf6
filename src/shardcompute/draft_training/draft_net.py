"""Draft net: a draft head (`models.draft_head` says what it computes) in torch, over whole conversations at once.

It is unrolled as it will draft: in step 0 every row sees true states; in step k a row has been drafted k rows behind a
true one, so its own last state takes the place of the true one, and it attends to true rows up to there and to what
steps 1 to k made of the rows since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from shardcompute.backends.matrix import DenseMatrix, Float32, Matrix
from shardcompute.models.draft_head import DraftHeadLayer, DraftHeadWeights
from shardcompute.weights.formats.quantise import convert

_MOST_STEPS = 8
_HIDDEN_SCORE = -30_000.0


@dataclass(frozen=True, slots=True)
class NetShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    theta: float
    eps: float


@dataclass(frozen=True, slots=True)
class DraftNetLayer:
    norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class DraftNet:
    """The weights, as float32 on the device, by name."""

    def __init__(self, shape: NetShape, weights: dict[str, torch.Tensor]) -> None:
        self.shape = shape
        self.weights = weights
        self.layers = tuple(
            DraftNetLayer(*(weights[f"{layer}.{name}"] for name in DraftNetLayer.__slots__))
            for layer in range(shape.layers)
        )

    def matrices(self) -> list[torch.Tensor]:
        return [each for each in self.weights.values() if each.ndim == 2]

    def vectors(self) -> list[torch.Tensor]:
        return [each for each in self.weights.values() if each.ndim == 1]

    def unroll(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Per step what comes out behind every row, `[conversations, rows, hidden]`: the state of the next row as it is
        drafted. In step k the first k rows mean nothing."""
        shape = self.shape
        if steps > _MOST_STEPS:
            raise ValueError(f"at most {_MOST_STEPS} steps can be unrolled")
        turns = _turns(shape, states.shape[1], states.device)
        embedded = rms(embedded, shape.eps) * self.weights["embedding_norm"]
        memory: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in self.layers]
        for _ in range(steps):
            given = rms(states, shape.eps) * self.weights["state_norm"]
            u = functional.linear(torch.cat([embedded, given], dim=-1), self.weights["join"]).float()
            for layer, (keys, values) in zip(self.layers, memory, strict=True):
                u = u + self._attend(u, layer, keys, values, turns)
                inner = functional.linear(rms(u, shape.eps) * layer.mlp_norm, layer.gate_up)
                gate, up = inner.chunk(2, dim=-1)
                u = u + functional.linear(functional.silu(gate) * up, layer.down).float()
            yield u
            states = shift(u, 1)

    def normed(self, drafted: torch.Tensor) -> torch.Tensor:
        """Drafted states as the model's head takes them."""
        return rms(drafted, self.shape.eps) * self.weights["output_norm"]

    def _attend(
        self,
        u: torch.Tensor,
        layer: DraftNetLayer,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Keys and values of the steps so far are kept in the lists."""
        shape = self.shape
        rows = functional.linear(rms(u, shape.eps) * layer.norm, layer.qkv)
        heads = rows.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        keys.append(turned(k, turns))
        values.append(v)
        seen = _mix(turned(q, turns) * shape.head_dim**-0.5, keys, values)
        return functional.linear(seen.transpose(1, 2).flatten(2), layer.out).float()


def _mix(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention `[conversations, heads, rows, head_dim]` of the last step's rows."""
    step, rows = len(keys) - 1, q.shape[2]
    groups = q.shape[1] // keys[0].shape[1]
    if step == 0:
        k, v = (each.repeat_interleave(groups, dim=1) for each in (keys[0], values[0]))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    grouped = q.unflatten(1, (-1, groups))
    scores = (grouped.flatten(2, 3) @ keys[0].transpose(-1, -2)).unflatten(2, (groups, rows))
    hidden = torch.ones((rows, rows), dtype=torch.bool, device=q.device).triu(1 - step)
    scores = scores.masked_fill(hidden, _HIDDEN_SCORE)
    # The rows drafted since: of step j the one that is step - j rows before.
    own = [shift(key, step - j)[:, :, None] for j, key in enumerate(keys) if j]
    since = [(grouped * key).sum(-1, keepdim=True) for key in own]
    filled = scores.new_full((*scores.shape[:-1], _MOST_STEPS - step), _HIDDEN_SCORE)
    weights = torch.cat([scores, *since, filled], dim=-1)
    weights = torch.softmax(weights, dim=-1, dtype=weights.dtype)
    mixed = (weights[..., :rows].flatten(2, 3) @ values[0]).unflatten(2, (groups, rows))
    for j in range(1, step + 1):
        mixed = mixed + weights[..., rows + j - 1, None] * shift(values[j], step - j)[:, :, None]
    return mixed.flatten(1, 2)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def shift(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Every row in the place of the one that is `count` behind it; zeros come first."""
    return rows if count == 0 else functional.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :]


def _turns(shape: NetShape, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(rows, device=device, dtype=torch.float32)[:, None] * shape.theta**-exponents
    return angles.cos(), angles.sin()


def turned(heads: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotated by position: `turns` are the cosines and sines of every row."""
    cosines, sines = turns
    left, right = heads.float().chunk(2, dim=-1)
    rows = torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)
    return rows.to(heads.dtype)


def new_net(shape: NetShape, norm: torch.Tensor, random: torch.Generator) -> DraftNet:
    """Random, but at first every row drafts about the sum of its token and its state. `norm` is the model's last."""
    hidden, device = shape.hidden, norm.device

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn((rows, columns), generator=random, device=device) * gain * columns**-0.5

    ones = torch.ones(hidden, device=device)
    same = torch.eye(hidden, device=device).repeat(1, 2) * 0.5
    weights = {
        "embedding_norm": ones.clone(),
        "state_norm": norm / norm.square().mean().sqrt(),
        "output_norm": norm.clone(),
        "join": same + draw(hidden, 2 * hidden, 0.5),
    }
    attended, kept = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        made = (
            ones.clone(),
            draw(attended + 2 * kept, hidden),
            draw(hidden, attended, 0.2),
            ones.clone(),
            draw(2 * shape.width, hidden),
            draw(hidden, shape.width, 0.2),
        )
        weights |= {f"{layer}.{name}": each for name, each in zip(DraftNetLayer.__slots__, made, strict=True)}
    return DraftNet(shape, {name: each.requires_grad_() for name, each in weights.items()})


def pack(net: DraftNet, weights: dict[str, torch.Tensor], ids: NDArray[np.int32]) -> DraftHeadWeights:
    """What is kept of a net with these weights."""

    def vector(name: str) -> Float32:
        return np.ascontiguousarray(weights[name].detach().cpu().numpy(), dtype=np.float32)

    def matrix(name: str) -> Matrix:
        return convert(DenseMatrix(vector(name)), "int8")

    def layer(number: int) -> DraftHeadLayer:
        parts: dict[str, Any] = {
            name: vector(f"{number}.{name}") if name.endswith("norm") else matrix(f"{number}.{name}")
            for name in DraftNetLayer.__slots__
        }
        return DraftHeadLayer(**parts)

    shape = net.shape
    return DraftHeadWeights(
        ids=ids,
        embedding_norm=vector("embedding_norm"),
        state_norm=vector("state_norm"),
        output_norm=vector("output_norm"),
        join=matrix("join"),
        layers=tuple(layer(number) for number in range(shape.layers)),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        theta=shape.theta,
    )


def load_net(kept: DraftHeadWeights, eps: float, device: torch.device) -> DraftNet:
    """A net of what was kept, with all its rounding."""

    def load(values: Float32 | Matrix) -> torch.Tensor:
        dense = values if isinstance(values, np.ndarray) else values.to_dense()
        return torch.from_numpy(np.ascontiguousarray(dense)).to(device)

    shape = NetShape(
        hidden=len(kept.output_norm),
        layers=len(kept.layers),
        heads=kept.heads,
        kv_heads=kept.kv_heads,
        head_dim=kept.head_dim,
        width=kept.layers[0].down.shape[1],
        theta=kept.theta,
        eps=eps,
    )
    names = ("embedding_norm", "state_norm", "output_norm", "join")
    weights = {name: load(getattr(kept, name)) for name in names}
    for number, layer in enumerate(kept.layers):
        weights |= {f"{number}.{name}": load(getattr(layer, name)) for name in DraftNetLayer.__slots__}
    return DraftNet(shape, weights)
