from __future__ import annotations

from typing import Any

import pytest

from shardcompute.api.generation.model_names import match_short_name
from shardcompute.node.admin.downloads import served_name
from shardcompute.weights.sources.catalogue import known_models
from shardcompute.weights.sources.reference import parse_reference

SMOL = "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("smollm2", SMOL),
        ("smollm2:latest", SMOL),
        ("smollm2:135m", SMOL),
        ("smollm2:135m-instruct", SMOL),
        ("SmolLM2-135M-Instruct:latest", SMOL),
        ("smollm2-135m-instruct", SMOL),
        ("smollm2", f"{SMOL}.Q4_1"),
        ("smollm2:135m-instruct-q4_1", f"{SMOL}.Q4_1"),
        ("llama3.2:3b", "Llama-3.2-3B-Instruct.Q4_K_M.gguf"),
        ("llama3.2:3b", "meta-llama/Llama-3.2-3B-Instruct"),
        ("gemma2:2b", "google/gemma-2-2b-it"),
        ("qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("mistral:7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    ],
)
def test_ollamas_names_mean_the_model(asked: str, served: str) -> None:
    assert match_short_name(asked, [served, "org/other"]) == [served]


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("smollm2:360m", SMOL),
        ("smollm2:135m-instruct-q8_0", SMOL),
        ("smollm", SMOL),
        ("smollm2-135m-instruct-more", SMOL),
        ("qwen2.5", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("llama3", "meta-llama/Llama-3.2-3B-Instruct"),
        ("other/smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (":latest", SMOL),
        ("", SMOL),
    ],
)
def test_other_models_are_not_meant(asked: str, served: str) -> None:
    assert match_short_name(asked, [served]) == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages"])
@pytest.mark.parametrize(
    "name", ["tiny", "tiny:1b", "tiny:latest", "org/tiny:1b", "org/Tiny-1B-Instruct:latest"]
)
def test_every_protocol_takes_them(
    app: Any, call: Any, service: Any, fakes: Any, path: str, name: str
) -> None:
    service.served = (fakes.served("org/Tiny-1B-Instruct"), fakes.served("org/Other-1B"))
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": False}
    answered = call(app, "POST", path, json=body)
    assert answered.status_code == 200, answered.text
    assert answered.json()["model"] == "org/Tiny-1B-Instruct"


def test_a_short_name_of_two_models_is_refused_with_both(
    app: Any, call: Any, service: Any, fakes: Any
) -> None:
    service.served = (fakes.served("org/Tiny-1B"), fakes.served("org/Tiny-3B"))
    refused = call(app, "GET", "/v1/models/tiny")
    assert refused.status_code == 404
    assert "org/Tiny-1B" in refused.json()["error"]["message"]
    assert call(app, "GET", "/v1/models/tiny:3b").json()["id"] == "org/Tiny-3B"


def test_names_of_the_catalogue_mean_what_they_are_fetched_as() -> None:
    everything = {served_name(parse_reference(known.reference)) for known in known_models()}
    for known in known_models():
        served = served_name(parse_reference(known.reference))
        assert match_short_name(known.full_name, [*everything]) == [served]
        if known.is_default:
            assert match_short_name(f"{known.name}:latest", [served, "org/other"]) == [served]
