"""Every family, cut along its tensors: ranks that meet give the logits of one process.

Where ranks sum up, within a bound; where they gather, on ONNX Runtime, to the last bit. In both cases a row has the
same bits alone, in company and in pieces, and every rank has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, cut, whole
from shardcompute.models.tensor_share import Exchange, ExpertCut
from shardcompute.runtime.shard import open_shard, split_checkpoint
from shardcompute.weights.checkpoint import Checkpoint, adapted, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import FAMILIES, VOCABULARY, save_tiny
from support.models.tiny_gguf import tiny_gguf, write_gguf
from support.ranks import RankedStage
from support.tiny_adapter import ALL, save_adapter

IDS = np.random.default_rng(7).integers(3, VOCABULARY, 24)
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64)
BOUND = 3e-5
"""How far logits of about 4 may be apart where the same float32 products are summed in another order."""
ROUNDED_BOUND = 0.5
"""How far where activations are rounded to 8 bits besides: as far as rounding them moves logits."""
SAMPLE = (
    "llama-biases",
    "llama-mqa",
    "gemma2-capped",
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "deepseek-v2",
    "gpt-oss",
)
"""Biases, one key head, norms around, norms over all heads, experts, shared ones, latents, sinks."""

OTHER_BACKENDS = (
    "numpy",
    "torch",
    pytest.param(
        "mlx",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("mlx") is None,
            reason="mlx is not installed (pip install 'shardcompute[mlx]')",
        ),
    ),
)

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, Path] = {}

    def provide(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return provide


@contextmanager
def _opened(path: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(resolve(parse_reference(str(path)), Settings(data_dir=path.parent))) as checkpoint:
        yield checkpoint


def _alone(checkpoint: Checkpoint, backend: str, form: str = "native") -> Float32:
    with closing(open_shard(checkpoint, backend=backend, form=form, options=OPTIONS)) as executor:
        return np.array(executor.step([Segment(1, 0, len(IDS), len(IDS))], IDS))


def _ranked(
    checkpoint: Checkpoint,
    weights: list[float],
    *,
    backend: str = "onnx",
    form: str = "native",
    exchange: Exchange = "reduce",
    stage: Stage | None = None,
    experts_by: ExpertCut | None = None,
) -> RankedStage:
    split = split_checkpoint(checkpoint, weights, form=form, exchange=exchange, experts_by=experts_by)
    stage = stage or whole(checkpoint.spec)
    return RankedStage(checkpoint, stage, split, backend=backend, options=OPTIONS, form=form)


def _logits(ranks: RankedStage) -> Float32:
    return ranks.step([Segment(1, 0, len(IDS), len(IDS))], IDS)


def _in_pieces(ranks: RankedStage) -> Float32:
    """A part of the prompt beside another session, then single tokens."""
    together = ranks.step([Segment(2, 0, 9, 9), Segment(3, 0, 5, 0)], np.concatenate([IDS[:9], IDS[:5]]))
    singles = [ranks.step([Segment(2, i, 1, 1)], IDS[i : i + 1]) for i in range(9, len(IDS))]
    return np.concatenate([together, *singles])


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_that_sum_give_the_logits_of_one(name: str, folder: Folder) -> None:
    with _opened(folder(name)) as checkpoint:
        _check_sums(checkpoint, (1, 2, 3, 4) if name in SAMPLE else (3,))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_other_numbers_of_ranks(name: str, folder: Folder) -> None:
    with _opened(folder(name)) as checkpoint:
        _check_sums(checkpoint, (1, 2, 4))


def _check_sums(checkpoint: Checkpoint, counts: tuple[int, ...]) -> None:
    expected = _alone(checkpoint, "onnx")
    for ranks in counts:
        with _ranked(checkpoint, [1.0] * ranks) as stage:
            logits = _logits(stage)
            np.testing.assert_allclose(logits, expected, atol=BOUND)
            # One for the embedding, two a layer: none for queries, scores, gates and logits.
            assert stage.calls("all_reduce") == 1 + 2 * checkpoint.spec.layer_count
            assert stage.calls("all_gather") == 0
            np.testing.assert_array_equal(_in_pieces(stage), logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_that_gather_give_the_bits_of_one(name: str, folder: Folder) -> None:
    with _opened(folder(name)) as checkpoint:
        expected, spec = _alone(checkpoint, "onnx"), checkpoint.spec
        sparse = sum(layer.is_sparse for layer in spec.layers)
        shared = sparse if spec.experts is not None and spec.experts.shared_intermediate else 0
        with _ranked(checkpoint, [1.0, 2.0], exchange="gather") as stage:
            np.testing.assert_array_equal(_logits(stage), expected)
            # Before and behind each last map of a block; experts answer with a sum of which one part is not zero.
            assert stage.calls("all_gather") == 4 * spec.layer_count - 2 * sparse + 2 * shared
            assert stage.calls("all_reduce") == 1 + sparse
            np.testing.assert_array_equal(_in_pieces(stage), expected)


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
@pytest.mark.parametrize("name", SAMPLE)
def test_other_backends(name: str, backend: str, folder: Folder) -> None:
    with _opened(folder(name)) as checkpoint:
        expected = _alone(checkpoint, backend)
        for weights in ([1.0, 1.0], [1.0, 3.0, 2.0]):
            with _ranked(checkpoint, weights, backend=backend) as stage:
                np.testing.assert_allclose(_logits(stage), expected, atol=BOUND)
                np.testing.assert_allclose(_in_pieces(stage), expected, atol=BOUND)


@pytest.mark.parametrize("backend", ["onnx", *OTHER_BACKENDS])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss", "llama4-scout"])
def test_ranks_with_experts_of_their_own(name: str, backend: str, folder: Folder) -> None:
    with _opened(folder(name)) as checkpoint:
        expected = _alone(checkpoint, backend)
        for weights in ([1.0, 1.0], [3.0, 1.0, 2.0]):
            with _ranked(checkpoint, weights, backend=backend, experts_by="experts") as stage:
                logits = _logits(stage)
                np.testing.assert_allclose(logits, expected, atol=BOUND)
                assert stage.calls("all_reduce") == 1 + 2 * checkpoint.spec.layer_count
                np.testing.assert_allclose(_in_pieces(stage), logits, atol=0 if backend == "onnx" else BOUND)


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("name", ["llama-biases", "llama-mha", "qwen3-moe"])
def test_quantised_weights_are_cut_not_rounded_again(name: str, form: str, folder: Folder) -> None:
    """The oracle, which rounds no activations, sees the very weights of one process. ONNX Runtime rounds activations to
    8 bits, which turns another order of sums into another number here and there."""
    with _opened(folder(name)) as checkpoint:
        exact, rounded = _alone(checkpoint, "numpy", form), _alone(checkpoint, "onnx", form)
        for ranks in (2,) if name == "qwen3-moe" else (2, 3, 4):
            with _ranked(checkpoint, [1.0] * ranks, backend="numpy", form=form) as stage:
                np.testing.assert_allclose(_logits(stage), exact, atol=BOUND)
            with _ranked(checkpoint, [1.0] * ranks, form=form) as stage:
                logits = _logits(stage)
                np.testing.assert_allclose(logits, rounded, atol=ROUNDED_BOUND)
                np.testing.assert_array_equal(_in_pieces(stage), logits)


@pytest.mark.parametrize("form", ["int8", "int4", "mixed"])
def test_quantised_weights_gathered(form: str, folder: Folder) -> None:
    with _opened(folder("llama-biases")) as checkpoint:
        expected = _alone(checkpoint, "onnx", form)
        for ranks in (2, 3, 4):
            with _ranked(checkpoint, [1.0] * ranks, form=form, exchange="gather") as stage:
                np.testing.assert_array_equal(_logits(stage), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "deepseek-v3", "phi3"])
def test_gguf_rows_in_their_own_order(name: str, folder: Folder, tmp_path: Path) -> None:
    """Turned rows, stacked experts, fused matrices: cut after they are put in our order."""
    with _opened(write_gguf(tmp_path / "tiny.gguf", *tiny_gguf(name, folder(name)))) as checkpoint:
        expected = _alone(checkpoint, "onnx")
        with _ranked(checkpoint, [2.0, 1.0]) as stage:
            np.testing.assert_allclose(_logits(stage), expected, atol=BOUND)


@pytest.mark.parametrize("exchange", ["reduce", "gather"])
@pytest.mark.parametrize("backend", ["onnx", "numpy", "torch"])
def test_adapters_are_cut_with_what_they_add_to(
    backend: str, exchange: Exchange, folder: Folder, tmp_path: Path
) -> None:
    """A row with an adapter beside one without."""
    adapter = save_adapter(folder("llama-biases"), tmp_path / "adapter", targets=ALL)
    segments = [Segment(1, 0, len(IDS), len(IDS), adapter=1), Segment(2, 0, 8, 8)]
    ids = np.concatenate([IDS, IDS[:8]])
    with _opened(folder("llama-biases")) as opened:
        checkpoint = adapted(opened, {"some": adapter}, None)
        with closing(open_shard(checkpoint, backend=backend, options=OPTIONS)) as executor:
            expected = np.array(executor.step(segments, ids))
        assert np.abs(expected[:8] - expected[len(IDS) :]).max() > BOUND, "the adapter matters"
        with _ranked(checkpoint, [1.0, 1.0], backend=backend, exchange=exchange) as stage:
            np.testing.assert_allclose(stage.step(segments, ids), expected, atol=BOUND)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_ranks_of_stages_have_the_bits_of_ranks(name: str, stages: int, folder: Folder) -> None:
    """Two ranks in each of several stages, against two ranks of the whole: cuts between layers change nothing."""
    with _opened(folder(name)) as checkpoint, ExitStack() as stack:
        with _ranked(checkpoint, [1.0, 1.0]) as stage:
            expected = _logits(stage)
        chain = [
            stack.enter_context(_ranked(checkpoint, [1.0, 1.0], stage=each))
            for each in cut(checkpoint.spec, stages)
        ]
        x: Float32 = IDS
        for stage in chain:
            x = stage.step([Segment(1, 0, len(IDS), len(IDS))], x)
        np.testing.assert_array_equal(x, expected)
        np.testing.assert_allclose(x, _alone(checkpoint, "onnx"), atol=BOUND)


@pytest.mark.parametrize("backend", ["llamacpp", "transformers"])
def test_backends_that_compute_layers_whole_refuse(backend: str, folder: Folder) -> None:
    with _opened(folder("llama")) as checkpoint, pytest.raises(UnsupportedModelError, match="whole"):
        _ranked(checkpoint, [1.0, 1.0], backend=backend)
