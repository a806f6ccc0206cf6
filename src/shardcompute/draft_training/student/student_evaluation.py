"""Evaluation of a student on conversations that it has not learned from: how often it says what its parent did.

Rows and figures are those of a draft head's evaluation (`evaluation`), so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from shardcompute.draft_training.evaluation import DRAFTED, Examination, greedy_rows, sum_up_kinds
from shardcompute.draft_training.student.student_net import StudentNet
from shardcompute.draft_training.training_loop import FrozenWeights
from shardcompute.draft_training.training_rows import SequenceBatch, Span, TrainingRows

_SCORED_ROWS = 1024


def examine_student(
    net: StudentNet, dataset: TrainingRows, spans: Sequence[Span], frozen: FrozenWeights, max_rows: int
) -> Examination:
    """Draft behind every row of these spans where the model goes on greedily for long enough."""
    tables: dict[str, list[NDArray[np.bool_]]] = {}
    for kind in sorted({span.kind for span in spans}):
        of_kind = [span for span in spans if span.kind == kind]
        with torch.no_grad():
            tables[kind] = [_find_right(net, batch, frozen) for batch in dataset.batches(of_kind, max_rows)]
    return sum_up_kinds(tables, {kind: [1.0] for kind in tables})


def _find_right(net: StudentNet, batch: SequenceBatch, frozen: FrozenWeights) -> NDArray[np.bool_]:
    """`[rows that count, DRAFTED]`: whether each drafted token is right. As long as those before it are, a student has
    read the true text, so one reading tells of all."""
    rows = net.normed(net.run(frozen.embed(batch.tokens))).flatten(0, 1)
    best = [functional.linear(part, frozen.head).argmax(-1) for part in rows.split(_SCORED_ROWS)]
    is_right = (torch.cat(best).view(batch.tokens.shape) == batch.following) & batch.is_there
    # Behind row r its successor is picked already: what is drafted first follows that.
    drafted = [functional.pad(is_right[:, step:], (0, step)) for step in range(1, DRAFTED + 1)]
    return np.asarray(torch.stack(drafted, dim=-1)[greedy_rows(batch)].cpu().numpy(), np.bool_)
