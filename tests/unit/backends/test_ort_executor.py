"""The CPU engine against the oracle, and against itself: the same bits however rows are grouped and layers cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.host.numpy_ops import NumpyExecutor
from shardcompute.backends.matrix import Array, Matrix
from shardcompute.backends.ort import OrtExecutor
from shardcompute.backends.ort.program import TakeWanted
from shardcompute.core.batch import Segment
from shardcompute.core.errors import BackendError, CapacityError, PromptTooLongError, UsageError
from shardcompute.core.kv_types import KvType
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import ModelSpec, cut, whole
from support.models.networks import SPECS, RandomTensors

FORMS = [(32, False), (8, False), (4, False), (4, True)]
IDS = np.random.default_rng(1).integers(0, 320, 300)
OPTIONS = ExecutorOptions(kv_bytes=64 << 20, context_length=512, max_logit_rows=512)


def open_ort(spec: ModelSpec, bits: int = 32, has_shifts: bool = False, **options: int | str) -> OrtExecutor:
    decoder = Decoder(spec, whole(spec), RandomTensors(spec, bits, has_shifts))
    return OrtExecutor(
        decoder,
        ExecutorOptions(**{"kv_bytes": 64 << 20, "context_length": 512, "max_logit_rows": 512} | options),
    )


@pytest.mark.parametrize("name", SPECS)
def test_agrees_with_the_oracle(name: str) -> None:
    spec = SPECS[name]()
    oracle = NumpyExecutor(Decoder(spec, whole(spec), RandomTensors(spec)), OPTIONS)
    ours = open_ort(spec)
    batch = [Segment(1, 0, 100, 100)]
    expected = oracle.step(batch, IDS[:100])
    np.testing.assert_allclose(ours.step(batch, IDS[:100]), expected, atol=1e-4)
    batch = [Segment(1, 100, 1, 1)]
    np.testing.assert_allclose(ours.step(batch, IDS[100:101]), oracle.step(batch, IDS[100:101]), atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("bits", "has_shifts"), FORMS)
def test_rows_have_the_same_bits_however_they_are_grouped(name: str, bits: int, has_shifts: bool) -> None:
    engine = open_ort(SPECS[name](), bits, has_shifts)
    whole_run = engine.step([Segment(1, 0, 300, 300)], IDS).copy()
    position = 0
    for count in (1, 1, 2, 3, 5, 64, 1, 100, 1, 1, 50, 71):
        rows = engine.step([Segment(2, position, count, count)], IDS[position : position + count])
        assert np.array_equal(rows, whole_run[position : position + count]), f"{count} rows at {position}"
        position += count
    engine.step([Segment(3, 0, 50)], IDS[:50])
    engine.step([Segment(4, 0, 70)], IDS[:70])
    ragged = [Segment(3, 50, 1, 1), Segment(4, 70, 4, 4), Segment(5, 0, 33, 1)]
    rows = engine.step(ragged, np.concatenate([IDS[50:51], IDS[70:74], IDS[:33]]))
    assert np.array_equal(rows, whole_run[[50, 70, 71, 72, 73, 32]])


@dataclass(frozen=True)
class HeadOfItsOwn(RandomTensors):
    """Layers in 4 bits, the head in 8."""

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        return RandomTensors(self.spec, 8 if name == "head" else 4).matrix(name, layer)


def test_a_head_of_another_form_is_padded_for_itself_and_keeps_its_bits() -> None:
    spec = SPECS["plain"]()
    engine = OrtExecutor(Decoder(spec, whole(spec), HeadOfItsOwn(spec)), OPTIONS)
    (choice,) = (step for step in engine._steps if isinstance(step, TakeWanted))
    assert engine.padding == open_ort(spec, 4).padding
    assert choice.padding == open_ort(spec, 8).padding
    whole_run = engine.step([Segment(1, 0, 60, 60)], IDS[:60]).copy()
    for position, count in ((0, 1), (1, 3), (4, 2), (6, 1), (7, 53)):
        rows = engine.step([Segment(2, position, count, count)], IDS[position : position + count])
        assert np.array_equal(rows, whole_run[position : position + count])
    ragged = [Segment(2, 59, 1, 1), Segment(3, 0, 5, 0), Segment(1, 58, 2, 1)]
    rows = engine.step(ragged, np.concatenate([IDS[59:60], IDS[:5], IDS[58:60]]))
    assert np.array_equal(rows, whole_run[[59, 59]])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kv_type", ["float16", "int8"])
def test_rounded_kv_agrees_with_the_oracle_and_itself(name: str, kv_type: KvType) -> None:
    """Keys and values are rounded before anything reads them, also in the step that brings them."""
    spec = SPECS[name]()
    options = replace(OPTIONS, kv_type=kv_type)
    oracle = NumpyExecutor(Decoder(spec, whole(spec), RandomTensors(spec)), options)
    ours = open_ort(spec, kv_type=kv_type)
    whole_run = ours.step([Segment(1, 0, 150, 150)], IDS[:150]).copy()
    # The last bits of a key decide which way it is rounded, so the two agree as far as one step of rounding.
    np.testing.assert_allclose(whole_run, oracle.step([Segment(1, 0, 150, 150)], IDS[:150]), atol=0.05)
    exact = open_ort(spec).step([Segment(1, 0, 150, 150)], IDS[:150])
    assert not np.array_equal(whole_run, exact)
    position = 0
    for count in (1, 1, 3, 64, 1, 80):
        rows = ours.step([Segment(2, position, count, count)], IDS[position : position + count])
        assert np.array_equal(rows, whole_run[position : position + count]), f"{count} rows at {position}"
        position += count
    ours.adopt(2, 3, 100)
    ragged = [Segment(3, 100, 2, 2), Segment(2, 149, 1, 1)]
    rows = ours.step(ragged, np.concatenate([IDS[100:102], IDS[149:150]]))
    assert np.array_equal(rows, whole_run[[100, 101, 149]])
    x: Array = IDS[:150]
    for stage in cut(spec, 2):
        part = OrtExecutor(Decoder(spec, stage, RandomTensors(spec)), options)
        x = part.step([Segment(1, 0, 150, 150)], x).copy()
    assert np.array_equal(x, whole_run)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("bits", [32, 4])
def test_cut_stages_have_the_same_bits_as_the_whole(name: str, stages: int, bits: int) -> None:
    spec = SPECS[name]()
    if stages > spec.layer_count:
        pytest.skip("fewer layers than stages")
    expected = open_ort(spec, bits).step([Segment(1, 0, 60, 60)], IDS[:60]).copy()
    passed = IDS[:60]
    for stage in cut(spec, stages):
        executor = OrtExecutor(Decoder(spec, stage, RandomTensors(spec, bits)), OPTIONS)
        passed = executor.step([Segment(1, 0, 60, 60)], passed)
    assert np.array_equal(passed, expected)


def test_writing_at_start_truncates() -> None:
    engine = open_ort(SPECS["plain"]())
    expected = engine.step([Segment(1, 0, 20, 1)], IDS[:20]).copy()
    engine.step([Segment(2, 0, 15)], IDS[:15])
    engine.step([Segment(2, 15, 30)], IDS[100:130])  # drafts that are then rejected
    rows = engine.step([Segment(2, 15, 5, 1)], IDS[15:20])
    assert np.array_equal(rows, expected)
    assert engine.session_length(2) == 20


def test_kv_memory_is_bounded_reported_and_freed() -> None:
    spec = SPECS["plain"]()
    page = 64 * spec.layer_count * spec.kv_bytes_per_token_and_layer()
    engine = open_ort(spec, kv_bytes=3 * page)
    engine.step([Segment(1, 0, 65)], IDS[:65])
    assert engine.kv_usage().free_tokens == 64
    with pytest.raises(CapacityError, match="1 of 3 are free"):
        engine.step([Segment(2, 0, 65)], IDS[:65])
    assert engine.session_length(2) == 0, "a refused step changes nothing"
    engine.step([Segment(1, 10, 1)], IDS[10:11])
    assert engine.kv_usage().free_tokens == 128, "truncation frees pages"
    engine.close_session(1)
    assert engine.kv_usage() == engine.kv_usage().__class__(0, 3 * page, 192, 0)


def test_refuses_what_makes_no_sense() -> None:
    engine = open_ort(SPECS["plain"](), max_rows=128)
    engine.step([Segment(1, 0, 10)], IDS[:10])
    for segments, ids, error in [
        ([Segment(1, 11, 1)], IDS[:1], "leave a gap"),
        ([Segment(1, 10, 1), Segment(1, 11, 1)], IDS[:2], "two segments"),
        ([Segment(2, 0, 129)], IDS[:129], "at most 128 rows"),
        ([Segment(2, 0, 2)], IDS[:1], "shape"),
        ([Segment(2, 0, 1)], np.array([320]), "outside the vocabulary"),
        ([Segment(2, 0, 1, 2)], IDS[:1], "cannot want"),
    ]:
        with pytest.raises(UsageError, match=error):
            engine.step(segments, ids)
    for start in range(10, 512, 100):
        engine.step([Segment(1, start, min(100, 512 - start))], IDS[: min(100, 512 - start)])
    with pytest.raises(PromptTooLongError):
        engine.step([Segment(1, 512, 1)], IDS[:1])


def test_threads_are_set_once_per_process() -> None:
    open_ort(SPECS["plain"]())
    with pytest.raises(BackendError, match="cannot change"):
        open_ort(SPECS["plain"](), threads=7)
