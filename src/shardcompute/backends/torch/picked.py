"""Tokens that were picked on the device: on their way to the host, and kept for the steps that go on from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardcompute.backends.executor import PickRule
from shardcompute.backends.matrix import Array
from shardcompute.backends.torch.picking import draw_rows
from shardcompute.backends.torch.steps import Computed
from shardcompute.backends.torch.transfers import Download, upload
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UsageError
from shardcompute.core.steps import PICKED

if TYPE_CHECKING:
    from shardcompute.backends.torch.kernels.tokens import TokenKernels


class LastPicks:
    """For each session the token that was picked last, in its slot on the device. One slot more is for all others.

    With `kernels`, they fill picked tokens in where rows are embedded, and pick.
    """

    def __init__(self, sessions: int, device: torch.device, kernels: TokenKernels | None = None) -> None:
        self._kernels = kernels
        self.tokens = torch.zeros(sessions + 1, dtype=torch.int64, device=device)
        self._free = list(range(sessions - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    @property
    def unused(self) -> int:
        return len(self.tokens) - 1

    def knows(self, session: int, position: int) -> bool:
        """Whether the token that stands, or will stand, at `position` was picked here."""
        return self._positions.get(session) == position

    def place_ids(self, segments: Sequence[Segment], ids: Array) -> Array:
        """The ids of a step with the slots, as negative numbers, of those that were `PICKED`."""
        if not len(ids) or ids.min() >= 0:
            return ids
        placed, row = np.array(ids, dtype=np.int64), 0
        for segment in segments:
            if placed[row] == PICKED:
                if not self.knows(segment.session, segment.start):
                    raise UsageError(f"no token of session {segment.session} was picked on the device")
                placed[row] = PICKED - self._slots[segment.session]
            row += segment.count
        if np.count_nonzero(ids == PICKED) != np.count_nonzero(placed < 0):
            raise UsageError("only the first of a session's ids can be one that was picked")
        return placed

    def take(self, segments: Sequence[Segment], rules: Sequence[PickRule | None]) -> list[int]:
        """Where the token of each logit row is to be kept: that of a session's last one, in its slot."""
        slots, row = [self.unused] * len(rules), 0
        for segment in segments:
            row += segment.logit_rows
            self._positions.pop(segment.session, None)
            if not segment.logit_rows or rules[row - 1] is None:
                continue
            if segment.session not in self._slots and self._free:
                self._slots[segment.session] = self._free.pop()
            if segment.session in self._slots:
                slots[row - 1] = self._slots[segment.session]
                self._positions[segment.session] = segment.stop
        return slots

    def forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self._positions.pop(session, None)
            slot = self._slots.pop(session, None)
            if slot is not None:
                self._free.append(slot)

    def filled(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids with the tokens of the slots that were placed among them."""
        if ids.device.type != "cuda" or self._kernels is not None:
            return ids
        places = (PICKED - ids).clamp(min=0).long()
        return torch.where(ids < 0, self.tokens[places], ids)

    def note(self, computed: Computed, slots: torch.Tensor | Sequence[int]) -> Computed:
        """The best token of every row found, and kept in the slots."""
        if not len(slots):
            return computed
        if self._kernels is not None:
            places = slots if isinstance(slots, torch.Tensor) else self._upload(slots)
            return replace(computed, best=self._kernels.best(computed.result, places, self.tokens))
        best, tokens = computed.result.max(dim=1)
        self.keep(tokens, slots)
        return replace(computed, best=torch.stack([best.double(), tokens.double()], dim=1))

    def keep(self, tokens: torch.Tensor, slots: torch.Tensor | Sequence[int]) -> None:
        places = slots if isinstance(slots, torch.Tensor) else self._upload(slots)
        self.tokens.index_copy_(0, places.long(), tokens)

    def draw(self, logits: torch.Tensor, rules: Sequence[PickRule], slots: Sequence[int]) -> torch.Tensor:
        """What is drawn from rows, `[rows, 2]`: the token, kept in its slot, and whether it is unsure."""
        if self._kernels is not None:
            return self._kernels.draw(logits, rules, slots, self.tokens)
        tokens, unsure = draw_rows(logits, rules)
        self.keep(tokens, slots)
        return torch.stack([tokens, unsure.long()], dim=1)

    def _upload(self, slots: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(slots, dtype=torch.int32), self.tokens.device)


class DevicePicks:
    """`PendingPicks` of a CUDA device: what comes to the host are tokens, and the logits of rows without a rule."""

    def __init__(
        self, computed: Computed, rules: Sequence[PickRule | None], slots: Sequence[int], last: LastPicks
    ) -> None:
        logits = computed.result
        drawn = [row for row, rule in enumerate(rules) if rule is not None and rule.temperature > 0.0]
        self._drawn = {row: at for at, row in enumerate(drawn)}
        kept = [row for row, rule in enumerate(rules) if rule is None]
        self._kept = {row: at for at, row in enumerate(kept)}
        self._best = Download(computed.best) if rules and computed.best is not None else None
        self._rows = Download(_select(logits, kept)) if kept else None
        self._draws: Download | None = None
        if drawn:
            # Kept until they are picked: a row may turn out to be unsure.
            self._logits = _select(logits, drawn)
            chosen = [rule for rule in rules if rule is not None and rule.temperature > 0.0]
            self._draws = Download(last.draw(self._logits, chosen, [slots[row] for row in drawn]))
        self._values: tuple[Array, Array] | None = None

    def is_ready(self) -> bool:
        pending = self._draws or self._rows or self._best
        return pending is None or pending.is_ready()

    def wait(self) -> DevicePicks:
        empty = np.empty((0, 2))
        best = empty if self._best is None else self._best.wait()
        self._values = best, empty if self._draws is None else self._draws.wait()
        return self

    def guess(self, row: int) -> int:
        assert self._values is not None
        best, draws = self._values
        return int(draws[self._drawn[row], 0] if row in self._drawn else best[row, 1])

    def token(self, row: int) -> int | None:
        assert self._values is not None
        best, draws = self._values
        if row in self._drawn:
            token, unsure = draws[self._drawn[row]]
            return None if unsure else int(token)
        if row in self._kept or not best[row, 0] > -np.inf:
            return None
        return int(best[row, 1])

    def logits(self, row: int) -> Array:
        if row in self._kept and self._rows is not None:
            kept: Array = self._rows.wait()[self._kept[row]]
            return kept
        if row in self._drawn:
            drawn: Array = self._logits[self._drawn[row]].cpu().numpy()
            return drawn
        assert self._values is not None
        # Its best logit alone says what is wrong with it.
        return self._values[0][row, :1].astype(np.float32)


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == len(logits):
        return logits.clone()
    return logits.index_select(0, upload(torch.tensor(rows), logits.device))
