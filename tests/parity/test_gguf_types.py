"""Every block type of GGUF at work: kernels compute with the file's own numbers, whole or cut, alone or together."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.backends.matrix import Float32
from shardcompute.core.batch import Segment
from shardcompute.core.settings import Settings
from shardcompute.models.spec import cut
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.gguf.blocks import save_block_gguf
from support.gguf.parts import split_gguf
from support.models.tiny import save_tiny
from support.models.tiny_gguf import tiny_gguf, write_gguf

NEW = (
    "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0",
)  # fmt: skip
OPTIONS = ExecutorOptions(kv_bytes=1 << 24, max_rows=64, context_length=64)
IDS = np.random.default_rng(7).integers(3, 150, 20)
HAS_MLX = importlib.util.find_spec("mlx") is not None


def logits(path: Path, backend: str, *, form: str = "native", stages: int = 1) -> list[Float32]:
    """Of a whole prompt at once, and of a part and single tokens behind it."""
    with ExitStack() as stack:
        files = resolve(parse_reference(str(path)), Settings(data_dir=path.parent))
        checkpoint = stack.enter_context(open_checkpoint(files))
        executors = [
            stack.enter_context(
                closing(open_shard(checkpoint, stage=s, backend=backend, form=form, options=OPTIONS))
            )
            for s in cut(checkpoint.spec, stages)
        ]

        def step(segment: Segment) -> Float32:
            x = IDS[segment.start : segment.stop]
            for executor in executors:
                x = np.array(executor.step([segment], x))
            return x

        whole = step(Segment(1, 0, len(IDS), len(IDS)))
        pieces = [step(Segment(2, 0, 7, 7))]
        pieces += [step(Segment(2, position, 1, 1)) for position in range(7, len(IDS))]
        return [whole, np.concatenate(pieces)]


def distance(found: Float32, expected: Float32) -> float:
    """As exactness classes measure it (`backends.exactness`)."""
    a, b = (each - each.mean(axis=-1, keepdims=True) for each in (found, expected))
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())


def test_no_type_is_left_out() -> None:
    assert set(NEW) < set(BLOCK_LAYOUTS)
    assert set(BLOCK_LAYOUTS) - set(NEW) == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}


@pytest.mark.parametrize("dtype", BLOCK_LAYOUTS)
def test_each_type_runs_with_its_own_numbers(dtype: str, tmp_path: Path) -> None:
    """Against the same weights in float32: activations of 8 bits are all that blocks cost on a CPU."""
    path = save_block_gguf(tmp_path / "tiny.gguf", [dtype], layers=2)
    expected, _ = logits(path, "numpy", form="float32")
    whole, pieces = logits(path, "onnx")
    assert 0 < distance(whole, expected) < 0.1
    np.testing.assert_array_equal(pieces, whole)
    np.testing.assert_array_equal(logits(path, "onnx", stages=2)[0], whole)
    for backend in ("torch", *(["mlx"] if HAS_MLX else [])):
        assert distance(logits(path, backend)[0], expected) < 1e-4


def test_parts_give_the_logits_of_the_whole_file(tmp_path: Path) -> None:
    types = [name for name in NEW if name != "Q2_0"]  # which the package that cuts the file does not know
    path = save_block_gguf(tmp_path / "tiny.gguf", types, layers=3)
    parts = split_gguf(path, 3, tmp_path / "parts")
    expected = logits(path, "onnx")
    for reference, stages in ((parts[2], 3), (parts[0].parent, 1)):
        np.testing.assert_array_equal(logits(reference, "onnx", stages=stages), expected)


@pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")
def test_llama_cpp_runs_parts_as_they_are(tmp_path: Path) -> None:
    path = save_block_gguf(tmp_path / "tiny.gguf", ["IQ4_NL", "Q8_0", "MXFP4", "TQ2_0"], layers=3)
    parts = split_gguf(path, 3, tmp_path / "parts")
    expected, _ = logits(path, "llamacpp")
    for stages in (1, 2):
        np.testing.assert_array_equal(logits(parts[1], "llamacpp", stages=stages)[0], expected)
    assert distance(expected, logits(path, "numpy")[0]) < 0.1


def with_mxfp4_experts(folder: Path, *, is_dequantised: bool) -> Path:
    """The tiny gpt-oss with its experts in MXFP4, as OpenAI published it, or with what they mean in float32."""
    metadata, tensors = tiny_gguf("gpt-oss", folder)
    kind = gguf.GGMLQuantizationType.MXFP4
    path = folder / f"{'plain' if is_dequantised else 'mxfp4'}.gguf"
    blocks = {
        name: gguf.quantize(values, kind) for name, values in tensors.items() if name.endswith("exps.weight")
    }
    assert len(blocks) == 3 * metadata["gpt-oss.block_count"]
    if is_dequantised:
        meant = {name: gguf.dequantize(raw, kind) for name, raw in blocks.items()}
        return write_gguf(path, metadata, tensors | meant)
    return write_gguf(path, metadata, tensors, {name: (raw, kind) for name, raw in blocks.items()})


def test_gpt_oss_runs_its_mxfp4_experts(tmp_path: Path) -> None:
    folder = save_tiny("gpt-oss", tmp_path)
    path, plain = (with_mxfp4_experts(folder, is_dequantised=each) for each in (False, True))
    expected = logits(plain, "numpy")
    np.testing.assert_array_equal(logits(path, "numpy"), expected)
    whole, pieces = logits(path, "onnx")
    assert 0 < distance(whole, expected[0]) < 0.1
    np.testing.assert_array_equal(pieces, whole)
    for stages in (2, 3):
        np.testing.assert_array_equal(logits(path, "onnx", stages=stages)[0], whole)


def test_what_types_cost_in_tokens_is_nothing(tmp_path: Path) -> None:
    """The oracle computes in float32: native blocks and the same weights widened first are one and the same."""
    types: Sequence[str] = [name for name in BLOCK_LAYOUTS if not BLOCK_LAYOUTS[name].has_shifts]
    path = save_block_gguf(tmp_path / "tiny.gguf", types, layers=3)
    np.testing.assert_array_equal(logits(path, "numpy"), logits(path, "numpy", form="float32"))
