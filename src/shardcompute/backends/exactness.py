"""Exactness classes: whose results are equal to the last bit, and how far others may be apart. Imports no backend.

A class is what decides the bits of a result: the backend and its release, the numbers it computes with, and the
kernels that its processor gets. Inside one class, for one weight form:

- a model computes the same bits wherever it is cut, step by step: the same tokens whatever the split;
- where rows are exact (`has_exact_rows`), a row has the same bits whatever else its step computes, so that company,
  chunks, drafts and replays change nothing either. Elsewhere they may change logits by `own_error`.

Between classes logits agree within `tolerance`: the norm of the difference of two rows of logits, each less its mean,
against the norm of one of them, given the same tokens before (teacher forcing). Tokens then differ only where two were
about as likely as that. `docs/decisions/0020-exactness-classes.md` has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

UNKNOWN = "unknown"
_ERRORS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2, "int8": 1.5e-1}
"""How far logits may be from those of float32: that of the numbers, or of activations in 8 bits beside blocks."""
_KV_ERRORS = {"float16": 5e-3, "int8": 5e-2}
_EXACT_ARCH = 80
"""From compute capability 8.0 on, our own CUDA kernels compute, and in bfloat16."""


@dataclass(frozen=True, slots=True)
class ExactnessClass:
    """`numbers`: float32, float16 or bfloat16; `kv`: that of keys and values; `kernels`: what chooses among a release's
    kernels, an instruction set or a GPU."""

    backend: str
    release: str
    numbers: str
    kv: str
    kernels: str

    @property
    def name(self) -> str:
        """As nodes say it, such as `onnx-1.31.0/float32/avx2`."""
        kv = "" if self.kv == self.numbers else f"+kv-{self.kv}"
        return f"{self.backend}-{self.release}/{self.numbers}{kv}/{self.kernels}"

    @property
    def has_exact_rows(self) -> bool:
        """Tested by `tests/parity`: ONNX Runtime, llama.cpp and MLX on CPUs, and our CUDA kernels."""
        is_gpu = self.kernels.startswith(("cuda ", "metal "))
        if self.backend == "torch":
            return self.kernels.startswith("cuda ") and self.kernels.endswith(" triton")
        return self.backend == "onnx" or (self.backend in ("mlx", "llamacpp") and not is_gpu)

    @property
    def has_exact_ranks(self) -> bool:
        """Whether tensor ranks that gather have the bits of one process: an output is computed alike whichever others
        are computed beside it. Tested for ONNX Runtime only."""
        return self.backend == "onnx"

    def own_error(self, form: str) -> float:
        """How far its logits may be from float32 with the same weights, which are in `form`."""
        has_blocks = form != "float32"
        numbers = "int8" if self.backend in ("onnx", "llamacpp") and has_blocks else self.numbers
        return _ERRORS.get(numbers, 1.0) + (0.0 if self.kv == self.numbers else _KV_ERRORS.get(self.kv, 0.0))


def class_of(
    backend: str,
    device: str,
    *,
    release: str,
    kernels: str,
    arch: str = "",
    has_triton: bool = False,
    kv_type: str = "",
) -> ExactnessClass:
    """The class of a backend on a device with its usual numbers. `kernels`: the processor's instruction set or the
    GPU's name; `arch`: a GPU's, such as sm_90; `kv_type` "": as it computes."""
    kind = device.partition(":")[0]
    numbers = "float32"
    if kind == "cuda":
        capability = _capability(arch)
        numbers = "float16" if capability is not None and capability < _EXACT_ARCH else "bfloat16"
        fused = " triton" if has_triton and capability is not None and capability >= _EXACT_ARCH else ""
        kernels = f"cuda {kernels}{fused}"
    elif kind in ("mps", "mlx"):
        numbers, kernels = "bfloat16", f"metal {kernels}"
    if backend == "llamacpp":
        kv_type = "float16"  # keys so, values as bfloat16, whatever is asked for
    return ExactnessClass(backend, release, numbers, kv_type or numbers, kernels)


def with_kv(name: str, kv_type: str) -> str:
    """The class that a node computes a model in whose keys and values are kept as `kv_type`, where it does as asked."""
    known = parse_class(name)
    if known is None or known.backend not in ("onnx", "numpy"):
        return name
    return replace(known, kv=kv_type).name


def parse_class(name: str) -> ExactnessClass | None:
    """The class that a node said; None for what is no such name."""
    parts = name.split("/", 2)
    if len(parts) != 3:
        return None
    backend, _, release = parts[0].partition("-")
    numbers, _, kv = parts[1].partition("+kv-")
    if not backend or not parts[2] or numbers not in _ERRORS:
        return None
    return ExactnessClass(backend, release, numbers, kv or numbers, parts[2])


def tolerance(first: str, second: str, form: str) -> float:
    """Within what the logits of two classes agree, for weights in `form`; 0: bit by bit. What nobody knows may be far
    off."""
    if first == second and parse_class(first) is not None:
        return 0.0
    return _error_of(first, form) + _error_of(second, form)


def chain_tolerance(names: Sequence[str], form: str) -> float:
    """Within what a chain of these classes agrees with a chain of any one of them: its worst pair."""
    return max((tolerance(first, second, form) for first in names for second in names), default=0.0)


def describe_exactness(names: Sequence[str], form: str) -> str:
    """What a chain of stages of these classes promises, in words."""
    classes = sorted({name or UNKNOWN for name in names})
    if len(classes) > 1:
        return (
            f"mixes {len(classes)} exactness classes ({', '.join(classes)}): logits within "
            f"{chain_tolerance(classes, form):.2g} of one class alone, tokens may differ where two are that near"
        )
    known = parse_class(classes[0]) if classes else None
    if known is None:
        return "exactness unknown: not every machine says how it computes"
    if known.has_exact_rows:
        return f"one exactness class ({known.name}): the same tokens whatever the split and the company"
    return (
        f"one exactness class ({known.name}): the same tokens whatever the split; company in a step may change "
        f"logits within {known.own_error(form):.2g}"
    )


def is_mixed(names: Sequence[str]) -> bool:
    return len(set(names)) > 1


def _error_of(name: str, form: str) -> float:
    known = parse_class(name)
    return 1.0 if known is None else known.own_error(form)


def _capability(arch: str) -> int | None:
    """80 of `sm_80`; None of other makers' and of unknown ones."""
    digits = arch.removeprefix("sm_")
    return int(digits) if arch.startswith("sm_") and digits.isdecimal() else None
