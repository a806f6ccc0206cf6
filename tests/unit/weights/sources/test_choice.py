"""Which files make a model, from names alone."""

from __future__ import annotations

import json

import pytest

from shardcompute.core.errors import CorruptModelError, UnknownModelError, UnsupportedModelError, UsageError
from shardcompute.weights.sources.choice import FileChoice, choose_files, is_safe_name, quant_of


def _choose(*names: str, quant: str | None = None, index: object = None) -> FileChoice:
    return choose_files("org/repo", names, lambda _: json.dumps(index), quant=quant)


def test_single_safetensors_with_its_texts() -> None:
    choice = _choose(
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "pytorch_model.bin",
    )
    assert (choice.kind, choice.main_file) == ("safetensors", "model.safetensors")
    assert choice.all_files == ("config.json", "tokenizer.json", "model.safetensors")


def test_old_tokenizer_files_stand_in_for_tokenizer_json() -> None:
    choice = _choose("config.json", "model.safetensors", "tokenizer.model", "vocab.json", "merges.txt")
    assert choice.text_files == ("config.json", "tokenizer.model", "vocab.json", "merges.txt")


def test_index_names_the_shards() -> None:
    index = {
        "weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    }
    names = (
        "config.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "x.bin",
    )
    choice = _choose(*names, "unused.safetensors", index=index)
    assert choice.main_file == "model.safetensors.index.json"
    assert choice.weight_files == ("model-1.safetensors", "model-2.safetensors")
    assert "model.safetensors.index.json" in choice.text_files


def test_shard_that_is_not_there() -> None:
    with pytest.raises(CorruptModelError, match="b-1"):
        _choose(
            "config.json",
            "model.safetensors.index.json",
            index={"weight_map": {"a": "b-1.safetensors"}},
        )


@pytest.mark.parametrize(
    "index", [None, [], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}]
)
def test_damaged_index(index: object) -> None:
    with pytest.raises(CorruptModelError, match="index"):
        _choose("config.json", "model.safetensors.index.json", index=index)


def test_index_cannot_lead_out_of_the_folder() -> None:
    names = ("config.json", "model.safetensors.index.json", "../../secret.safetensors")
    with pytest.raises(CorruptModelError, match="not there"):
        _choose(*names, index={"weight_map": {"a": "../../secret.safetensors"}})


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Model-7B.Q4_K_M.gguf", "Q4_K_M"),
        ("model-7b-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("model_Q8_0.gguf", "Q8_0"),
        ("m-IQ3_XXS.gguf", "IQ3_XXS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-BF16.GGUF", "BF16"),
        ("Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K"),
        ("Qwen2.5-Coder-f16.gguf", "F16"),
        ("model.gguf", None),
        ("Qwen3-8B.gguf", None),
    ],
)
def test_quant_of_a_name(name: str, quant: str | None) -> None:
    assert quant_of(name) == quant


def test_quant_is_matched_exactly_and_beats_safetensors() -> None:
    names = ("config.json", "model.safetensors", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-Q4_K_M.gguf")
    choice = _choose(*names, quant="q4_k_m")
    assert choice == FileChoice("gguf", "m-Q4_K_M.gguf", ("m-Q4_K_M.gguf",), (), "Q4_K_M")


def test_unknown_quant_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match="Q5_0") as caught:
        _choose("m-Q8_0.gguf", "m-Q4_0.gguf", quant="Q5_0")
    assert caught.value.hint == "it has Q4_0, Q8_0"
    with pytest.raises(UsageError) as caught:
        _choose("config.json", "model.safetensors", quant="Q5_0")
    assert "no GGUF files" in caught.value.hint


def test_quant_that_fits_two_files_lists_them() -> None:
    with pytest.raises(UsageError, match="2 GGUF files") as caught:
        _choose("a-Q4_0.gguf", "b-Q4_0.gguf", quant="Q4_0")
    assert "a-Q4_0.gguf" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_0.gguf"), "m-Q4_K_M.gguf"),
        (("m-Q8_0.gguf", "m-Q4_1.gguf", "m-Q4_0.gguf"), "m-Q4_0.gguf"),
        (("m-Q8_0.gguf", "m-Q4_1.gguf", "m-Q5_K_M.gguf"), "m-Q4_1.gguf"),
        (("m-Q8_0.gguf", "m-Q5_K_M.gguf"), "m-Q5_K_M.gguf"),
        (("m-Q8_0.gguf", "m-F16.gguf"), "m-Q8_0.gguf"),
        (("only.gguf", "README.md"), "only.gguf"),
        (("model.safetensors", "m-F16.gguf"), "m-F16.gguf"),
    ],
)
def test_default_quant(names: tuple[str, ...], expected: str) -> None:
    assert _choose(*names).main_file == expected


def test_many_files_without_a_preferred_quant_are_listed() -> None:
    with pytest.raises(UsageError) as caught:
        _choose("m-Q2_K.gguf", "m-F16.gguf")
    assert caught.value.hint == "name one of: F16, Q2_K"


def test_parts_of_a_quantisation_are_taken_together() -> None:
    parts = tuple(f"Q8_0/m-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    others = ("m-Q4_0.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf")
    choice = _choose(*others, parts[2], parts[0], parts[1], quant="q8_0")
    assert (choice.kind, choice.main_file, choice.weight_files) == ("gguf", parts[0], parts)
    assert choice.quant == "Q8_0"


def test_a_missing_part_is_named() -> None:
    with pytest.raises(CorruptModelError, match=r"m-Q8_0-00002-of-00003\.gguf is not beside it"):
        _choose("m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf", quant="Q8_0")
    with pytest.raises(CorruptModelError, match=r"and 6 more are not beside it"):
        _choose("m-Q8_0-00001-of-00010.gguf")


def test_two_models_in_parts_are_two() -> None:
    one = tuple(f"a-0000{number}-of-00002.gguf" for number in (1, 2))
    other = tuple(f"a-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    with pytest.raises(UsageError, match="2 GGUF files that fit") as caught:
        _choose(*one, *other)
    assert caught.value.hint == f"name one of: {one[0]}, {other[0]}"


def test_a_part_beyond_its_own_count_is_refused() -> None:
    for name in ("m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-99999.gguf"):
        with pytest.raises(UnsupportedModelError, match="up to 256 parts"):
            _choose(name)


def test_pickles_are_never_chosen() -> None:
    with pytest.raises(UnsupportedModelError, match="pickled") as caught:
        _choose("config.json", "pytorch_model.bin")
    assert "safetensors" in caught.value.hint


def test_what_is_missing_is_said() -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        _choose("model.safetensors")
    with pytest.raises(UnsupportedModelError, match="adapter"):
        _choose("adapter_config.json", "adapter_model.safetensors")
    with pytest.raises(UnknownModelError, match="holds no model"):
        _choose("README.md")


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", "c:x", "a\x00b", "a\nb", "./a", "a/.", "a.", "a "],
)
def test_unsafe_names(name: str) -> None:
    assert not is_safe_name(name)


@pytest.mark.parametrize("name", ["model.safetensors", "Q4/m-Q4_0.gguf", ".gitattributes", "a..b"])
def test_safe_names(name: str) -> None:
    assert is_safe_name(name)
