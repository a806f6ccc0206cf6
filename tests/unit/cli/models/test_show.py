"""`show` reads what a file says about its model, also of models that cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers

from shardcompute.cli.models import description
from shardcompute.models.spec import Experts, Layer, ModelSpec, Rope
from support.gguf.parts import split_gguf
from support.models.tiny_checkpoint import save_tiny_llama
from support.seeing.tiny_seeing import save_seeing

Cli = Callable[..., Any]
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
HIDDEN, LAYERS, HEADS, KV_HEADS, WIDE = 32, 2, 4, 2, 64


def _tensors() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (HIDDEN // 2, HIDDEN),
                "attn_v": (HIDDEN // 2, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (WIDE, HIDDEN),
                "ffn_up": (WIDE, HIDDEN),
                "ffn_down": (HIDDEN, WIDE),
            }.items()
        }
    return shapes


def _write(
    path: Path,
    *,
    architecture: str = "llama",
    chat_template: str | None = "{{ messages }}",
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b"])
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, shape in _tensors().items():
        if len(shape) == 1:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        else:
            raw = np.zeros(gguf.quant_shape_to_byte_shape(shape, matrices), np.uint8)
            writer.add_tensor(name, raw, raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_model_is_described(cli: Cli, tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf")
    shown = json.loads(cli("show", str(path), "--json").stdout)
    shapes = _tensors().values()
    assert shown["problem"] is None
    assert (shown["name"], shown["kind"], shown["file"]) == ("tiny", "gguf", str(path))
    assert shown["size_bytes"] == path.stat().st_size
    assert shown["has_chat_template"] is True
    shape = shown["shape"]
    assert (shape["family"], shape["layers"], shape["hidden"]) == ("llama", 2, 32)
    assert (shape["heads"], shape["kv_heads"], shape["head_dim"]) == (4, 2, 8)
    assert (shape["context_length"], shape["vocabulary"]) == (128, 257)
    assert shape["parameters"] == sum(int(np.prod(shape)) for shape in shapes)
    assert shape["notes"] == ["rope over all entries of a head, base 10,000", "the head shares the embedding"]
    counts = {kind["name"]: (kind["tensors"], kind["size_bytes"]) for kind in shown["weight_types"]}
    assert counts == {
        "F16": (15, 2 * sum(int(np.prod(s)) for s in shapes if len(s) == 2)),
        "F32": (5, 4 * sum(s[0] for s in shapes if len(s) == 1)),
    }
    per_token = 2 * 4 * 2 * 8 * 2
    assert shown["memory"]["kv_bytes_per_token"] == per_token
    # A page more than asked for is kept; 16 bits of the file are held as 32.
    assert shown["memory"]["kv_reserved_bytes"] == per_token * (128 + 64)
    assert shown["memory"]["held_weights_bytes"] > 1.4 * shown["memory"]["file_bytes"]


def test_what_blocks_are_held_as_is_said(cli: Cli, tmp_path: Path) -> None:
    """By every holder, for the types that the file has matrices of."""
    path = _write(tmp_path / "tiny.gguf", matrices=gguf.GGMLQuantizationType.IQ4_NL)
    kinds = {
        kind["name"]: kind["held"]
        for kind in json.loads(cli("show", str(path), "--json").stdout)["weight_types"]
    }
    assert kinds["F32"] == {}
    assert kinds["IQ4_NL"]["onnx/cpu"] == kinds["IQ4_NL"]["torch/cuda"] == "8-bit blocks of 32"
    assert kinds["IQ4_NL"]["torch/cpu"] == "32-bit numbers"
    assert kinds["IQ4_NL"]["llamacpp/any"] == "as the file has them"
    told = " ".join(cli("show", str(path)).stdout.split())
    assert "IQ4_NL: 15 tensors" in told
    assert "on a CPU in 8-bit blocks of 32" in told
    assert "--backend llamacpp runs the blocks as they are, in one stage or several file size" in told


def test_a_model_in_parts_is_described_as_one(cli: Cli, tmp_path: Path) -> None:
    whole = _write(tmp_path / "tiny.gguf")
    parts = split_gguf(whole, 3, tmp_path / "parts")
    shown = json.loads(cli("show", str(parts[1]), "--json").stdout)
    described = json.loads(cli("show", str(whole), "--json").stdout)
    assert shown["problem"] is None
    assert (shown["name"], shown["file"]) == ("tiny", str(parts[0]))
    assert shown["size_bytes"] == sum(part.stat().st_size for part in parts)
    for same in ("shape", "memory", "has_chat_template"):
        assert shown[same] == described[same]
    parts[2].unlink()
    result = cli("show", str(parts[0]))
    assert result.exit_code == 5
    assert parts[2].name in result.stderr


def test_description_for_people(cli: Cli, tmp_path: Path) -> None:
    result = cli("show", str(_write(tmp_path / "tiny.gguf", chat_template=None)))
    assert result.exit_code == 0
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert rows["layers"].strip() == "2"
    assert rows["context"].strip() == "128 tokens"
    assert rows["chat template"].strip() == "no"
    assert "cannot run" not in rows


def test_unsupported_architecture_is_described_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    path = str(_write(tmp_path / "new.gguf", architecture="mamba"))
    result = cli("show", path)
    assert result.exit_code == 0
    told = " ".join(result.stdout.split())
    assert "cannot run only llama.cpp can run the architecture mamba" in told
    assert "--backend llamacpp" in told
    shown = json.loads(cli("show", path, "--json").stdout)
    assert (shown["architecture"], shown["shape"]["layers"], shown["memory"]) == ("mamba", 2, None)
    assert [kind["name"] for kind in shown["weight_types"]] == ["F16", "F32"]
    assert shown["hint"]


def test_unsupported_folder_is_described_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file({"w": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    shown = json.loads(cli("show", str(tmp_path), "--json").stdout)
    assert shown["architecture"] == "bert"
    assert "bert" in shown["problem"]
    (kind,) = shown["weight_types"]
    assert (kind["name"], kind["tensors"], kind["size_bytes"]) == ("F32", 1, 16)
    assert shown["llamacpp"] == ""


def test_the_text_of_a_model_that_also_sees_is_described_and_images_are_not_promised(
    cli: Cli, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    plain = json.loads((folder / "config.json").read_text())
    seeing = {"model_type": "mistral3", "text_config": plain, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(seeing))
    shown = json.loads(cli("show", str(folder), "--json").stdout)
    assert (shown["problem"], shown["shape"]["family"]) == (None, "llama")
    assert any("images are not taken" in note for note in shown["shape"]["notes"])


def test_a_model_that_sees_says_so_and_counts_its_tower(cli: Cli, tmp_path: Path) -> None:
    folder, words = save_seeing("qwen2_5_vl", tmp_path / "seeing"), save_tiny_llama(tmp_path / "words")
    (folder / "tokenizer.json").write_bytes((words / "tokenizer.json").read_bytes())
    shown = json.loads(cli("show", str(folder), "--json").stdout)
    assert any("takes images of up to 30 tokens each" in note for note in shown["shape"]["notes"])
    stored = load_file(folder / "model.safetensors")
    assert shown["memory"]["file_bytes"] == sum(values.nbytes for values in stored.values())
    tower = sum(values.nbytes for name, values in stored.items() if "visual" in name)
    blind = json.loads((folder / "config.json").read_text())
    blind["vision_config"]["an_unknown_field"] = 3
    (folder / "config.json").write_text(json.dumps(blind))
    text = json.loads(cli("show", str(folder), "--json").stdout)
    assert any("images are not taken" in note for note in text["shape"]["notes"])
    assert shown["memory"]["file_bytes"] - text["memory"]["file_bytes"] == tower
    assert shown["memory"]["held_weights_bytes"] - text["memory"]["held_weights_bytes"] > tower


def test_number_format_that_no_kernel_takes_is_a_problem(
    cli: Cli,
    tmp_path: Path,
) -> None:
    path = _write(tmp_path / "tiny.gguf")
    raw = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8  # behind the rank and the two sizes lies the type
    assert raw[at : at + 4] == (1).to_bytes(4, "little")
    path.write_bytes(raw[:at] + int(gguf.GGMLQuantizationType.I16).to_bytes(4, "little") + raw[at + 4 :])
    shown = json.loads(cli("show", str(path), "--json").stdout)
    assert "I16 numbers, which cannot be run" in shown["problem"]
    assert shown["shape"]["layers"] == 2


def test_damaged_file_is_an_error(cli: Cli, tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:100])
    result = cli("show", str(path))
    assert (result.exit_code, result.stdout) == (5, "")


def test_missing_model_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert cli("show", str(tmp_path / "none.gguf")).exit_code == 3


def test_what_is_special_is_noted() -> None:
    spec = ModelSpec(
        family="odd",
        layers=(Layer(window=16), Layer(rope=None, is_sparse=True), Layer(rope=1, window=16)),
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=64,
        vocab_size=10,
        context_length=64,
        ropes=(Rope((1.0, 0.1)), Rope((1.0, 0.1, 0.02, 0.001), amplitude=1.25)),
        norm_eps=1e-6,
        attention_scale=0.5,
        qk_norm="head",
        logit_softcap=30.0,
        has_sinks=True,
        experts=Experts(8, 2, 16),
    )
    assert description._notes(spec) == [
        "rope over 4 of 8 entries of a head, base 100",
        "rope over all entries of a head, scaled, amplitude 1.25",
        "1 of 3 layers do not rotate",
        "2 of 3 layers see 16 positions",
        "1 of 3 layers have 8 experts, 2 per token",
        "queries and keys are normalised",
        "scores are capped",
        "attention has sinks",
    ]
