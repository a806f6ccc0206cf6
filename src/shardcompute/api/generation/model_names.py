"""Model names: the short ones that Ollama has for models, `smollm2:135m` for `SmolLM2-135M-Instruct`.

A short name is the family, written together or with hyphens, and a tag that picks a size or variant of it. It means a
model whose name begins with the family and goes on with nothing but what belongs into a tag, so that `qwen2.5` is no
name for a `Qwen2.5-Coder`. Letter case and `:latest` do not matter. A name of the catalogue also means the very model
that it is fetched from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardcompute.weights.sources.catalogue import find_known

_LATEST = "latest"
_SIZE = r"\d+(\.\d+)?[mbt]|\d+x\d+b|a\d+b|e\d+b"
_VARIANT = r"instruct|it|chat|base|text|thinking|preview|hf|gguf|v\d+(\.\d+)*|\d{4}"
_QUANTISATION = r"i?q\d\w*|b?f(p)?\d+|int\d|awq|gptq|mlx|\d+bit"
_TAG_PART = re.compile(f"({_SIZE}|{_VARIANT}|{_QUANTISATION})")
_BETWEEN = re.compile(rf"-|\.(?=({_QUANTISATION})$)")
"""Files of one quantisation are called `name.Q4_K_M.gguf` as often as `name-q4_k_m.gguf`."""


def match_short_name(name: str, served: Iterable[str]) -> list[str]:
    """Those of the served models that `name` may stand for."""
    served, known = list(served), find_known(name)
    if known is not None:
        repo = known.reference.partition(":")[0]
        if exact := [full for full in served if full.lower() == repo.lower()]:
            return exact
    family, _, tag = name.lower().partition(":")
    owner, _, family = family.rpartition("/")
    wanted = {part for part in tag.split("-") if part not in ("", _LATEST)}
    return [full for full in served if _means(owner, family.replace("-", ""), wanted, full.lower())]


def _means(owner: str, family: str, wanted: set[str], full: str) -> bool:
    full_owner, _, own = full.rpartition("/")
    parts = [part for part in _BETWEEN.sub("-", own.removesuffix(".gguf")).split("-") if part]
    if not family or (owner and owner != full_owner):
        return False
    for count in range(1, len(parts) + 1):
        rest = parts[count:]
        if "".join(parts[:count]) == family and all(_TAG_PART.fullmatch(part) for part in rest):
            return wanted <= set(rest)
    return False
