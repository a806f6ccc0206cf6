"""Every family, on every CPU backend, gives the logits of `transformers`, whole or cut into stages."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

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


@contextmanager
def _chain(path: Path, backend: str, stages: int) -> Iterator[Step]:
    """The model at `path` in stages, one behind the other."""
    with ExitStack() as stack:
        files = resolve(parse_reference(str(path)), Settings(data_dir=path.parent))
        with open_checkpoint(files) as checkpoint:
            executors = [
                stack.enter_context(
                    closing(open_shard(checkpoint, stage=s, backend=backend, options=OPTIONS))
                )
                for s in cut(checkpoint.spec, stages)
            ]

        def step(segment: Segment) -> Float32:
            x = IDS[segment.start : segment.stop]
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_transformers(
    name: str, backend: str, folder: Callable[[str], Path], expected: Callable[[str], Float32]
) -> None:
    with _chain(folder(name), backend, 1) as step:
        whole, pieces = _logits(step)
    np.testing.assert_allclose(whole, expected(name), atol=1e-4)
    np.testing.assert_allclose(pieces, expected(name), atol=1e-4)


@pytest.mark.parametrize("backend", ["numpy", "onnx"])
@pytest.mark.parametrize("name", SEEING)
def test_text_of_models_that_also_see(
    name: str, backend: str, folder: Callable[[str], Path], expected: Callable[[str], Float32]
) -> None:
    with _chain(folder(name), backend, 2) as step:
        whole, pieces = _logits(step)
    np.testing.assert_allclose(whole, expected(name), atol=1e-4)
    np.testing.assert_allclose(pieces, expected(name), atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_model_is_the_same_model(name: str, backend: str, folder: Callable[[str], Path]) -> None:
    results = []
    for stages in (1, 2, 3):
        with _chain(folder(name), backend, stages) as step:
            results.append(_logits(step))
    for one, other in itertools.pairwise(results):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
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
