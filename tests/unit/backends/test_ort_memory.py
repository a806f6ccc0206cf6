"""The CPU engine holds weights once: what kernels have packed is not kept beside it, and the bits do not change."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import onnxruntime
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Float32, Matrix, MixedMatrix
from shardcompute.backends.ort import OrtExecutor
from shardcompute.backends.ort.buffers import give_back_rows, reserve_rows
from shardcompute.backends.ort.graph import LOADING_ROOM, GraphWriter, use_threads
from shardcompute.backends.ort.linear import Linear, write_linear
from shardcompute.backends.ort.table import EmbeddingTable
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import whole
from support.models.networks import SPECS, RandomTensors

WIDTH, HEIGHT = 256, 96


def blocks(bits: int, size: int, *, has_shifts: bool = False, is_half: bool = True) -> BlockMatrix:
    noise = np.random.default_rng(bits + size)
    shape = (HEIGHT, WIDTH // size)
    codes = noise.integers(0, 256, (*shape, size * bits // 8), dtype=np.uint8)
    scales, shifts = (noise.random(shape, dtype=np.float32) for _ in range(2))
    if is_half:
        scales, shifts = (each.astype(np.float16).astype(np.float32) for each in (scales, shifts))
    return BlockMatrix(bits, size, codes, scales, shifts if has_shifts else None)


def open_linear(matrix: Matrix) -> onnxruntime.InferenceSession:
    use_threads(1)
    graph = GraphWriter()
    y = write_linear(graph, graph.input("x", [1, "rows", WIDTH]), Linear((matrix,), None))
    graph.rename(y, "y")
    graph.output("y", [1, "rows", HEIGHT])
    return graph.open()


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (4, 16), (8, 64), (4, 128)])
def test_sessions_do_not_read_what_passed_through_the_loading_room(bits: int, size: int) -> None:
    matrix = blocks(bits, size)
    x = np.random.default_rng(0).standard_normal((1, 3, WIDTH), dtype=np.float32)
    session = open_linear(matrix)
    expected = session.run(["y"], {"x": x})[0]
    exact = x[0] @ matrix.to_dense().T
    np.testing.assert_allclose(expected[0], exact, atol=0.03 * np.abs(exact).max())
    open_linear(blocks(8, 32))  # takes the same room
    LOADING_ROOM.release()
    assert np.array_equal(session.run(["y"], {"x": x})[0], expected)


def test_a_kernel_that_reads_its_scales_later_would_be_noticed() -> None:
    use_threads(1)
    graph = GraphWriter()
    late = graph.constant(np.ones(WIDTH, dtype=np.float32) * 3, is_spent=True)
    graph.rename(graph.node("Mul", [graph.input("x", [1, "rows", WIDTH]), late]), "y")
    graph.output("y", [1, "rows", WIDTH])
    assert np.isnan(graph.open().run(["y"], {"x": np.ones((1, 1, WIDTH), dtype=np.float32)})[0]).all()


@pytest.mark.parametrize("has_shifts", [False, True])
@pytest.mark.parametrize("is_half", [False, True])
def test_a_table_gives_the_rows_of_its_matrix(has_shifts: bool, is_half: bool) -> None:
    matrix = blocks(8, 32, has_shifts=has_shifts, is_half=is_half)
    table, ids = EmbeddingTable(matrix), np.array([5, 0, 5, HEIGHT - 1])
    assert np.array_equal(table.rows(ids), matrix.to_dense()[ids])
    narrow = matrix.codes.nbytes + (matrix.size_bytes - matrix.codes.nbytes) // 2
    assert table.size_bytes == (narrow if is_half else matrix.size_bytes)


def test_tables_of_other_forms_stay_as_they_are() -> None:
    dense = np.random.default_rng(0).standard_normal((HEIGHT, WIDTH)).astype(np.float16)
    columns = np.array([3, 200])
    mixed = MixedMatrix(blocks(8, 32), columns, dense[:, columns])
    for matrix in (DenseMatrix(dense), mixed):
        rows: Float32 = EmbeddingTable(matrix).rows(np.array([7, 1]))
        assert np.array_equal(rows, matrix.to_dense()[[7, 1]])


_MEASURE = """
import re
import numpy as np
from shardcompute.backends.matrix import BlockMatrix
from shardcompute.backends.ort.graph import LOADING_ROOM, GraphWriter, use_threads
from shardcompute.backends.ort.linear import Linear, write_linear
from shardcompute.core.process_memory import give_back_large_blocks, return_freed_memory

