"""PEFT LoRA folders: what is read of them, and what is refused before anything large is."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from shardcompute.core.errors import CorruptModelError, ShardComputeError, UnsupportedModelError, UsageError
from shardcompute.models.spec import Stage
from shardcompute.weights.adapter_pack import (
    adapter_attachments,
    adapter_names,
    adapter_tensors,
    served_adapters,
)
from shardcompute.weights.adapters import Adapter, stage_adapters
from shardcompute.weights.attached import AttachedTensors
from shardcompute.weights.card import make_card
from shardcompute.weights.checkpoint import Checkpoint, adapted
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import open_tiny
from support.tiny_adapter import base_tensors, save_adapter

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


def read(base: Path, folder: Path) -> Adapter:
    with adapted(open_tiny(base), {"own": folder}, None) as checkpoint:
        return checkpoint.adapters[0]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "trained biases"),
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "base that was changed first"),
        ({"target_modules": ["q_proj", "query_key_value"]}, "query_key_value"),
        ({"r": 10**9}, "ranks up to"),
        ({"r": -1}, "no number for a rank"),
        ({"r": 5}, "config and base call for"),
        ({"lora_alpha": "1e400"}, "no scale"),
        ({"rank_pattern": {"(a+)+$": 4}}, "only names of modules"),
        ({"layers_to_transform": [0]}, "has besides its config"),
        ({"target_modules": ["q_proj"]}, "has besides its config"),
    ],
)
def test_configs_that_mean_something_else_are_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder = save_adapter(base, tmp_path / "adapter", config=config)
    with pytest.raises((UnsupportedModelError, CorruptModelError), match=told):
        read(base, folder)


def _drop(tensors: dict[str, Any]) -> None:
    del tensors[FIRST]


def _drop_layer(tensors: dict[str, Any]) -> None:
    for name in [each for each in tensors if ".layers.3." in each]:
        del tensors[name]


def _rename(tensors: dict[str, Any]) -> None:
    tensors[FIRST.replace("layers.0", "layers.77")] = tensors.pop(FIRST)


def _magnitude(tensors: dict[str, Any]) -> None:
    tensors[FIRST.replace("lora_A.weight", "lora_magnitude_vector")] = np.ones(4, dtype=np.float32)


def _wide(tensors: dict[str, Any]) -> None:
    tensors[FIRST] = np.zeros((4, 999), dtype=np.float32)


def _whole_numbers(tensors: dict[str, Any]) -> None:
    tensors[FIRST] = tensors[FIRST].astype(np.int32)


def _endless(tensors: dict[str, Any]) -> None:
    tensors[FIRST] = tensors[FIRST] * np.inf


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_drop, "has only lora_B"),
        (_drop_layer, "lacks .* of layer 3"),
        (_rename, "has only lora_"),
        (_magnitude, "DoRA"),
        (_wide, "config and base call for"),
        (_whole_numbers, "I32"),
        (_endless, "numbers that are none"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(base: Path, tmp_path: Path, change: Change, told: str) -> None:
    folder = save_adapter(base, tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    with np.errstate(invalid="ignore"):
        safetensors.numpy.save_file(tensors, path)
    with pytest.raises((UnsupportedModelError, CorruptModelError), match=told):
        read(base, folder)


def test_a_file_that_claims_a_huge_rank_is_refused_before_it_is_read(base: Path, tmp_path: Path) -> None:
    """The file is as large as it says, and empty: reading it would take all of that."""
    folder = save_adapter(
        base, tmp_path / "adapter", targets=("q_proj",), config={"r": 1 << 20, "layers_to_transform": [0]}
    )
    width = base_tensors(base)["model.layers.0.self_attn.q_proj.weight"].shape[1]
    shape, size = [1 << 20, width], 4 * (1 << 20) * width
    other = [width, 1 << 20]
    names = {FIRST: shape, FIRST.replace("lora_A", "lora_B"): other}
    header: dict[str, Any] = {}
    for index, (name, each) in enumerate(names.items()):
        header[name] = {"dtype": "F32", "shape": each, "data_offsets": [index * size, (index + 1) * size]}
    encoded = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + 2 * size)
    tracemalloc.start()
    with pytest.raises(UnsupportedModelError, match="ranks up to"):
        read(base, folder)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"peft_type": "LORA"}', b" " * (2 << 20)]
)
def test_a_config_that_is_none_is_refused(base: Path, tmp_path: Path, content: bytes) -> None:
    folder = save_adapter(base, tmp_path / "adapter")
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(ShardComputeError):
        read(base, folder)


def test_folders_without_files_say_what_is_missing(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no adapter_config\.json"):
        read(base, tmp_path)
    folder = save_adapter(base, tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no adapter_model\.safetensors"):
        read(base, folder)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a:b", "x" * 65, "a b", "@a"])
def test_names_are_plain(base: Path, tmp_path: Path, name: str) -> None:
    folder = save_adapter(base, tmp_path / "adapter")
    with pytest.raises(UsageError, match="no name for an adapter"), open_tiny(base) as checkpoint:
        checkpoint.with_adapters({name: folder})


def test_ranks_and_scales_may_differ_by_module(base: Path, tmp_path: Path) -> None:
    patterns = {"alpha_pattern": {"layers.1.self_attn.q_proj": 40}, "use_rslora": True}
    folder = save_adapter(base, tmp_path / "adapter", alpha=10, targets=("q_proj",), config=patterns)
    stored = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    adapter = read(base, folder)
    for layer, scale in ((0, 5.0), (1, 20.0)):
        up = stored[FIRST.replace("layers.0", f"layers.{layer}").replace("lora_A", "lora_B")]
        np.testing.assert_allclose(adapter.modules[layer][0].added.up, up * scale, rtol=1e-6)


def test_each_layer_travels_by_itself(base: Path, tmp_path: Path) -> None:
    folders = {
        "b": save_adapter(base, tmp_path / "b", seed=1),
        "a": save_adapter(base, tmp_path / "a", seed=2, layers=(1, 4)),
    }
    with open_tiny(base).with_adapters(folders) as checkpoint:
        attached = AttachedTensors(checkpoint.tensors, adapter_attachments(checkpoint.adapters))
        assert adapter_names(attached.entries) == ("a", "b")
        card = _card(checkpoint, attached)
        assert len(adapter_tensors(card.entries, 0)) == 1
        assert len(adapter_tensors(card.entries, 4)) == 2
        stage = Stage(3, 5, checkpoint.spec.layer_count)
        assert len(card.stage_adapters(stage)) == 3
        assert card.stage_bytes(stage) > sum(
            card.entries[name].size_bytes for name in card.stage_tensors(stage)
        )
        there = served_adapters(attached, checkpoint.layout, stage)
        here = stage_adapters(checkpoint.adapters, stage)
    assert there.names == here.names == ("a", "b")
    for layer in range(3, 5):
        for ours, theirs in zip(here.layers[layer], there.layers[layer], strict=True):
            assert ours.keys() == theirs.keys()
            for name, matrix in ours.items():
                np.testing.assert_array_equal(matrix.down, theirs[name].down)
                np.testing.assert_array_equal(matrix.up, theirs[name].up)


def _card(checkpoint: Checkpoint, attached: AttachedTensors) -> Any:
    return make_card("tiny", checkpoint.spec, checkpoint.layout, attached.entries, content="x")


def test_what_travelled_wrongly_is_refused(base: Path, tmp_path: Path) -> None:
    with open_tiny(base) as checkpoint:
        attached = AttachedTensors(checkpoint.tensors, {"adapter/own/0": b"\x93\x01\x02\x03"})
        with pytest.raises(CorruptModelError, match="does not fit layer 0"):
            served_adapters(attached, checkpoint.layout, Stage(0, 1, checkpoint.spec.layer_count))
