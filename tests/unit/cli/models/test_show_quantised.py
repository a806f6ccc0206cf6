"""`show` of quantised checkpoints: the method, what its weights are held as, and what of it is not done here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.models.tiny_checkpoint import save_tiny_llama
from support.quantised.checkpoint import quantise_folder

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("form", "label", "held"),
    [
        ("gptq4", "GPTQ4_32", "4-bit blocks of 32"),
        ("gptq4-asymmetric", "GPTQ4_32", "4-bit blocks of 32 with shifts"),
        ("gptq4-ordered", "GPTQ4_32", "32-bit numbers"),
        ("awq", "AWQ4_32", "4-bit blocks of 32 with shifts"),
        ("int8", "INT8_64", "8-bit blocks of 32"),
        ("fp8-blocks", "F8_E4M3_24x40", "32-bit numbers"),
        ("nf4-nested", "NF4_64", "32-bit numbers"),
        ("nvfp4", "NVFP4", "8-bit blocks of 16"),
    ],
)
def test_show_says_what_weights_become(cli: Cli, form: str, label: str, held: str, tmp_path: Path) -> None:
    folder, _ = quantise_folder(save_tiny_llama(tmp_path / "plain"), tmp_path, form)
    shown = json.loads(cli("show", str(folder), "--json").stdout)
    assert shown["problem"] is None
    kinds = {kind["name"]: kind for kind in shown["weight_types"]}
    assert kinds[label]["held"]["onnx/cpu"] == held
    assert kinds[label]["held"]["torch/cpu"] == "32-bit numbers"
    stored = sum(kind["size_bytes"] for kind in kinds.values())
    assert 0 <= (folder / "model.safetensors").stat().st_size - stored < 64 << 10


def test_show_says_that_activations_are_not_rounded(cli: Cli, tmp_path: Path) -> None:
    plain = save_tiny_llama(tmp_path / "plain")
    folder, _ = quantise_folder(plain, tmp_path, "fp8-tensor")
    told = " ".join(cli("show", str(folder)).stdout.split())
    assert "fp8; activations are not rounded" in told
    assert "F8_E4M3_TENSOR: 42 tensors" in told
    folder, _ = quantise_folder(plain, tmp_path, "awq")
    assert json.loads(cli("show", str(folder), "--json").stdout)["quantisation"] == "awq"


def test_show_says_why_a_method_is_refused(cli: Cli, tmp_path: Path) -> None:
    folder, _ = quantise_folder(save_tiny_llama(tmp_path / "plain"), tmp_path, "awq")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"awq"', '"aqlm"'))
    shown = json.loads(cli("show", str(folder), "--json").stdout)
    assert "'aqlm' cannot be run here" in shown["problem"]
    assert "gptq" in shown["hint"]
    assert "GGUF" in shown["hint"]
