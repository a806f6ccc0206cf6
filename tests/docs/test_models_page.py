"""The page of models is what the tests prove today, and README promises nothing beyond it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardcompute.models.families import GGUF_ARCHITECTURES
from shardcompute.models.families.hf_families import HF_FALLBACKS, HF_FAMILIES, HF_SEEING
from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS
from shardcompute.weights.quantised.schemes import METHODS

ROOT = Path(__file__).parents[2]
# What README calls a family, and the families that it means.
PROMISED = {
    "Llama to 4": ("llama", "llama4_text"),
    "Mistral to Small 3 and Ministral 3": ("mistral", "mistral3", "ministral3"),
    "Mixtral": ("mixtral",),
    "Qwen 2 and 3 with and without experts": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    "DeepSeek V2, V3 and R1": ("deepseek_v2", "deepseek_v3"),
    "Kimi K2": ("kimi_k2",),
    "GLM-4 to 4.6": ("glm", "glm4", "glm4_moe"),
    "Gemma 2 and 3": ("gemma2", "gemma3_text"),
    "Phi-3 and 4": ("phi3",),
    "gpt-oss": ("gpt_oss",),
    "Command-R and A": ("cohere", "cohere2"),
    "Granite 3 and 4 without recurrent layers": (
        "granite",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
    ),
    "OLMo-2, OLMo-3 and OLMoE": ("olmo2", "olmo3", "olmoe"),
    "EXAONE 4": ("exaone4",),
    "ERNIE 4.5": ("ernie4_5", "ernie4_5_moe"),
    "MiniMax-M2": ("minimax_m2",),
    "Seed-OSS": ("seed_oss",),
    "HunYuan": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "Nemotron": ("nemotron",),
    "dots.llm1": ("dots1",),
    "Arcee": ("arcee",),
    "SmolLM3": ("smollm3",),
    "(Mistral 3, Llama 4, Qwen3-VL)": ("mistral3", "llama4", "qwen3_vl"),
}
CONNECTING = {"Any", "From", "What", "GGUF", "GPTQ", "AWQ", "FP8", "MXFP4", "MLX"}


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    page = (ROOT / "docs" / "models.md").read_text()
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]


def named(cell: str) -> str:
    return cell.split("`")[1] if "`" in cell else cell


def test_the_page_is_what_the_tests_prove() -> None:
    script = ROOT / "scripts" / "models_table.py"
    ended = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_family_has_a_parity_case(rows: list[list[str]]) -> None:
    proven = {named(row[0]) for row in rows if row[1] == "safetensors" and row[2:6] == ["exact"] * 4}
    assert proven >= set(HF_FAMILIES) | set(HF_SEEING)
    architectures = {
        named(row[1]) for row in rows if row[1].startswith("GGUF ") and row[2:6] == ["exact"] * 4
    }
    assert architectures == set(GGUF_ARCHITECTURES)


def test_every_format_and_every_fallback_is_listed(rows: list[list[str]]) -> None:
    first = {row[0] for row in rows}
    assert first >= {f"GGUF {name}" for name in BLOCK_LAYOUTS}
    assert {named(each) for each in first} >= set(HF_FALLBACKS) | set(METHODS)


def test_nothing_is_exact_without_a_test_that_exists(rows: list[list[str]]) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "parity").rglob("test_*.py"))
    exact = [row for row in rows if any(cell.startswith("exact") for cell in row)]
    assert len(exact) > 100
    for row in exact:
        proofs = re.findall(r"`(test_\w+)`", row[-1])
        assert proofs, row
        assert all(f"def {proof}(" in tests for proof in proofs)


def test_readme_names_only_what_is_in_the_table(rows: list[list[str]]) -> None:
    bullet = (ROOT / "README.md").read_text().partition("- **Any model")[2].partition("\n- **")[0]
    text = " ".join(bullet.split())
    assert "(docs/models.md)" in text
    exact = {named(row[0]) for row in rows if "exact" in row}
    for phrase, families in PROMISED.items():
        assert phrase in text
        assert set(families) <= exact, phrase
        text = text.replace(phrase, "", 1)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    assert set(re.findall(r"\b[A-Z][\w.-]*\b", text)) <= CONNECTING
