from __future__ import annotations

import numpy as np

from shardcompute.core.generation import Sampling
from shardcompute.core.steps import Opening, SessionRows
from shardcompute.node.worker.activation_log import ActivationLog, Chunk

WIDTH = 4


def chunk(first: int, count: int, codec: str = "int8") -> Chunk:
    """Rows that say which they are."""
    rows = np.repeat(np.arange(first, first + count, dtype=np.uint8)[:, None], WIDTH + 2, axis=1)
    return Chunk(codec, WIDTH, rows)


def work(session: int, start: int, count: int) -> SessionRows:
    return SessionRows(session, start, tuple(range(start, start + count)))


def told(log: ActivationLog, most_rows: int = 100) -> list[tuple[int, int, str, list[int]]]:
    """What a new stage hears: session, position, codec, and which rows."""
    return [
        (part.session, part.start, piece.codec, piece.rows[:, 0].tolist())
        for part, _, piece in log.replay(most_rows)
    ]


def test_rows_come_back_as_they_were_sent() -> None:
    log = ActivationLog(1 << 20)
    log.append([work(1, 0, 3), work(2, 0, 1)], [], chunk(0, 4))
    log.append([work(2, 1, 1), work(1, 3, 1)], [], chunk(4, 2))
    assert told(log) == [(2, 0, "int8", [3, 4]), (1, 0, "int8", [0, 1, 2, 5])]
    assert told(log, most_rows=3) == [(2, 0, "int8", [3, 4]), (1, 0, "int8", [0, 1, 2]), (1, 3, "int8", [5])]
    assert log.lengths() == {2: 2, 1: 4}


def test_what_nobody_goes_on_with_is_not_told() -> None:
    log = ActivationLog(1 << 20)
    log.append([work(1, 0, 3), work(2, 0, 1)], [], chunk(0, 4))

    def wanted(session: int) -> bool:
        return session == 2

    assert [(part.session, part.start) for part, _, _ in log.replay(100, wanted)] == [(2, 0)]
    assert log.lengths(wanted) == {2: 1}
    assert log.lengths() == {1: 3, 2: 1}, "it is kept all the same"


def test_each_piece_is_in_one_form() -> None:
    log = ActivationLog(1 << 20)
    log.append([work(1, 0, 2)], [], chunk(0, 2, "bf16"))
    log.append([work(1, 2, 1)], [], chunk(2, 1, "exact"))
    log.append([work(1, 3, 2)], [], chunk(3, 2, "exact"))
    expected = [(1, 0, "bf16", [0, 1]), (1, 2, "exact", [2, 3, 4])]
    assert told(log) == expected
    assert told(log) == expected, "and again"
    opening = Opening(1, Sampling(), 2)
    log.append([work(1, 0, 1)], [opening], chunk(9, 1, "exact"))
    assert [(each.start, opened) for each, opened, _ in log.replay(10)] == [(0, opening)]


def test_writing_earlier_truncates_also_across_forms() -> None:
    log = ActivationLog(1 << 20)
    log.append([work(1, 0, 3)], [], chunk(0, 3, "bf16"))
    log.append([work(1, 3, 3)], [], chunk(3, 3, "exact"))
    log.append([work(1, 2, 1)], [], chunk(7, 1, "exact"))
    assert told(log) == [(1, 0, "bf16", [0, 1]), (1, 2, "exact", [7])]
    assert log.used_bytes == 3 * (WIDTH + 2)


def test_it_is_bounded_by_what_is_really_kept() -> None:
    log = ActivationLog(8 * (WIDTH + 2))
    log.append([work(1, 0, 4)], [], chunk(0, 4))
    log.append([work(2, 0, 4)], [], chunk(4, 4))
    assert log.lengths() == {1: 4, 2: 4}
    log.append([work(2, 4, 1)], [], chunk(8, 1))
    assert log.lengths() == {2: 5}