def anonymous_bytes():
    return_freed_memory()
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

def open_session(height, width=2048):
    shape = (height, width // 32)
    codes = np.full((*shape, 16), 0x5A, dtype=np.uint8)
    matrix = BlockMatrix(4, 32, codes, np.ones(shape, dtype=np.float32))
    graph = GraphWriter()
    graph.rename(write_linear(graph, graph.input("x", [1, "rows", width]), Linear((matrix,), None)), "y")
    graph.output("y", [1, "rows", height])
    return graph.open()

use_threads(1)
give_back_large_blocks()
kept = [open_session(256)]
before = anonymous_bytes()
kept += [open_session(8192) for _ in range(4)]
LOADING_ROOM.release()
print((anonymous_bytes() - before) / (4 * 8192 * 2048))
"""


def _measure(program: str) -> float:
    """What a program prints, in a process of its own whose memory is its own, too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    measured = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return float(measured.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_only_the_packed_weights_stay_in_memory() -> None:
    """4 bits a weight, and for every 32 of them a scale and a sum as the kernel packs them."""
    assert _measure(_MEASURE) < 0.5 + 2 * 4 / 32 + 0.05


_SHRINK = """
import re
import numpy as np
from shardcompute.backends.ort import OrtExecutor
from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import whole
from dataclasses import replace
from support.models.networks import RandomTensors, plain_spec

def anonymous_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

spec = replace(plain_spec(2), intermediate=20_000)
options = ExecutorOptions(kv_bytes=64 << 20, context_length=512)
executor = OrtExecutor(Decoder(spec, whole(spec), RandomTensors(spec)), options)
ids = np.arange(300)
executor.step([Segment(1, 0, 300, 1)], ids)
large = anonymous_mib()
executor.step([Segment(1, 300, 1, 1)], ids[:1])
print(large - anonymous_mib())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_scratch_memory_of_a_prompt_is_given_back_when_its_answer_begins() -> None:
    """128 rows of 20,000 numbers are 10 MB, of which several are needed at once."""
    assert _measure(_SHRINK) > 20


_SHORT_PROMPTS = (
    _SHRINK.partition("ids = ")[0]
    + """
def chat(rows):
    executor.step([Segment(1, 0, rows, 1)], np.arange(rows))
    executor.step([Segment(1, rows, 1, 1)], np.zeros(1, np.int64))
    executor.close_session(1)

chat(20)
executor.rest()
before = anonymous_mib()
for rows in range(30, 60, 3):
    chat(rows)
grown = anonymous_mib() - before
executor.rest()
rested = anonymous_mib() - before
print(max(grown / 30, rested / 4))
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_short_prompts_of_many_lengths_do_not_add_up() -> None:
    """Ten of them took 130 MiB beside each other; now some stay until the next few have come, and none at rest."""
    assert _measure(_SHORT_PROMPTS) < 1


def test_an_executor_lets_its_network_go() -> None:
    """With it go the files that weights were read from, and whatever of them it has."""
    spec = SPECS["plain"]()
    network = Decoder(spec, whole(spec), RandomTensors(spec))
    seen = weakref.ref(network)
    engine = OrtExecutor(network, ExecutorOptions(kv_bytes=1 << 20, context_length=64))
    del network
    gc.collect()
    assert seen() is None
    assert engine.step([Segment(1, 0, 1, 1)], np.zeros(1, np.int64)).shape == (1, spec.vocab_size)


def test_rows_that_are_given_back_read_as_zeros_and_others_stay() -> None:
    buffer = reserve_rows(512, 1024)
    buffer[:] = 1
    give_back_rows([buffer], 16)
    assert (buffer[:16] == 1).all()
    if sys.platform != "win32":
        assert not buffer[17:].any()
    buffer[300] = 2
    assert (buffer[300] == 2).all()
