"""A stage of a run in a swarm at work: orders of a step, with activations and gradients from its neighbours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import LinkError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.stage import FinetuneStage
from shardcompute.finetune.swarm.frames import StepSums, one_forward_one_backward

Made = TypeVar("Made")
FORWARD, BACKWARD = "rows", "gradient"
PATIENCE_S = 300.0
"""So long a stage waits for a neighbour, at most."""
_MOST_WAITING = 4
"""Micro-batches of a kind that have arrived before their time."""


class StageNeighbours(Protocol):
    """The stages before and behind."""

    def send(self, kind: str, call: int, number: int, values: Float32) -> None:
        """At once or soon: `values` are left unchanged until they have gone."""
        ...

    def settle(self) -> int:
        """Wait until everything has gone; how many bytes that were since the last time."""
        ...


class Mailbox:
    """What neighbours have sent and was not taken yet: a few of each kind, further ones wait. Neighbours send in the
    order in which they are taken. Methods may be called from any thread."""

    def __init__(self, patience_s: float = PATIENCE_S, most: int = _MOST_WAITING) -> None:
        self._patience_s = patience_s
        self._most = most
        self._arrived: dict[tuple[str, int, int], Float32] = {}
        self._error: str = ""
        self._changed = threading.Condition()

    def put(self, kind: str, call: int, number: int, values: Float32) -> None:
        """LinkError where nothing is taken any more."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._error or sum(each[0] == kind for each in self._arrived) < self._most,
                self._patience_s,
            )
            if self._error or not has_room:
                raise LinkError(self._error or f"nothing was taken for {self._patience_s:g} s")
            self._arrived[kind, call, number] = values
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Whoever waits need not wait longer."""
        with self._changed:
            self._error = self._error or why
            self._changed.notify_all()

    def take(self, kind: str, call: int, number: int) -> Float32:
        key = (kind, call, number)
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._error, self._patience_s)
            if key in self._arrived:
                self._changed.notify_all()
                return self._arrived.pop(key)
            raise LinkError(
                self._error or f"a neighbour has sent nothing for {self._patience_s:g} s",
                hint="the run goes on from its last checkpoint",
            )


class StageRunner:
    """Carries out orders for one stage, `place` of `stages`, on one thread."""

    def __init__(
        self,
        stage: FinetuneStage,
        place: int,
        stages: int,
        neighbours: StageNeighbours,
        mailbox: Mailbox,
        share: float = 1.0,
        ahead: int = 0,
    ) -> None:
        self.stage = stage
        self._place, self._stages = place, stages
        self._neighbours, self._mailbox = neighbours, mailbox
        self._share = share
        self._ahead = ahead
        self._busy_s = 0.0

    def learn(self, call: int, batches: Sequence[MicroBatch]) -> StepSums:
        """All micro-batches of a step, forward and backward."""
        self._busy_s, loss = 0.0, 0.0
        self.stage.forget()
        for what, place in one_forward_one_backward(self._place, self._stages, len(batches), self._ahead):
            batch = batches[place]
            number = batch.key[1]
            if what == "forward":
                hidden = None if self._place == 0 else self._take(FORWARD, call, batch)
                output = self._timed(partial(self.stage.forward, batch, hidden))
                if self.stage.stage.is_last:
                    loss += float(output)
                else:
                    self._send(FORWARD, call, number, output)
            else:
                is_last = self.stage.stage.is_last
                gradient = None if is_last else self._take(BACKWARD, call, batch)
                passed = self._timed(partial(self.stage.backward, number, gradient))
                if self._place > 0 and passed is not None:
                    self._send(BACKWARD, call, number, passed)
        squares = [float(each) for each in self.stage.gather_gradients()]
        return StepSums(loss, squares, self._busy_s, self._neighbours.settle())

    def evaluate(self, call: int, batches: Sequence[MicroBatch]) -> StepSums:
        """The summed loss of batches, at the last stage."""
        loss = 0.0
        self._busy_s = 0.0
        for batch in batches:
            hidden = None if self._place == 0 else self._take(FORWARD, call, batch)
            output = self._timed(partial(self.stage.evaluate, batch, hidden))
            if self.stage.stage.is_last:
                loss += float(output) * batch.total
            else:
                self._send(FORWARD, call, batch.key[1], output)
        return StepSums(loss, [], self._busy_s, self._neighbours.settle())

    def _take(self, kind: str, call: int, batch: MicroBatch) -> torch.Tensor:
        found = self._mailbox.take(kind, call, batch.key[1])
        if len(found) != len(batch.ids):
            raise LinkError(
                f"{len(found)} rows came of a micro-batch of {len(batch.ids)}",
                hint="run one release on all nodes",
            )
        return torch.from_numpy(found)

    def _send(self, kind: str, call: int, number: int, values: torch.Tensor) -> None:
        plain = values.detach().float().cpu().numpy()
        self._neighbours.send(kind, call, number, plain)

    def _timed(self, work: Callable[[], Made]) -> Made:
        """Compute, and leave the machine to others for the rest of the time that is theirs."""
        started = time.monotonic()
        result = work()
        took_s = time.monotonic() - started
        self._busy_s += took_s
        if self._share < 1:
            time.sleep(took_s * (1 - self._share) / self._share)
        return result
