"""Writes docs/models.md: which families and formats run on which backend, with the test that proves it.

Families, architectures, block types and forms are the tables that the code itself reads; what is called exact is what a
collected test compares on that very backend (`PROOFS`). `--check` only compares. Needs the development environment.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))

_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
BACKENDS = ("onnx", "torch", "mlx", "numpy", "llamacpp", "transformers")
_OPENING = """\
# Models: families, formats, backends

Made by `python scripts/models_table.py` from the code's own tables and from the tests that prove them; a test holds
this page to both. `shardcompute show MODEL` says the same of one model.

- **exact**: the test in the last column compares logits on this backend with those of `transformers` (or, for
  blocks, with the same numbers in float32). On CPUs, ONNX Runtime and llama.cpp round activations to 8 bits beside
  blocks, whatever the format ([limits](limits.md)).
- **converted into …**: weights are held as something else than the file has, named here. CUDA and Apple GPUs compute
  in 16 bits, which rounds what is wider.
- **as stored**: llama.cpp computes with the file's own blocks; logits are compared for the architecture `llama` alone.
- **not compared**: it is run, and no test of ours compares it.
- **refused**: with the reason, below each table or in it.

Any family runs in any format that can hold it: a family is proven in plain numbers, a format on one family and more
where the layout differs."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A test, what its parameters name, and the backends it compares where no parameter says so."""

    file: str
    test: str
    subject: str
    backends: tuple[str, ...] = ()
    case: str = "name"
    """The parameter that names the case; of a test without parameters, the case itself."""


