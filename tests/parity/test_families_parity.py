"""Every family, on every CPU backend, gives the logits of `transformers`, whole or cut into stages."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.settings import Settings
from shardcompute.models.spec import cut
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import FAMILIES, SEEING, VOCABULARY, reference_logits, save_tiny
from support.models.tiny_gguf import ARCHITECTURES, tiny_gguf, write_gguf

BACKENDS = (
    "numpy",
    "onnx",
    pytest.param(
        "mlx",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("mlx") is None,
            reason="mlx is not installed (pip install 'shardcompute[mlx]')",
        ),
    ),
)
IDS = np.random.default_rng(7).integers(3, VOCABULARY, 24)
PROMPT = 9
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64)

SAMPLE = ("llama", "gemma2-capped", "mixtral", "deepseek-v3", "gpt-oss")
"""Cut in two, too: rotation, windows and caps, experts, latents, sinks."""
Step = Callable[[Segment], Float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def provide(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return provide


@pytest.fixture(scope="module")
def expected(folder: Callable[[str], Path]) -> Callable[[str], Float32]:
    made: dict[str, Float32] = {}

    def provide(name: str) -> Float32:
        if name not in made:
            made[name] = reference_logits(folder(name), IDS.tolist())
        return made[name]

    return provide


@pytest.fixture(scope="module")
def uncut(folder: Callable[[str], Path]) -> Callable[[str, str], Float32]:
    """The logits of a family in one piece on a backend, computed once."""
    made: dict[tuple[str, str], Float32] = {}

    def provide(name: str, backend: str) -> Float32:
        if (name, backend) not in made:
            with _chain(folder(name), backend, 1) as step:
                made[name, backend] = _logits(step)
        return made[name, backend]

    return provide


@contextmanager
def _chain(
    path: Path, backend: str, stages: int, options: ExecutorOptions = OPTIONS, ids: Any = IDS
) -> Iterator[Step]:
    """The model at `path` in stages, one behind the other."""
    with ExitStack() as stack:
        files = resolve(parse_reference(str(path)), Settings(data_dir=path.parent))
        with open_checkpoint(files) as checkpoint:
            executors = [
                stack.enter_context(
                    closing(open_shard(checkpoint, stage=s, backend=backend, options=options))
                )
                for s in cut(checkpoint.spec, stages)
            ]

        def step(segment: Segment) -> Float32:
            x = ids[segment.start : segment.stop]
            for executor in executors:
                x = np.array(executor.step([segment], x))
            return x

        yield step


def _logits(step: Step) -> Float32:
    """Of the whole prompt at once; then, in another session, of a part and of single tokens behind it."""
    whole = step(Segment(1, 0, len(IDS), len(IDS)))
    pieces = [step(Segment(2, 0, PROMPT, PROMPT))]
    pieces += [step(Segment(2, position, 1, 1)) for position in range(PROMPT, len(IDS))]
    return np.stack([whole, np.concatenate(pieces)])


@pytest.mark.parametrize("backend", [*BACKENDS, "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_transformers(
    name: str, backend: str, uncut: Callable[[str, str], Float32], expected: Callable[[str], Float32]
) -> None:
    whole, pieces = uncut(name, backend)
    np.testing.assert_allclose(whole, expected(name), atol=1e-4)
    np.testing.assert_allclose(pieces, expected(name), atol=1e-4)


@pytest.mark.parametrize("backend", [*BACKENDS, "torch"])
@pytest.mark.parametrize("name", SEEING)
def test_text_of_models_that_also_see(
    name: str, backend: str, folder: Callable[[str], Path], expected: Callable[[str], Float32]
) -> None:
    with _chain(folder(name), backend, 2) as step:
        whole, pieces = _logits(step)
    np.testing.assert_allclose(whole, expected(name), atol=1e-4)
    np.testing.assert_allclose(pieces, expected(name), atol=1e-4)


@pytest.mark.parametrize("backend", [*BACKENDS, "torch"])
def test_longrope_to_its_full_context(backend: str, folder: Callable[[str], Path]) -> None:
    """Text longer than the context that the model was made for at first, at once and in pieces that begin before it."""
    path, ids = folder("phi3-longrope"), np.random.default_rng(8).integers(3, VOCABULARY, 90)
    options = replace(OPTIONS, max_rows=128, max_logit_rows=128, context_length=256)
    with _chain(path, backend, 2, options, ids) as step:
        whole = step(Segment(1, 0, 90, 90))
        pieces = [step(Segment(2, 0, 60, 60)), *(step(Segment(2, i, 1, 1)) for i in range(60, 90))]
    expected = reference_logits(path, ids.tolist())
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-4)


@pytest.mark.parametrize("backend", ["numpy", "onnx"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sessions_of_one_batch_do_not_see_each_other(
    name: str, backend: str, folder: Callable[[str], Path], expected: Callable[[str], Float32]
) -> None:
    batch = [Segment(1, 0, 12, 12), Segment(2, 0, 5, 5)]
    more = [Segment(2, 5, 4, 4), Segment(1, 12, 1, 1)]
    with _batch(folder(name), backend) as step:
        first, second = step(batch), step(more)
    want = expected(name)
    np.testing.assert_allclose(first, np.concatenate([want[:12], want[:5]]), atol=1e-4)
    np.testing.assert_allclose(second, np.concatenate([want[5:9], want[12:13]]), atol=1e-4)


@contextmanager
def _batch(path: Path, backend: str) -> Iterator[Callable[[list[Segment]], Float32]]:
    """The whole model, stepped by rows of several sessions at once."""
    files = resolve(parse_reference(str(path)), Settings(data_dir=path.parent))
    with open_checkpoint(files) as checkpoint:
        (whole,) = cut(checkpoint.spec, 1)
        executor = open_shard(checkpoint, stage=whole, backend=backend, options=OPTIONS)

    def step(segments: list[Segment]) -> Float32:
        rows = np.concatenate([IDS[segment.start : segment.stop] for segment in segments])
        return np.array(executor.step(segments, rows))

    with closing(executor):
        yield step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *((name, 3) for name in FAMILIES),
        *(pytest.param(name, 2, marks=() if name in SAMPLE else pytest.mark.long) for name in FAMILIES),
    ],
)
def test_a_cut_model_is_the_same_model(
    name: str,
    stages: int,
    backend: str,
    folder: Callable[[str], Path],
    uncut: Callable[[str, str], Float32],
) -> None:
    with _chain(folder(name), backend, stages) as step:
        np.testing.assert_array_equal(_logits(step), uncut(name, backend))


@pytest.mark.parametrize("backend", [*BACKENDS, "torch"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_gives_the_same_logits(
    name: str,
    backend: str,
    folder: Callable[[str], Path],
    expected: Callable[[str], Float32],
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", *tiny_gguf(name, folder(name)))
    with _chain(path, backend, 1) as step:
        whole, pieces = _logits(step)
    np.testing.assert_allclose(whole, expected(name), atol=1e-4)
    np.testing.assert_allclose(pieces, expected(name), atol=1e-4)


@pytest.mark.parametrize("backend", ["numpy", "onnx"])
@pytest.mark.parametrize("name", ["deepseek-v2-grouped", "deepseek-v3", "qwen2-moe", "llama4-scout"])
def test_a_cut_gguf_is_the_same_model(
    name: str, backend: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", *tiny_gguf(name, folder(name)))
    results = []
    for stages in (1, 2, 3):
        with _chain(path, backend, stages) as step:
            results.append(_logits(step))
    for one, other in itertools.pairwise(results):
        np.testing.assert_array_equal(one, other)
