"""KV rows that are read in one cache and written in another: the same bytes, in whatever pages, within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from shardcompute.backends.executor import MovableKv
from shardcompute.backends.kv import HostKv, MovableSessions
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.core.errors import CapacityError, RowGapError, UsageError
from shardcompute.core.kv_types import KV_TYPES, KvShape, KvType

SHAPE = KvShape(2, 4)
ROWS = PAGE_TOKENS + 9


class HostSessions(MovableSessions[HostKv]):
    def __init__(self, kv_type: KvType = "float32", layers: int = 3, kv_bytes: int = 1 << 20) -> None:
        self._kv = HostKv(layers, SHAPE, context_length=200, budget_bytes=kv_bytes, kv_type=kv_type)

    def fill(self, session: int, rows: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        segment = Segment(session, 0, rows)
        self._kv.take([segment])
        for layer in range(self._kv.layers):
            parts = [draw.standard_normal((rows, 2, 4), dtype=np.float32) for _ in range(2)]
            self._kv.write(segment, layer, *(self._kv.round(part) for part in parts))

    def values(self, session: int, layer: int, stop: int) -> list[float]:
        return self._kv.read(session, layer, stop).ravel().tolist()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_layers_of_two_caches_make_one(kv_type: KvType) -> None:
    """As when a machine takes over from two: each gives its part, in pieces, and what is written twice counts last."""
    first, second, whole = (HostSessions(kv_type, layers) for layers in (1, 2, 3))
    first.fill(7, ROWS, 1)
    second.fill(7, ROWS, 2)
    for start, stop in ((0, 40), (30, 50), (50, ROWS)):
        rows = range(start, stop)
        whole.write_kv(7, range(1), rows, first.read_kv(7, range(1), rows))
        content = second.read_kv(7, range(2), rows)
        assert content.nbytes == whole.kv_bytes(2, len(rows))
        whole.write_kv(7, range(1, 3), rows, memoryview(bytearray(content)))
    assert whole.values(7, 0, ROWS) == first.values(7, 0, ROWS)
    assert whole.values(7, 2, ROWS) == second.values(7, 1, ROWS)
    assert whole.kv_format == first.kv_format
    assert isinstance(whole, MovableKv)


def test_what_is_written_never_cuts_and_a_cut_frees_pages() -> None:
    source, target = HostSessions(), HostSessions()
    source.fill(1, ROWS, 3)
    target.write_kv(1, range(3), range(ROWS), source.read_kv(1, range(3), range(ROWS)))
    target.write_kv(1, range(3), range(5), source.read_kv(1, range(3), range(5)))
    assert target.session_length(1) == ROWS
    used = target.kv_usage().used_bytes
    target.cut_session(1, 20)
    assert target.session_length(1) == 20
    assert target.kv_usage().used_bytes < used
    assert target.values(1, 2, 20) == source.values(1, 2, 20)
    with pytest.raises(RowGapError):
        target.cut_session(1, 22)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    source = HostSessions()
    source.fill(1, ROWS, 3)
    rows = source.read_kv(1, range(3), range(ROWS))
    small = HostSessions(kv_bytes=source.kv_bytes(3, PAGE_TOKENS))
    with pytest.raises(CapacityError):
        small.write_kv(1, range(3), range(ROWS), rows)
    with pytest.raises(UsageError, match="bytes"):
        small.write_kv(1, range(3), range(ROWS - 1), rows)
    with pytest.raises(UsageError, match="no rows"):
        small.write_kv(1, range(1, 4), range(ROWS), rows)
    with pytest.raises(UsageError, match="past the context"):
        source.write_kv(1, range(1), range(300, 301), source.read_kv(1, range(1), range(1)))
    with pytest.raises(RowGapError):
        source.read_kv(1, range(3), range(ROWS + 1))
    assert small.sessions() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_of_a_pool_are_others_there(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from shardcompute.backends.torch.kv import PagedKv

    class PagedSessions(MovableSessions[PagedKv]):
        def __init__(self) -> None:
            place = {"dtype": getattr(torch, dtype), "device": torch.device("cpu")}
            self._kv = PagedKv(3, SHAPE, context_length=200, budget_bytes=1 << 20, **place)

        def read(self, session: int, layer: int) -> object:
            pages = torch.tensor(self._kv.table(session))
            return [part.tolist() for part in self._kv.read(layer, pages, self.session_length(session))]

    source, target = PagedSessions(), PagedSessions()
    source._kv.take([Segment(1, 0, ROWS)])
    source._kv.pool.copy_(torch.randn(source._kv.pool.shape))
    target._kv.take([Segment(9, 0, 100)])
    for start, stop in ((0, 30), (30, ROWS)):
        for layers in (range(1), range(1, 3)):
            rows = range(start, stop)
            target.write_kv(1, layers, rows, source.read_kv(1, layers, rows))
    assert target.kv_format == source.kv_format
    assert [target.read(1, layer) for layer in range(3)] == [source.read(1, layer) for layer in range(3)]
    assert target._kv.table(1) != source._kv.table(1)
