"""The hidden states that embeddings are made of are those of `transformers`, on every backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardcompute.core.generation import GenerationRequest, Sampling
from shardcompute.core.settings import load_settings
from shardcompute.node.local.service import EngineOptions, open_model
from support.models.tiny_checkpoint import save_tiny_llama

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = (5, 80, 101, 7, 33, 2, 90)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)


@pytest.mark.parametrize("backend", ["onnx", "numpy", "torch", "mlx", "transformers"])
def test_they_are_those_of_transformers(tiny: Path, backend: str) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        truth = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()
    options = EngineOptions(backend=backend, threads=1, context_length=64, kv_bytes=16 << 20, stages=2)
    with open_model(str(tiny), load_settings(), options) as service:
        request = GenerationRequest(PROMPT, max_tokens=1, sampling=Sampling(wants_hidden=True))
        (delta,) = list(service.stream(request))
        ours = np.frombuffer(delta.tokens[0].hidden, dtype="<f4")
        np.testing.assert_allclose(ours, truth, atol=2e-4)
        # Who does not ask for them gets none.
        (plain,) = list(service.stream(GenerationRequest(PROMPT, max_tokens=1)))
        assert plain.tokens[0].hidden == b""
        assert plain.tokens[0].id == delta.tokens[0].id
