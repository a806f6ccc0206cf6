"""Catalogue of models by the names that people type, such as `qwen3:8b`, with what is known of each without its files.

`catalogue.toml` is the list. A name without a size means its default one; letter case and `:latest` do not matter.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One size of a model. `parameters` and `file_bytes` are rounded as its publisher lists them; `config` has the
    fields of its config.json that its shapes follow from, `weights` says how the file keeps them."""

    name: str
    tag: str
    is_default: bool
    reference: str
    licence: str
    context: int
    parameters: int
    file_bytes: int
    weights: str
    has_thinking: bool
    has_tools: bool
    config: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.tag}"

    @property
    def abilities(self) -> tuple[str, ...]:
        """What its chat template is made for."""
        return tuple(
            word for word, has in (("thinking", self.has_thinking), ("tools", self.has_tools)) if has
        )


@cache
def known_models() -> tuple[KnownModel, ...]:
    """All of them, in the order of the list."""
    text = resources.files("shardcompute.weights.sources").joinpath("catalogue.toml").read_text("utf-8")
    return tuple(
        _model(name, tag, table, size)
        for name, table in tomllib.loads(text).items()
        for tag, size in table["sizes"].items()
    )


def _model(name: str, tag: str, table: Mapping[str, Any], size: Mapping[str, Any]) -> KnownModel:
    def said(field: str, absent: Any = None) -> Any:
        return size.get(field, table.get(field, absent))

    return KnownModel(
        name=name,
        tag=tag,
        is_default=table["default"] == tag,
        reference=size["reference"],
        licence=said("licence"),
        context=said("context"),
        parameters=size["parameters"],
        file_bytes=size["file_bytes"],
        weights=size["weights"],
        has_thinking=said("has_thinking", False),
        has_tools=said("has_tools", False),
        config={**table.get("config", {}), **size["config"], "max_position_embeddings": said("context")},
    )


def find_known(text: str) -> KnownModel | None:
    """The model that a name such as `qwen3`, `qwen3:8b` or `Qwen3:latest` means."""
    name, _, tag = text.strip().lower().partition(":")
    for model in known_models():
        if model.name == name and (model.is_default if tag in ("", _LATEST) else model.tag == tag):
            return model
    return None


def find_known_reference(reference: str) -> KnownModel | None:
    """The model of the list that lies at this reference, as `str(reference)` says it."""
    return next((model for model in known_models() if model.reference == reference), None)


def suggest_known(text: str) -> str:
    """What somebody may have meant who typed a name that is none, as a hint; "" where nothing is near."""
    name, _, tag = text.strip().lower().partition(":")
    sizes = [model.tag for model in known_models() if model.name == name]
    if sizes:
        return f"{name} comes as {', '.join(f'{name}:{each}' for each in sizes)}"
    names = dict.fromkeys(model.name for model in known_models())
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not near:
        return ""
    # The size that was asked for, where the nearest has it.
    full = f"{near[0]}:{tag}" if tag and find_known(f"{near[0]}:{tag}") else near[0]
    return f"did you mean {' or '.join([full, *near[1:]])}?"
