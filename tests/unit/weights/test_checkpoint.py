"""Models opened from folders and files: the same tensors from each kind, and every lie found before it is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from shardcompute.core.errors import (
    CorruptModelError,
    ShardComputeError,
    UnknownModelError,
    UnsupportedModelError,
)
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, whole
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import MemoryBytes, ModelFiles, resolve

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}

Tensors = dict[str, NDArray[np.float32]]


def llama_tensors() -> Tensors:
    random = np.random.default_rng(11)
    shapes = {"model.embed_tokens": (40, 64), "lm_head": (40, 64), "model.norm": (64,)}
    for i in range(3):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (64,),
            f"{layer}.post_attention_layernorm": (64,),
            f"{layer}.self_attn.q_proj": (64, 64),
            f"{layer}.self_attn.k_proj": (32, 64),
            f"{layer}.self_attn.v_proj": (32, 64),
            f"{layer}.self_attn.o_proj": (64, 64),
            f"{layer}.mlp.gate_proj": (96, 64),
            f"{layer}.mlp.up_proj": (96, 64),
            f"{layer}.mlp.down_proj": (64, 96),
        }
    return {f"{name}.weight": random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def write_config(folder: Path, **changes: Any) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def write_single(folder: Path, tensors: Tensors | None = None) -> Path:
    write_config(folder)
    save_file(tensors or llama_tensors(), folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    write_config(folder)
    tensors = llama_tensors()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:11], names[11:20], names[20:]), start=1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_gguf(folder: Path) -> Path:
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in _KEYS.items():
        writer.add_uint32(f"llama.{key}", CONFIG[field])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, values in llama_tensors().items():
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:  # rotary halves become pairs
                values = values.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def files_of(path: Path) -> ModelFiles:
    return resolve(parse_reference(str(path)), Settings(data_dir=path.parent / "unused"))


def load_all(path: Path) -> Tensors:
    """Every tensor that a shard of the whole model asks for, by our names."""
    with open_checkpoint(files_of(path)) as checkpoint:
        source = checkpoint.source(whole(checkpoint.spec))
        loaded: Tensors = {}
        for layer, places in [(None, checkpoint.layout.model), *enumerate(checkpoint.layout.layers)]:
            for name, place in places.items():
                is_matrix = len(place.shape) == 2
                values = source.matrix(name, layer).to_dense() if is_matrix else source.vector(name, layer)
                assert values.shape == place.shape
                loaded[f"{layer} {name}"] = values
        return loaded


@pytest.mark.parametrize("write", [write_sharded, write_gguf])
def test_every_kind_of_file_gives_the_same_tensors(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    folders = [tmp_path / "single", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    expected = load_all(write_single(folders[0]))
    loaded = load_all(write(folders[1]))
    assert len(expected) == len(llama_tensors())
    assert loaded.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)


@pytest.mark.parametrize("write", [write_single, write_sharded, write_gguf])
def test_spec_and_bytes_of_stages(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    with open_checkpoint(files_of(write(tmp_path))) as checkpoint:
        spec = checkpoint.spec
        assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (64, 4, 2, 16)
        assert (spec.layer_count, spec.vocab_size, spec.context_length) == (3, 40, 128)
        layer = 4 * (2 * 64 + 64 * (64 + 32 + 32 + 64 + 3 * 96))
        ends = 4 * 40 * 64
        assert checkpoint.stage_bytes(Stage(1, 2, 3)) == layer
        assert checkpoint.stage_bytes(Stage(0, 1, 3)) == layer + ends
        assert checkpoint.stage_bytes(Stage(2, 3, 3)) == layer + ends + 4 * 64
        assert checkpoint.stage_bytes(whole(spec)) == 3 * layer + 2 * ends + 4 * 64


def test_shards_are_opened_when_they_are_needed_and_once(tmp_path: Path) -> None:
    opened: list[str] = []
    files = files_of(write_sharded(tmp_path))

    def counting(name: str) -> Callable[[], Any]:
        def open_file() -> Any:
            opened.append(name)
            return files.open(name)

        return open_file

    counted = replace(files, files={name: counting(name) for name in files.files})
    with open_checkpoint(counted) as checkpoint:
        assert [name for name in opened if name.endswith("safetensors")] == [], "names come from the index"
        source = checkpoint.source(Stage(1, 2, 3))
        headers = len(opened)
        source.matrix("attention.q", 1)
        assert len(opened) == headers, "no file is opened twice"


# Files that are missing or damaged


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_single(tmp_path)
    files = files_of(tmp_path)
    without = {name: opener for name, opener in files.files.items() if name != "config.json"}
    with pytest.raises(CorruptModelError, match=r"no config\.json"):
        open_checkpoint(replace(files, files=without))
    with open_checkpoint(files) as checkpoint, pytest.raises(CorruptModelError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnknownModelError, match=r"model\.safetensors"):
        open_checkpoint(files)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    files = files_of(write_sharded(tmp_path))
    lost = "model-00002-of-00003.safetensors"
    (tmp_path / lost).unlink()
    with pytest.raises(ShardComputeError, match=lost):
        files_of(tmp_path)
    with open_checkpoint(files) as checkpoint, pytest.raises(UnknownModelError, match=lost):
        checkpoint.source(whole(checkpoint.spec))
    remaining = {name: opener for name, opener in files.files.items() if name != lost}
    partial = replace(files, files=remaining)
    with open_checkpoint(partial) as checkpoint, pytest.raises(CorruptModelError, match=f"lacks {lost}"):
        checkpoint.source(whole(checkpoint.spec))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"llama"', "[" * 100_000])
def test_a_config_that_is_no_object_is_corrupt(tmp_path: Path, text: str) -> None:
    write_single(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        open_checkpoint(files_of(tmp_path))


@pytest.mark.parametrize("write", [write_single, write_gguf])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.3, 0.999])
def test_files_that_are_cut_short_are_refused(
    tmp_path: Path, write: Callable[[Path], Path], kept: float
) -> None:
    path = write(tmp_path)
    weights = path if path.is_file() else path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CorruptModelError) as raised:
        open_checkpoint(files_of(path))
    assert weights.name in raised.value.message
    assert raised.value.hint


def test_a_shard_that_is_cut_short_is_refused_by_the_stage_that_needs_it(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with (
        open_checkpoint(files_of(tmp_path)) as checkpoint,
        pytest.raises(CorruptModelError, match=r"00002-of-00003.*cut short"),
    ):
        checkpoint.source(whole(checkpoint.spec))


# Configs that lie


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "64"),
        ({"hidden_size": 32}, "64"),
        ({"intermediate_size": 192}, "192"),
        ({"vocab_size": 80}, "80"),
        ({"vocab_size": 39}, "39"),
        ({"num_key_value_heads": 1}, "16×64"),
        ({"num_key_value_heads": 4}, "64×64"),
        ({"num_attention_heads": 8}, "16×64"),
        ({"head_dim": 8}, "32×64"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3"),
        ({"attention_bias": True}, r"q_proj\.bias"),
    ],
)
def test_sizes_that_the_weights_do_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_single(tmp_path)
    write_config(tmp_path, **changes)
    with pytest.raises(CorruptModelError, match=message):
        load_all(tmp_path)


def test_tensors_that_the_model_does_not_have(tmp_path: Path) -> None:
    write_single(tmp_path)
    write_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.2"):
        open_checkpoint(files_of(tmp_path))
    write_single(tmp_path, llama_tensors() | {"model.layers.0.adapter.weight": np.zeros(4, np.float32)})
    with pytest.raises(UnsupportedModelError, match="adapter"):
        open_checkpoint(files_of(tmp_path))


def test_a_fused_matrix_is_not_cut_at_the_wrong_rows(tmp_path: Path) -> None:
    """With fewer key heads than the weights have, every part would still be found inside the fused matrix."""
    stored = llama_tensors()
    tensors = {name: values for name, values in stored.items() if "_proj" not in name}
    for i in range(3):
        layer = f"model.layers.{i}"
        fused = {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
        for name, parts in fused.items():
            tensors[f"{layer}.{name}.weight"] = np.concatenate([stored[f"{layer}.{p}.weight"] for p in parts])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{layer}.{name}.weight"] = stored[f"{layer}.{name}.weight"]
    write_single(tmp_path, tensors)
    write_config(tmp_path, model_type="phi3")
    assert np.array_equal(
        load_all(tmp_path)["1 attention.v"], stored["model.layers.1.self_attn.v_proj.weight"]
    )
    write_config(tmp_path, model_type="phi3", num_key_value_heads=1)
    with pytest.raises(CorruptModelError, match=r"qkv_proj.*128×64.*96×64"):
        load_all(tmp_path)


# Closing


@pytest.mark.parametrize("is_good", [True, False])
def test_files_are_closed_with_the_checkpoint_or_when_it_cannot_be_opened(
    tmp_path: Path, is_good: bool
) -> None:
    write_single(tmp_path)
    if not is_good:
        write_config(tmp_path, num_hidden_layers=9)
    closed: list[str] = []

    class Watched(MemoryBytes):
        def close(self) -> None:
            closed.append(self.name)

    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    files = replace(
        files_of(tmp_path),
        files={name: lambda name=name: Watched(name, contents[name]) for name in contents},
        on_close=lambda: closed.append("all"),
    )

    def use() -> Checkpoint:
        with open_checkpoint(files) as checkpoint:
            assert "all" not in closed
            return checkpoint

    if is_good:
        use()
    else:
        with pytest.raises(CorruptModelError, match="lacks"):
            use()
    assert closed.count("all") == 1
    assert set(closed) == {"all", *contents}
