"""Models that see, on every backend that takes pictures: features and logits of `transformers`, whole, cut and in
pieces."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardcompute.backends.executor import EncodingExecutor, Executor, ExecutorOptions
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.core.pictures import Picture, PictureSpan, step_stop
from shardcompute.core.settings import Settings
from shardcompute.models.spec import ModelSpec, cut
from shardcompute.models.vision.prepare import PreparedPicture, place_pictures, prepare_picture, size_of
from shardcompute.models.vision.resample import resize
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import VOCABULARY
from support.seeing.tiny_seeing import (
    BEGIN_ID,
    END_ID,
    ROW_ID,
    SEEING_PICTURES,
    Reference,
    pixels_of,
    processed,
    save_seeing,
)

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
    "torch",
    pytest.param(
        "torch/cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
)
"""With the device, where it is none of a CPU."""
SIZES = ((75, 133), (121, 40))
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=128, context_length=192)
Ids = NDArray[np.int64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def provide(name: str) -> Path:
        if name not in made:
            made[name] = save_seeing(name, tmp_path_factory.mktemp(name))
        return made[name]

    return provide


@pytest.fixture(scope="module")
def reference(folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def provide(name: str) -> Reference:
        if name not in made:
            made[name] = Reference(folder(name))
        return made[name]

    return provide


class Chain:
    """A model in stages, one behind the other."""

    def __init__(self, spec: ModelSpec, executors: Sequence[Executor]) -> None:
        self.spec = spec
        self.executors = executors

    def open(self, session: int, pictures: Sequence[Picture]) -> None:
        spans = [picture.span for picture in pictures]
        for index, executor in enumerate(self.executors):
            patches = [picture.patches for picture in pictures] if index == 0 else None
            executor.open_pictures(session, spans, patches)

    def step(self, segments: Sequence[Segment], ids: Ids) -> Float32:
        x: NDArray[np.generic] = ids
        for executor in self.executors:
            x = np.array(executor.step(segments, x))
        return x.astype(np.float32)


@contextmanager
def chain(path: Path, backend: str, stages: int = 1, options: ExecutorOptions = OPTIONS) -> Iterator[Chain]:
    backend, _, device = backend.partition("/")
    if device:
        options = replace(options, device=device, dtype=options.dtype.replace("auto", "float32"))
    with ExitStack() as stack:
        files = resolve(parse_reference(str(path)), Settings(data_dir=path.parent))
        with open_checkpoint(files) as checkpoint:
            yield Chain(
                checkpoint.spec,
                [
                    stack.enter_context(
                        closing(open_shard(checkpoint, stage=s, backend=backend, options=options))
                    )
                    for s in cut(checkpoint.spec, stages)
                ],
            )


def _prepare(spec: ModelSpec, count: int) -> list[PreparedPicture]:
    assert spec.vision is not None
    return [prepare_picture(spec.vision, pixels_of(*SIZES[i], seed=i)) for i in range(count)]


def _prompt(prepared: Sequence[PreparedPicture]) -> Ids:
    """Text, and each picture with text behind it."""
    noise = np.random.default_rng(3)
    parts = [noise.integers(3, ROW_ID, 7)]
    for each in prepared:
        parts += [np.array([BEGIN_ID] + [ROW_ID] * each.rows + [END_ID]), noise.integers(3, ROW_ID, 6)]
    return np.concatenate(parts).astype(np.int64)


def _pictures(spec: ModelSpec, ids: Ids, prepared: Sequence[PreparedPicture]) -> tuple[Picture, ...]:
    assert spec.vision is not None
    return place_pictures(spec.vision, ids.tolist(), prepared)


def _expected(reference: Reference, spec: ModelSpec, ids: Ids, count: int) -> Float32:
    return reference.logits(ids.tolist(), processed(reference.name, _resized(spec, count)))


def _resized(spec: ModelSpec, count: int) -> list[NDArray[np.uint8]]:
    """Pictures of the size that they are given to towers in; how they get there is tested with preprocessing."""
    vision = spec.vision
    assert vision is not None
    pictures = [pixels_of(*SIZES[i], seed=i) for i in range(count)]
    return [resize(each, *size_of(vision, *each.shape[:2]), vision.resampling) for each in pictures]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEEING_PICTURES)
@pytest.mark.parametrize(("count", "stages"), [(1, 1), (2, 1), (2, 2), (2, 3)])
def test_logits_of_transformers_with_pictures(
    name: str,
    backend: str,
    count: int,
    stages: int,
    folder: Callable[[str], Path],
    reference: Callable[[str], Reference],
) -> None:
    with chain(folder(name), backend, stages) as model:
        prepared = _prepare(model.spec, count)
        ids = _prompt(prepared)
        model.open(1, _pictures(model.spec, ids, prepared))
        # All at once; then the last text, token by token.
        whole = model.step([Segment(1, 0, len(ids), len(ids))], ids)
        single = [
            model.step([Segment(1, at, 1, 1)], ids[at : at + 1]) for at in range(len(ids) - 5, len(ids))
        ]
    expected = _expected(reference(name), model.spec, ids, count)
    np.testing.assert_allclose(whole, expected, atol=2e-4)
    np.testing.assert_allclose(np.concatenate(single), expected[-5:], atol=2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEEING_PICTURES)
def test_features_of_transformers(
    name: str, backend: str, folder: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    with chain(folder(name), backend) as model:
        prepared = _prepare(model.spec, 2)
        ids = _prompt(prepared)
        placed = _pictures(model.spec, ids, prepared)
        encode = model.executors[0]._pictures._encode  # type: ignore[attr-defined]
        found = np.concatenate([encode(each.span, each.patches) for each in placed])
    expected = reference(name).features(processed(name, _resized(model.spec, 2)))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEEING_PICTURES)
def test_a_prompt_in_pieces_beside_text_gives_the_same_bits(
    name: str, backend: str, folder: Callable[[str], Path]
) -> None:
    text = np.random.default_rng(5).integers(3, ROW_ID, 40)
    with chain(folder(name), backend, 2) as model:
        prepared = _prepare(model.spec, 2)
        ids = _prompt(prepared)
        pictures = _pictures(model.spec, ids, prepared)
        assert model.spec.vision is not None
        spans = [each.span for each in pictures] if model.spec.vision.is_bidirectional else []
        model.open(1, pictures)
        whole = model.step([Segment(1, 0, len(ids), len(ids))], ids)
        alone = model.step([Segment(2, 0, len(text), len(text))], text)
        model.open(3, pictures)
        pieces, beside, start = [], [], 0
        for number in range(len(ids)):
            if start == len(ids):
                break
            stop = step_stop(spans, start, min(len(ids), start + 9))
            segments = [Segment(4, number, 1, 1), Segment(3, start, stop - start, stop - start)]
            found = model.step(segments, np.concatenate([text[number : number + 1], ids[start:stop]]))
            beside.append(found[:1])
            pieces.append(found[1:])
            start = stop
    if backend == "onnx":
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        np.testing.assert_array_equal(np.concatenate(beside), alone[: len(beside)])
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=2e-4)
    np.testing.assert_allclose(np.concatenate(beside), alone[: len(beside)], atol=2e-4)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_thread_of_its_own_encodes_pictures_beside_steps(
    backend: str, folder: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    text = np.random.default_rng(5).integers(3, ROW_ID, 40)
    with chain(folder("qwen2_5_vl"), backend) as model:
        prepared = _prepare(model.spec, 2)
        ids = _prompt(prepared)
        pictures = _pictures(model.spec, ids, prepared)
        spans, patches = [each.span for each in pictures], [each.patches for each in pictures]
        executor = model.executors[0]
        assert isinstance(executor, EncodingExecutor)
        assert executor.needs_encoding(spans, patches)
        alone = model.step([Segment(2, 0, len(text), len(text))], text)
        with ThreadPoolExecutor(1) as pool:
            encoded = pool.submit(executor.encode_pictures, spans, patches)
            beside = model.step([Segment(3, 0, len(text), len(text))], text)
            encoded.result(timeout=60)
        assert not executor.needs_encoding(spans, patches)
        model.open(1, pictures)
        whole = model.step([Segment(1, 0, len(ids), len(ids))], ids)
    np.testing.assert_array_equal(beside, alone)
    np.testing.assert_allclose(whole, _expected(reference("qwen2_5_vl"), model.spec, ids, 2), atol=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SEEING_PICTURES)
def test_rows_on_cuda_have_the_same_bits_in_any_pieces(name: str, folder: Callable[[str], Path]) -> None:
    """In graphs or not, long segments and short ones, with text of others beside them, and a picture in two pages."""
    text = np.random.default_rng(5).integers(3, ROW_ID, 160)
    found = []
    for use_graphs, most in ((False, 120), (True, 120), (True, 9)):
        options = replace(OPTIONS, dtype="bfloat16", use_graphs=use_graphs)
        with chain(folder(name), "torch/cuda", 2, options) as model:
            prepared = _prepare(model.spec, 2)
            ids = np.concatenate([text[:45], _prompt(prepared)])
            pictures = _pictures(model.spec, ids, prepared)
            model.open(3, pictures)
            assert model.spec.vision is not None
            spans = [each.span for each in pictures] if model.spec.vision.is_bidirectional else []
            rows, start = [], 0
            for number in range(len(ids)):
                if start == len(ids):
                    break
                stop = step_stop(spans, start, min(len(ids), start + most))
                segments = [Segment(4, number, 1, 1), Segment(3, start, stop - start, stop - start)]
                step = np.concatenate([text[number : number + 1], ids[start:stop]])
                rows.append(model.step(segments, step)[1:])
                start = stop
            found.append(np.concatenate(rows))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_session_goes_on_from_pictures_of_another(
    name: str, backend: str, folder: Callable[[str], Path]
) -> None:
    with chain(folder(name), backend, 2) as model:
        prepared = _prepare(model.spec, 2)
        ids = _prompt(prepared)
        pictures = _pictures(model.spec, ids, prepared)
        model.open(1, pictures)
        whole = model.step([Segment(1, 0, len(ids), 6)], ids)
        shared = pictures[1].span.start
        for index, executor in enumerate(model.executors):
            executor.adopt(1, 2, shared)
            # The first picture is known by its keys: only the second is sent.
            patches = [b"", pictures[1].patches] if index == 0 else None
            executor.open_pictures(2, [each.span for each in pictures], patches)
        again = model.step([Segment(2, shared, len(ids) - shared, 6)], ids[shared:])
        with pytest.raises(UsageError, match="was not sent"):
            model.step([Segment(2, 0, len(ids), 1)], ids)
        for executor in model.executors:
            executor.close_session(2)
        text = model.step([Segment(2, 0, len(ids), 6)], ids)
    np.testing.assert_allclose(again, whole, atol=2e-4)
    # A session of the same number is another one: placeholders are plain tokens in it.
    assert np.abs(text - whole).max() > 0.01


def test_a_seeing_model_whose_pictures_are_cut_refuses_the_step(folder: Callable[[str], Path]) -> None:
    with chain(folder("gemma3"), "onnx") as model:
        prepared = _prepare(model.spec, 1)
        ids = _prompt(prepared)
        pictures = _pictures(model.spec, ids, prepared)
        model.open(1, pictures)
        inside = pictures[0].span.start + 3
        with pytest.raises(UsageError, match="inside a picture"):
            model.step([Segment(1, 0, inside, 1)], ids[:inside])
        assert model.executors[0].session_length(1) == 0


def test_a_model_without_its_tower_refuses_pictures(folder: Callable[[str], Path]) -> None:
    path = folder("qwen2_vl")
    files = resolve(parse_reference(str(path)), Settings(data_dir=path.parent))
    with open_checkpoint(files) as checkpoint:
        blind = replace(checkpoint, spec=replace(checkpoint.spec, vision=None))
        with (
            closing(open_shard(blind, backend="onnx", options=OPTIONS)) as executor,
            pytest.raises(UnsupportedModelError, match="takes no pictures"),
        ):
            executor.open_pictures(1, [PictureSpan(0, 4, (1, 4, 4))], [b"a"])


def test_vocabulary_has_the_marks() -> None:
    assert max(ROW_ID, BEGIN_ID, END_ID) < VOCABULARY
