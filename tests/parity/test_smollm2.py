"""The embedded default model, all of it: the tokens of `transformers`, what rounding costs, what a slice costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.bench.quality import measure_form
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage
from shardcompute.node.local.service import EngineOptions, LocalService, open_model
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import ModelFiles, resolve
from support.models.prompts import PROMPTS

TOKENS = 64
SLICE = Stage(10, 20, 30)
_MIB = 1 << 20

Ids = list[int]


def files_of(path: Path) -> ModelFiles:
    return resolve(parse_reference(str(path)), Settings(data_dir=path.parent))


# Greedy tokens


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    """`transformers` with the same file, widened to float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def answers(smollm2_gguf: Path) -> Mapping[str, tuple[Ids, Ids]]:
    """Each prompt's tokens and our greedy continuation, eight prompts at a time."""
    options = EngineOptions(form="float32", threads=1, context_length=512, kv_bytes=256 * _MIB)
    with (
        open_model(str(smollm2_gguf), Settings(data_dir=smollm2_gguf.parent), options) as service,
        ThreadPoolExecutor(8) as callers,
    ):
        prompts = [list(prompt.encode(service.tokenizer)) for prompt in PROMPTS]
        continued = callers.map(lambda ids: _continue(service, ids), prompts)
        return {p.name: pair for p, pair in zip(PROMPTS, zip(prompts, continued, strict=True), strict=True)}


def _continue(service: LocalService, prompt: Ids) -> Ids:
    deltas = service.stream(GenerationRequest(tuple(prompt), TOKENS))
    return [choice.id for delta in deltas for choice in delta.tokens]


def _continue_reference(model: Any, prompt: Ids) -> Ids:
    """Greedy decoding with a KV cache, token by token."""
    import torch

    tokens: Ids = []
    ids, cache = torch.tensor([prompt]), None
    while len(tokens) < TOKENS:
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
    return tokens


def test_prompts_are_many_and_diverse(answers: Mapping[str, tuple[Ids, Ids]]) -> None:
    lengths = sorted(len(prompt) for prompt, _ in answers.values())
    assert len(answers) >= 20
    assert lengths[0] == 1
    assert lengths[-1] > 200
    assert all(len(tokens) == TOKENS for _, tokens in answers.values())


@pytest.mark.parametrize("name", [prompt.name for prompt in PROMPTS])
def test_every_token_is_what_transformers_would_choose(
    name: str, answers: Mapping[str, tuple[Ids, Ids]], reference: Any
) -> None:
    """One forward over our own answer: where each token is the reference's best after those before it, greedy
    decoding by the reference gives this very answer. It costs a tenth of decoding (see the next test)."""
    import torch

    prompt, tokens = answers[name]
    logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(prompt.name, marks=[] if prompt.name in ("bread", "one-word") else pytest.mark.long)
        for prompt in PROMPTS
    ],
)
def test_greedy_decoding_gives_the_tokens_of_transformers(
    name: str, answers: Mapping[str, tuple[Ids, Ids]], reference: Any
) -> None:
    prompt, tokens = answers[name]
    assert _continue_reference(reference, prompt) == tokens


# What rounding costs


@pytest.fixture(scope="module")
def perplexities(smollm2_gguf: Path, evaluation_data: Path) -> Mapping[str, float]:
    data = evaluation_data / "lambada.jsonl"
    if not data.is_file():
        pytest.skip(f"no {data}")
    measured = {}
    for form in ("float32", "native", "int8"):
        results = measure_form(lambda: files_of(smollm2_gguf), form, data, 60, 1, lambda _: None)
        measured[form] = next(result.value for result in results if result.metric == "perplexity")
    return measured


@pytest.mark.parametrize("form", ["native", "int8"])
def test_rounding_costs_less_than_half_a_percent_of_perplexity(
    form: str, perplexities: Mapping[str, float]
) -> None:
    assert 30 < perplexities["float32"] < 50
    assert abs(perplexities[form] / perplexities["float32"] - 1) < 0.005


# What a slice costs


def test_a_slice_reads_its_own_tensors_and_the_header(smollm2_gguf: Path) -> None:
    sources: list[LocalBytes] = []

    def open_counted() -> LocalBytes:
        sources.append(LocalBytes(smollm2_gguf))
        return sources[-1]

    files = replace(files_of(smollm2_gguf), files={smollm2_gguf.name: open_counted})
    with open_checkpoint(files) as checkpoint:
        header = _read(sources)
        first_tensor = min(entry.offset for entry in checkpoint.tensors.entries.values())
        executor = open_shard(checkpoint, stage=SLICE, options=ExecutorOptions(64 * _MIB, context_length=512))
        executor.close()
        layers = tuple(f"blk.{i}." for i in range(SLICE.start, SLICE.stop))
        own = [e.size_bytes for name, e in checkpoint.tensors.entries.items() if name.startswith(layers)]
        assert checkpoint.stage_bytes(SLICE) == sum(own)
    assert first_tensor <= header <= first_tensor + _MIB, "the header is read in pieces of a mebibyte"
    assert _read(sources) - header == sum(own)
    assert sum(own) < 0.3 * smollm2_gguf.stat().st_size


def _read(sources: Sequence[LocalBytes]) -> int:
    return sum(source.bytes_read for source in sources)


_LOAD_SLICE = """
import json, resource, sys
import onnx, onnxruntime
from pathlib import Path
from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.ort import OrtExecutor
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage
from shardcompute.runtime.shard import open_shard
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

path, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
before = peak()
with open_checkpoint(resolve(parse_reference(path), Settings(data_dir=Path(path).parent))) as checkpoint:
    opened = peak()
    stage = Stage(start, stop, checkpoint.spec.layer_count)
    options = ExecutorOptions(kv_bytes=1 << 26, context_length=512, max_rows=64)
    executor = open_shard(checkpoint, stage=stage, options=options)
    size = checkpoint.stage_bytes(stage)
print(json.dumps({"slice": size, "opened": opened - before, "peak": peak() - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured as Linux reports it")
def test_a_slice_takes_memory_like_a_slice(smollm2_gguf: Path) -> None:
    """At most 2.5 times its bytes in the file at the worst moment, besides 30 MiB for vocabulary and runtime.

    In memory a layer takes 1.8 times its bytes in the file: a 4-bit block of 20 bytes becomes about 35.
    """
    command = [sys.executable, "-c", _LOAD_SLICE, str(smollm2_gguf), str(SLICE.start), str(SLICE.stop)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["peak"] < 2.5 * measured["slice"] + 30 * _MIB
    assert measured["peak"] < smollm2_gguf.stat().st_size
