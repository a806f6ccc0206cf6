"""Rows of answers that are over are shown as they were sent, as long as there is room for them."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.errors import LinkError, UsageError
from shardcompute.node.rpc.commands import ShownRows, ShowRows, decode_rows, encode_rows
from shardcompute.node.worker.activation_log import Chunk
from shardcompute.node.worker.receipts.kept_rows import KeptRows
from shardcompute.wire import find_codec

WIDTH = 64


def chunk(rows: int, codec: str = "exact") -> Chunk:
    values = np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype(np.float32)
    return Chunk(codec, WIDTH, find_codec(codec).rows.pack(values))


def test_rows_come_back_piece_by_piece_as_they_were_read() -> None:
    kept, pieces = KeptRows(), [chunk(5), chunk(7, "int8")]
    kept.keep("r", 3, pieces)
    found = [decode_rows(encode_rows(kept.show(ShowRows("r", 3, row)))) for row in (0, 5, 8)]
    assert [(each.codec, each.count) for each in found] == [("exact", 5), ("int8", 7), ("int8", 4)]
    read = find_codec("int8").rows.unpack(pieces[1].rows, WIDTH)
    assert found[2].content == np.ascontiguousarray(read[3:], dtype="<f4").tobytes()
    for receipt, start, row in (("r", 3, 12), ("r", 0, 0), ("other", 3, 0)):
        with pytest.raises(UsageError, match="not kept"):
            kept.show(ShowRows(receipt, start, row))


def test_the_oldest_go_first() -> None:
    size = chunk(8).rows.nbytes
    kept = KeptRows(2 * size)
    for number in range(3):
        kept.keep(str(number), 0, [chunk(8)])
    assert kept.used_bytes == 2 * size
    with pytest.raises(UsageError):
        kept.show(ShowRows("0", 0, 0))
    assert kept.show(ShowRows("2", 0, 0)).count == 8
    kept.limit(size)
    assert kept.used_bytes == size


def test_rows_of_another_size_than_they_say_are_refused() -> None:
    cut = ShownRows("exact", WIDTH, 3, bytes(4 * WIDTH * 3 - 4))
    for content in (encode_rows(cut), b"nonsense"):
        with pytest.raises(LinkError):
            decode_rows(content)
