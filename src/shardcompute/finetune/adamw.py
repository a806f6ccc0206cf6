"""AdamW over one flat vector of parameters, whose state is split among the copies of a stage (ZeRO-1).

Each copy has the gradients of its own micro-batches. They are summed and scattered, so that a copy gets the sum of its
own stretch of the vector; it keeps moments of that stretch alone, changes it, and all gather the stretches again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.collectives import Array, even_counts
from shardcompute.finetune.plan import FinetunePlan


class CopyGroup(Protocol):
    """What of a `collectives.Group` the copies of a stage need."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def reduce_scatter(self, array: Array, counts: Sequence[int] | None = None) -> Array: ...

    def all_reduce(self, array: Array) -> Array: ...

    def all_gather(self, array: Array) -> list[Array]: ...


class SplitAdamW:
    """Changes `values` in place. `layers` are the stretches of it that belong to one layer each, in order."""

    def __init__(
        self, values: torch.Tensor, layers: Sequence[int], plan: FinetunePlan, copies: CopyGroup | None = None
    ) -> None:
        self._values = values
        self._plan = plan
        self._copies = copies
        self._counts = even_counts(len(values), 1 if copies is None else copies.size)
        rank = 0 if copies is None else copies.rank
        stop = sum(self._counts[: rank + 1])
        self._own = slice(stop - self._counts[rank], stop)
        self._edges = (0, *accumulate(layers))
        self._first = torch.zeros(self._counts[rank], device=values.device)
        self._second = torch.zeros(self._counts[rank], device=values.device)
        self._gradient = torch.empty(0)

    @property
    def state_bytes(self) -> int:
        """What the moments take here."""
        return int(self._first.nbytes + self._second.nbytes)

    def gather(self, gradients: torch.Tensor) -> NDArray[np.float64]:
        """Take the gradients of a step. Returns their squared sums layer by layer, over all copies."""
        if self._copies is None:
            self._gradient = gradients.clone()
        else:
            summed = self._copies.reduce_scatter(gradients.cpu().numpy(), self._counts)
            self._gradient = torch.from_numpy(summed).to(gradients.device)
        squares = np.zeros(len(self._edges) - 1)
        for layer, (start, stop) in enumerate(zip(self._edges, self._edges[1:], strict=False)):
            first, last = max(start, self._own.start), min(stop, self._own.stop)
            if first < last:
                part = self._gradient[first - self._own.start : last - self._own.start]
                squares[layer] = float(part.double().square().sum())
        return squares if self._copies is None else self._copies.all_reduce(squares)

    def step(self, number: int, rate: float, scale: float) -> None:
        """Step `number`, counted from 0, with the gathered gradients times `scale`."""
        plan, gradient = self._plan, self._gradient * scale
        (fast, slow), own = plan.betas, self._values[self._own]
        self._first.lerp_(gradient, 1 - fast)
        self._second.mul_(slow).addcmul_(gradient, gradient, value=1 - slow)
        own.mul_(1 - rate * plan.weight_decay)
        spread = self._second.sqrt().div_(math.sqrt(1 - slow ** (number + 1))).add_(plan.epsilon)
        own.addcdiv_(self._first, spread, value=-rate / (1 - fast ** (number + 1)))
        if self._copies is not None:
            self._values.copy_(self._joined(own))

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, of the whole vector."""
        if self._copies is None:
            return self._first.clone(), self._second.clone()
        return self._joined(self._first), self._joined(self._second)

    def load_moments(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """This copy's stretch of what `moments` has given."""
        self._first.copy_(first[self._own])
        self._second.copy_(second[self._own])

    def _joined(self, own: torch.Tensor) -> torch.Tensor:
        assert self._copies is not None
        parts = self._copies.all_gather(own.cpu().numpy())
        return torch.from_numpy(np.concatenate(parts)).to(self._values.device)
