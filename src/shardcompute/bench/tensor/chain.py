"""A pipeline to compare tensor ranks with: stages with a thread each, over the same lines, one stream.

Hidden states go from stage to stage and the token that the last one picks comes back to the first, with nothing beside
them. A prompt begins an answer anew; of single rows each is the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcompute.backends.executor import Executor
from shardcompute.backends.matrix import Array
from shardcompute.collectives import FabricGroup
from shardcompute.core.batch import Segment
from shardcompute.runtime.tensor_stage import IDLE_S

_SESSION = 1


def pick_through_chain(
    executor: Executor, group: FabricGroup, segments: Sequence[Segment], ids: Array
) -> int:
    """On the first stage: the best token behind these."""
    group.send(np.ascontiguousarray(executor.step(segments, ids)), 1)
    return int(group.receive(group.size - 1, IDLE_S)[0])


def end_chain(group: FabricGroup) -> None:
    """Tell the stages behind this one that there is nothing more to do."""
    if group.rank < group.size - 1:
        group.send(np.empty((0, 0), np.float32), group.rank + 1)


def follow_chain(executor: Executor, group: FabricGroup) -> None:
    """On every other stage, until the first has nothing more to do."""
    is_last, position = group.rank == group.size - 1, 0
    while (hidden := group.receive(group.rank - 1, IDLE_S)).size:
        if len(hidden) > 1:
            executor.close_session(_SESSION)
            position = 0
        out = executor.step([Segment(_SESSION, position, len(hidden), 1)], hidden)
        position += len(hidden)
        if is_last:
            group.send(out[0].argmax(keepdims=True).astype(np.int64), 0)
        else:
            group.send(np.ascontiguousarray(out), group.rank + 1)
    end_chain(group)
