"""Names of models as people type them: each means one file of the hub, and what is near a name is suggested."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import UsageError
from shardcompute.weights.sources.catalogue import find_known, find_known_reference, known_models
from shardcompute.weights.sources.reference import EmbeddedReference, HubReference, parse_reference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("qwen3:8b", HubReference("Qwen/Qwen3-8B-GGUF", quant="Q4_K_M")),
        ("qwen3", HubReference("Qwen/Qwen3-8B-GGUF", quant="Q4_K_M")),
        (" Qwen3:LATEST ", HubReference("Qwen/Qwen3-8B-GGUF", quant="Q4_K_M")),
        ("llama3.2:3b", HubReference("bartowski/Llama-3.2-3B-Instruct-GGUF", quant="Q4_K_M")),
        ("mixtral:8x7b", HubReference("mistralai/Mixtral-8x7B-Instruct-v0.1")),
        ("smollm2:135m", EmbeddedReference()),
        ("smollm2", EmbeddedReference()),
    ],
)
def test_names_mean_what_the_catalogue_says(text: str, expected: object) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("qwen3:9b", "qwen3 comes as qwen3:0.6b, "),
        ("qwen:8b", "did you mean qwen3:8b"),
        ("lama3.2:1b", "did you mean llama3.2:1b"),
        ("llama", "did you mean llama3.3 or llama3.2 or llama3.1?"),
        ("gpt-os", "did you mean gpt-oss"),
        ("nothing-like-it", "shardcompute list --catalogue"),
    ],
)
def test_near_misses_get_a_suggestion(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_reference(text)
    assert hint in refused.value.hint


def test_what_lies_on_disk_comes_first(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setattr("os.path.exists", lambda path: path == "qwen3")
    assert not isinstance(parse_reference("qwen3"), HubReference)


def test_every_entry_can_be_fetched_by_its_reference() -> None:
    models = known_models()
    assert len({model.full_name for model in models}) == len({model.reference for model in models})
    for model in models:
        reference = parse_reference(model.reference)
        assert str(reference) == model.reference
        assert parse_reference(model.full_name) == reference
        assert find_known(model.full_name) is model
        assert find_known_reference(str(reference)) is model
        assert model.licence
        assert model.context >= 8192


def test_every_name_has_one_default_size() -> None:
    names = {model.name for model in known_models()}
    defaults = [model.name for model in known_models() if model.is_default]
    assert sorted(defaults) == sorted(names)
    assert all(find_known(name) is not None for name in names)