PROOFS = (
    Proof("test_families_parity.py", "test_logits_of_transformers", "family"),
    Proof("test_families_parity.py", "test_text_of_models_that_also_see", "family"),
    Proof("test_families_parity.py", "test_gguf_gives_the_same_logits", "architecture"),
    Proof("test_transformers_fallback.py", "test_whole_and_cut_models_give_the_same_logits", "fallback",
          ("transformers",), "folder"),
    Proof("test_transformers_fallback.py", "test_models_whose_layers_share_more_than_rows_need_one_machine", "fallback",
          ("transformers",), "Gemma3nText"),
    Proof("test_gguf_types.py", "test_each_type_runs_with_its_own_numbers", "block", ("onnx", "torch", "mlx"),
          "dtype"),
    Proof("test_llamacpp_backend.py", "test_agrees_with_our_own_kernels", "block", ("llamacpp",), "checkpoint"),
    Proof("test_quantised_checkpoints.py", "test_every_form_gives_the_logits_of_transformers", "form", ("numpy",),
          "form"),
    Proof("test_quantised_checkpoints.py", "test_every_backend_gives_the_logits_of_transformers", "form", (), "form"),
    Proof("test_quantised_checkpoints.py", "test_gpt_oss_runs_whole_on_every_backend", "mxfp4"),
    Proof("seeing/test_pictures.py", "test_logits_of_transformers_with_pictures", "pictures"),
    Proof("test_mlx_checkpoints.py", "test_every_backend_gives_the_logits_of_transformers", "mlx", (), "folders"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One collected test of `proof`: of which case, on which backends."""

    proof: Proof
    name: str
    backends: tuple[str, ...]


def collect_cases() -> list[Case]:
    """What pytest finds for `PROOFS`; nothing is run. RuntimeError where a named test is gone."""
    found: list[Any] = []

    class Collector:
        def pytest_collection_finish(self, session: Any) -> None:
            found.extend(session.items)

    files = sorted({str(ROOT / "tests" / "parity" / proof.file) for proof in PROOFS})
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", *_QUIET, f"--rootdir={ROOT}", *files],
            [Collector()],
        )
    if code != 0:
        raise RuntimeError(f"the tests cannot be collected:\n{said.getvalue()}")
    by_name = {(Path(proof.file).name, proof.test): proof for proof in PROOFS}
    cases = []
    for item in found:
        proof = by_name.get((item.path.name, item.originalname))
        if proof is not None:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            backends = proof.backends or (parameters["backend"],)
            name = str(parameters.get(proof.case, "")) if parameters else proof.case
            cases.append(Case(proof, name, backends))
    if missing := set(PROOFS) - {case.proof for case in cases}:
        raise RuntimeError(f"no such tests: {', '.join(sorted(proof.test for proof in missing))}")
    return cases


class Evidence:
    """Which tests prove a subject on a backend, by the name of the case or what the case stands for."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = list(cases)

    def names(self, subject: str) -> set[str]:
        return {case.name for case in self._cases if case.proof.subject == subject}

    def of(self, subject: str, names: Iterable[str]) -> dict[str, list[Case]]:
        wanted, found = set(names), {}
        for case in self._cases:
            if case.proof.subject == subject and case.name in wanted:
                for backend in case.backends:
                    found.setdefault(backend, []).append(case)
        return found


def told(proofs: Mapping[str, Sequence[Case]]) -> str:
    """The tests' names, each with its cases."""
    by_test: dict[str, dict[str, None]] = {}
    for cases in proofs.values():
        for case in cases:
            by_test.setdefault(case.proof.test, {})[case.name] = None
    return "; ".join(
        f"`{test}` ({', '.join(filter(None, names)) or 'gpt-oss'})" for test, names in by_test.items()
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cases_of_families() -> dict[str, list[str]]:
    """Names of the tiny configurations by the `model_type` that their file names, also that of a text part."""
    from shardcompute.models.families.hf_families import HF_FAMILIES, HF_SEEING
    from support.models.tiny import FAMILIES, SEEING

    found: dict[str, list[str]] = {}
    for name, make in {**FAMILIES, **SEEING}.items():
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = make().model_type
        found.setdefault(kind, []).append(name)
    for seeing, text in HF_SEEING.items():
        found.setdefault(text, []).extend(found.get(seeing, ()))
    # Names for the same data are proven together.
    for kind, family in HF_FAMILIES.items():
        if kind not in found or not found[kind]:
            found[kind] = [
                name for other, names in found.items() if HF_FAMILIES.get(other) is family for name in names
            ]
    for seeing, text in HF_SEEING.items():
        found.setdefault(seeing, found[text])
    return found


def family_rows(evidence: Evidence) -> Iterator[tuple[str, ...]]:
    """Of every family of `HF_FAMILIES` from safetensors, and from GGUF where an architecture holds it."""
    from shardcompute.models.families.hf_families import HF_FAMILIES, HF_SEEING
    from support.models.tiny_gguf import ARCHITECTURES

    cases = cases_of_families()
    for kind in sorted({**HF_FAMILIES, **HF_SEEING}):
        proofs = evidence.of("family", cases[kind])
        also = " (text part)" if kind in HF_SEEING else ""
        yield _row(f"`{kind}`{also}", "safetensors", proofs, {"llamacpp": "refused"})
        names = [name for name in cases[kind] if name in ARCHITECTURES]
        for architecture in sorted({ARCHITECTURES[name] for name in names}):
            own = [name for name in names if ARCHITECTURES[name] == architecture]
            proofs = evidence.of("architecture", own)
            yield _row(
                f"`{kind}`",
                f"GGUF `{architecture}`",
                proofs,
                {"llamacpp": "as stored", "transformers": "refused"},
            )


def picture_rows(evidence: Evidence) -> Iterator[tuple[str, ...]]:
    """Of every model that also sees: whether its tower runs."""
    from shardcompute.models.families.hf_families import HF_SEEING
    from shardcompute.models.vision.families import VISION_FAMILIES

    refused = dict.fromkeys(BACKENDS, "refused")
    for kind in sorted(HF_SEEING):
        yield _row(
            f"`{kind}`", "safetensors", evidence.of("pictures", [kind] * (kind in VISION_FAMILIES)), refused
        )


def _row(
    name: str, form: str, proofs: Mapping[str, Sequence[Case]], others: Mapping[str, str]
) -> tuple[str, ...]:
    def verdict(backend: str) -> str:
        return "exact" if backend in proofs else others.get(backend, "not compared")

    return (name, form, *map(verdict, BACKENDS), told(proofs))


def fallback_rows(evidence: Evidence) -> Iterator[tuple[str, ...]]:
    import transformers

    from shardcompute.models.families.hf_families import HF_FALLBACKS, HF_FAMILIES

    case_names = evidence.names("fallback")
    by_kind = {
        getattr(transformers, f"{name}Config").model_type.removesuffix("_text"): name for name in case_names
    }
    for kind, why in sorted(HF_FALLBACKS.items()):
        proofs = evidence.of("fallback", [by_kind[kind]] if kind in by_kind else [])
        verdict = "exact" if proofs else "not compared"
        yield f"`{kind}`", f"refused because it {why}", verdict, told(proofs)
    for kind in sorted(set(by_kind) - set(HF_FALLBACKS) - set(HF_FAMILIES)):
        proofs = evidence.of("fallback", [by_kind[kind]])
        yield f"`{kind}`", "refused because no family of ours reads it", "exact", told(proofs)


HOLDERS = {
    "onnx/cpu": "onnx",
    "torch/cpu": "torch",
    "mlx/cpu": "mlx",
    "torch/cuda": "",
    "mlx/gpu": "",
    "llamacpp/any": "llamacpp",
}
"""The columns of formats, and the backend whose tests prove them; those on GPUs are never called exact."""


def format_row(
    name: str, form: Any, proofs: Mapping[str, Sequence[Case]], *, is_gguf: bool
) -> tuple[str, ...]:
    from shardcompute.weights.held import held_in_words

    words = held_in_words(form)

    def verdict(holder: str) -> str:
        if holder == "llamacpp/any":
            return "as stored" if is_gguf else "refused"
        held = words[holder]
        if HOLDERS[holder] in proofs:
            return "exact" if held == form.words else f"exact, in {held}"
        if not HOLDERS[holder] and held == form.words:
            return "converted into the same codes with scales of 16 bits"
        return f"converted into {held}"

    return (name, *map(verdict, HOLDERS), told(proofs))


def format_rows(evidence: Evidence) -> Iterator[tuple[str, ...]]:
    from shardcompute.backends.footprint import MatrixForm
    from shardcompute.weights.formats.gguf_blocks import BLOCK_LAYOUTS

    for name, layout in BLOCK_LAYOUTS.items():
        form = MatrixForm(layout.bits, layout.block_size, layout.has_shifts)
        yield format_row(f"GGUF {name}", form, evidence.of("block", [name]), is_gguf=True)
    from support.quantised.checkpoint import FORMS

    with tempfile.TemporaryDirectory() as folder:
        for name, form in quantised_forms(Path(folder)):
            method = FORMS[name].config.get("quant_method", "bitsandbytes")
            yield format_row(f"`{method}`: {name}", form, evidence.of("form", [name]), is_gguf=False)
    yield format_row("`mxfp4`: gpt-oss's own", MatrixForm(8, 32), evidence.of("mxfp4", [""]), is_gguf=False)
    groups, proofs = MatrixForm(4, 32, has_shifts=True), evidence.of("mlx", evidence.names("mlx"))
    yield format_row("MLX's own groups", groups, proofs, is_gguf=False)


def quantised_forms(folder: Path) -> Iterator[tuple[str, Any]]:
    """What reading a matrix gives, of a tiny checkpoint in every form that a quantiser publishes."""
    from shardcompute.core.settings import Settings
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.held import stored_form
    from shardcompute.weights.sources.reference import FolderReference
    from shardcompute.weights.sources.resolve import resolve
    from support.models.tiny import save_tiny
    from support.quantised.checkpoint import FORMS, quantise_folder

    plain = save_tiny("llama", folder / "plain")
    for name in FORMS:
        quantised, _ = quantise_folder(plain, folder, name)
        with open_checkpoint(resolve(FolderReference(quantised), Settings(data_dir=folder))) as checkpoint:
            yield name, stored_form(checkpoint.tensors.entries, "model.layers.0.mlp.up_proj.weight")


REFUSED_CONFIGS: tuple[Mapping[str, Any], ...] = (
    {"quant_method": "aqlm"},
    {"quant_method": "hqq"},
    {"quant_method": "torchao"},
    {"quant_method": "gptq", "bits": 3, "group_size": 128},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemv"},
)


def refused_rows() -> Iterator[tuple[str, ...]]:
    """What the code says of configurations that it does not take."""
    from shardcompute.core.errors import UnsupportedModelError
    from shardcompute.weights.quantised.schemes import scheme_of

    for config in REFUSED_CONFIGS:
        try:
            scheme_of(json.dumps(config, sort_keys=True))
        except UnsupportedModelError as error:
            yield f"`{json.dumps(config)}`", f"refused because {error.message.removeprefix('config.json: ')}"
        else:
            raise RuntimeError(f"{config} is not refused any more: take it off the list")


def render(collect: Callable[[], list[Case]] = collect_cases) -> str:
    evidence = Evidence(collect())
    head = ("family", "format", *BACKENDS, "proven by (cases)")
    refusals = (
        "`llamacpp` refuses safetensors because llama.cpp reads GGUF alone; `transformers` refuses GGUF because its "
        "stages read the tensors of safetensors. Architectures that are not listed run from GGUF with "
        "`--backend llamacpp` alone ([which may be cut](llamacpp.md))."
    )
    holders = {"onnx/cpu": "ONNX Runtime, CPU", "torch/cpu": "torch, CPU", "mlx/cpu": "MLX, CPU",
               "torch/cuda": "torch, CUDA", "mlx/gpu": "MLX, GPU", "llamacpp/any": "llama.cpp"}  # fmt: skip
    parts = [
        _OPENING,
        "## Families",
        table(head, family_rows(evidence)),
        refusals,
        "## Families that `transformers` runs",
        table(("family", "our own backends", "transformers", "proven by (cases)"), fallback_rows(evidence)),
        "Any other causal model that `transformers` has is run the same way, cut where it can be "
        "([how](transformers.md)).",
        "## Pictures",
        table(head, picture_rows(evidence)),
        "Where a tower is refused, the model takes text alone. `torch` takes pictures on CPUs, CUDA and Apple GPUs; "
        "GGUF has towers in files of their own, which are refused.",
        "## Formats",
        "F32, F16 and BF16 are what families are proven in: float32 holds them all, GPUs convert into 16-bit numbers.",
        table(
            ("stored as", *(holders[each] for each in HOLDERS), "proven by (cases)"), format_rows(evidence)
        ),
        "What each block type costs in memory: [GGUF](gguf.md). What each method may hold: [quantised](quantised.md).",
        "## Refused formats",
        table(("`quantization_config`", "what is said"), refused_rows()),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    content = render()
    if "--check" in sys.argv:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != content:
            print("docs/models.md is out of date: run python scripts/models_table.py")
            return 1
        return 0
    TARGET.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
