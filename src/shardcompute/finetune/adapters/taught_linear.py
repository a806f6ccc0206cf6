"""Linear maps that are being taught: a frozen map, and what an adapter changes in stretches of its outputs.

LoRA adds `scale · up · down · x`. DoRA gives each output's row of weights a length of its own besides: with `g` the
learned length over that of the row with LoRA's addition, `g · (weight + addition) · x`; as in its paper and in PEFT no
gradient goes through the latter length. A bottleneck adds `up · relu(down · y)` to the map's own output `y`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from shardcompute.backends.torch.weights import BlockLinear, DenseLinear, DeviceLinear, StackedLinear
from shardcompute.core.errors import UnsupportedModelError

Drop = Callable[[torch.Tensor, str, "InputSpan | None"], torch.Tensor]
"""Rows of a map of this name, some of their numbers dropped by chance; the very same rows where none are. Where rows
are a span of a map's inputs, what is dropped of them is what would be of the whole."""


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Inputs `[start, stop)` of a map that has `width` of them."""

    start: int
    stop: int
    width: int


class OutputChange(Protocol):
    """What an adapter changes in one stretch of a map's outputs."""

    def change(self, x: torch.Tensor, plain: torch.Tensor, drop: Drop) -> torch.Tensor:
        """To be added to `plain`, what the frozen map makes of `x`."""
        ...

    def forget(self) -> None:
        """What is learned has changed: nothing that was made of it holds any more."""
        ...


@dataclass(frozen=True, slots=True)
class TaughtLinear:
    """A frozen map with changes of stretches of its outputs, in order; None where a stretch has none."""

    base: DeviceLinear
    stretches: tuple[tuple[int, OutputChange | None], ...]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def size_bytes(self) -> int:
        return self.base.size_bytes

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen map alone."""
        return self.base.apply(x)

    def apply_taught(self, x: torch.Tensor, drop: Drop) -> torch.Tensor:
        plain = self.base.apply(x)
        changes, start = [], 0
        for width, change in self.stretches:
            own = plain[:, start : start + width]
            changes.append(torch.zeros_like(own) if change is None else change.change(x, own, drop))
            start += width
        return plain + (changes[0] if len(changes) == 1 else torch.cat(changes, dim=-1))

    def forget(self) -> None:
        for _, change in self.stretches:
            if change is not None:
                change.forget()


@dataclass(frozen=True, slots=True)
class LowRankChange:
    """`down [rank, in]`, `up [stored rows, rank]`; `rows` says which stored row each of our outputs is, None where they
    are the same, `inputs` which of the map's inputs are here, None: all."""

    name: str
    down: torch.Tensor
    up: torch.Tensor
    scale: float
    rows: torch.Tensor | None
    inputs: InputSpan | None = None

    def change(self, x: torch.Tensor, plain: torch.Tensor, drop: Drop) -> torch.Tensor:
        return self.added(drop(x, self.name, self.inputs))

    def added(self, x: torch.Tensor) -> torch.Tensor:
        down = self.down if self.inputs is None else self.down[:, self.inputs.start : self.inputs.stop]
        up = self.up if self.rows is None else self.up.index_select(0, self.rows)
        inner = functional.linear(x, down.to(x.dtype))
        return functional.linear(inner, up.to(x.dtype)) * self.scale

    def weight(self) -> torch.Tensor:
        """What it adds to the weight, in our order of rows."""
        up = self.up if self.rows is None else self.up.index_select(0, self.rows)
        return self.scale * (up @ self.down)

    def forget(self) -> None:
        """Nothing is made of it beforehand."""


class DoraChange:
    """A low-rank change of weights `base [outputs, in]` whose rows have learned lengths `magnitude [stored rows]`."""

    def __init__(
        self,
        low_rank: LowRankChange,
        magnitude: torch.Tensor,
        base: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        self._low_rank, self._magnitude = low_rank, magnitude
        self._base, self._bias = base, bias
        self._lengths: torch.Tensor | None = None

    def begin(self) -> None:
        """Have learned lengths be those of the frozen rows."""
        lengths, rows = self._rows_of(self._base.float()), self._low_rank.rows
        with torch.no_grad():
            if rows is None:
                self._magnitude.copy_(lengths)
            else:
                self._magnitude.index_copy_(0, rows, lengths)

    def change(self, x: torch.Tensor, plain: torch.Tensor, drop: Drop) -> torch.Tensor:
        low_rank, dropped = self._low_rank, drop(x, self._low_rank.name, None)
        if dropped is x:
            frozen = plain if self._bias is None else plain - self._bias
        else:
            frozen = functional.linear(dropped, self._base)
        magnitude = (
            self._magnitude if low_rank.rows is None else self._magnitude.index_select(0, low_rank.rows)
        )
        factor = (magnitude / self._current_lengths()).to(x.dtype)
        return (factor - 1) * frozen + factor * low_rank.added(dropped)

    def forget(self) -> None:
        self._lengths = None

    def _current_lengths(self) -> torch.Tensor:
        # Once for all micro-batches of a step: it costs as much as a pass of some rows through the map.
        if self._lengths is None:
            with torch.no_grad():
                self._lengths = self._rows_of(self._base.float() + self._low_rank.weight())
        return self._lengths

    def _rows_of(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.linalg.norm(weight, dim=1)


@dataclass(frozen=True, slots=True)
class BottleneckChange:
    """`down [rank, out]`, `up [out, rank]` with biases, on a map's own output."""

    name: str
    down: torch.Tensor
    down_bias: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor

    def change(self, x: torch.Tensor, plain: torch.Tensor, drop: Drop) -> torch.Tensor:
        kind = plain.dtype
        inner = functional.linear(drop(plain, self.name, None), self.down.to(kind), self.down_bias.to(kind))
        return functional.linear(functional.relu(inner), self.up.to(kind), self.up_bias.to(kind))

    def forget(self) -> None:
        """Nothing is made of it beforehand."""


def dense_bias(base: DeviceLinear) -> torch.Tensor | None:
    """What a frozen map adds to all rows."""
    if isinstance(base, StackedLinear) and any(part.bias is not None for part in base.parts):
        parts = [(part.bias, dense_weight(part, torch.float32)) for part in base.parts]
        return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in parts])
    return base.bias


def dense_weight(base: DeviceLinear, dtype: torch.dtype) -> torch.Tensor:
    """The weight `[out, in]` of a frozen map in whatever form it is held."""
    if isinstance(base, DenseLinear):
        return base.weight
    if isinstance(base, BlockLinear):
        return base.widen(dtype)
    if isinstance(base, StackedLinear):
        return torch.cat([dense_weight(part, dtype) for part in base.parts])
    raise UnsupportedModelError(
        f"DoRA needs a map's weights, and a {type(base).__name__} does not give them", hint="leave out --dora"
    )
