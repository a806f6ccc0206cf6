"""Stages that `transformers` runs: however many share a model, and whoever of them is lost, the tokens are one
process's."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.backends.exactness import parse_class
from shardcompute.control.explain import classes_of
from shardcompute.core.generation import Speculation
from support.models.requests import greedy, prompts, sampled
from support.models.tiny_checkpoint import VOCABULARY, save_tiny_llama
from support.swarm.lab import Alone, open_alone, swarm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "GPTNeoX": SIZES,
    "Bamba": {
        **SIZES,
        "attn_layer_indices": [1, 4],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(folder, max_shard_size="200KB")
    text = save_tiny_llama(folder.parent / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text / name, folder / name)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp("fallback") / f"tiny-{request.param}")


@pytest.fixture(scope="module")
def answers(model: Path) -> Iterator[Alone]:
    with open_alone(model) as service:
        yield Alone(service)


def test_three_stages_answer_as_one_process_does_also_after_one_is_lost(
    tmp_path: Path, model: Path, answers: Alone
) -> None:
    texts = prompts(answers.service.tokenizer)
    requests = [kind(text) for kind in (greedy, sampled) for text in texts[:3]]
    drafted = replace(greedy(texts[3], 24), speculation=Speculation("ngram", 3, 1))
    with swarm(tmp_path, model, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = [lab.start(request) for request in (*requests, drafted)]
        assert [talk.result() for talk in talks[:-1]] == [answers.answer(each) for each in requests]
        assert talks[-1].result() == answers.answer(replace(drafted, speculation=Speculation("off")))
        classes = classes_of(lab.state, lab.chain().nodes, lab.state.models[lab.chain().model].model)
        assert {parsed.backend for name in classes if (parsed := parse_class(name))} == {"transformers"}
        talks = [lab.start(greedy(text, 80)) for text in texts[:3]]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(1))
        assert [talk.result() for talk in talks] == [answers.answer(talk.request) for talk in talks]
        lab.wait_quiet()
