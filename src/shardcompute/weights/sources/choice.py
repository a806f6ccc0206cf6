"""File selection: which files of a repository or folder make the model, decided from their names alone.

Safetensors are preferred; a GGUF file is chosen when its quantisation is asked for or when there is nothing
else. Pickled weights are never chosen: loading a pickle runs whatever code it holds. Names come from outside
and are used as paths, so the unsafe ones are dropped first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from shardcompute.core.errors import CorruptModelError, UnknownModelError, UnsupportedModelError, UsageError
from shardcompute.weights.formats.gguf_parts import parse_part_name, parts_with

WeightKind = Literal["gguf", "safetensors"]
PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_TEXT_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
# What an older repository has in place of tokenizer.json.
_OLD_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?I?T?Q\d[A-Z0-9_]*|BF16|FP?16|FP?32|MXFP4[A-Z0-9_]*)(?=$|[-./])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class FileChoice:
    """The files of one model. `main_file` is where a loader begins: the GGUF, the one safetensors or the
    index."""

    kind: WeightKind
    main_file: str
    weight_files: tuple[str, ...]
    text_files: tuple[str, ...] = ()
    quant: str | None = None

    @property
    def all_files(self) -> tuple[str, ...]:
        return (*self.text_files, *self.weight_files)


def choose_files(
    where: str,
    names: Collection[str],
    read_index: Callable[[str], str],
    *,
    quant: str | None = None,
    quant_order: Sequence[str] = PREFERRED_QUANTS,
) -> FileChoice:
    """The model's files among `names`. `where` is for messages; `read_index` gives the text of a named file.

    Without `quant`, the first of `quant_order` that exists once is taken where only GGUF files are left.
    """
    safe = sorted(name for name in names if is_safe_name(name))
    ggufs = [name for name in safe if _is_gguf_model(name)]
    has_safetensors = SINGLE_FILE in safe or INDEX_FILE in safe
    if quant is not None:
        return _choose_quant(where, ggufs, quant)
    if has_safetensors and CONFIG_FILE in safe:
        return _choose_safetensors(where, safe, read_index)
    if ggufs:
        return _choose_default_gguf(where, ggufs, quant_order)
    raise _nothing_usable(where, safe, has_safetensors)


def is_safe_name(name: str) -> bool:
    """Whether a name from outside stays inside the folder it is joined to, on every system."""
    if not name or not name.isprintable() or any(char in name for char in '\\:*?"<>|'):
        return False
    return not name.startswith("/") and all(
        part not in ("", ".", "..") and not part.endswith((".", " ")) for part in name.split("/")
    )


def quant_of(name: str) -> str | None:
    """The quantisation in a GGUF file's name: `Model-7B.q4_k_m.gguf` → `Q4_K_M`."""
    part = parse_part_name(name)
    found = _QUANT.findall(part.stem if part else name.removesuffix(".gguf").removesuffix(".GGUF"))
    return str(found[-1]).upper() if found else None


def _is_gguf_model(name: str) -> bool:
    stem = PurePosixPath(name).name.lower()
    return stem.endswith(".gguf") and not stem.startswith("mmproj") and "imatrix" not in stem


def _choose_safetensors(where: str, names: Sequence[str], read_index: Callable[[str], str]) -> FileChoice:
    texts = tuple(name for name in _TEXT_FILES if name in names)
    if "tokenizer.json" not in names:
        texts += tuple(name for name in _OLD_TOKENIZER_FILES if name in names)
    if SINGLE_FILE in names:
        return FileChoice("safetensors", SINGLE_FILE, (SINGLE_FILE,), texts)
    shards = _shards_of(where, read_index(INDEX_FILE))
    absent = [shard for shard in shards if shard not in names]
    if absent:
        raise CorruptModelError(
            f"{where} is incomplete: its index names {', '.join(absent[:3])}, which is not there",
            hint="fetch the model again, or ask its author for the missing files",
        )
    return FileChoice("safetensors", INDEX_FILE, tuple(shards), (*texts, INDEX_FILE))


def _shards_of(where: str, index: str) -> list[str]:
    try:
        shards = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = []
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise CorruptModelError(
            f"{where} has a damaged {INDEX_FILE}: it maps no tensor to a file", hint="fetch the model again"
        )
    return shards


def _choose_quant(where: str, ggufs: Sequence[str], quant: str) -> FileChoice:
    matches = [name for name in ggufs if quant_of(name) == quant.upper()]
    if not matches:
        available = _quants_of(ggufs)
        raise UsageError(
            f"{where} has no GGUF file of quantisation {quant}",
            hint=f"it has {', '.join(available)}"
            if available
            else "it has no GGUF files; leave the quantisation out",
        )
    return _only_gguf(where, matches)


def _choose_default_gguf(where: str, ggufs: Sequence[str], quant_order: Sequence[str]) -> FileChoice:
    for quant in quant_order:
        if any(quant_of(name) == quant for name in ggufs):
            return _choose_quant(where, ggufs, quant)
    return _only_gguf(where, ggufs)


def _only_gguf(where: str, ggufs: Sequence[str]) -> FileChoice:
    """The one model that these files are, in one file or in parts."""
    models = {_model_of(name): name for name in reversed(ggufs)}
    if len(models) > 1:
        quants, firsts = _quants_of(ggufs), sorted(models.values())
        listed = ", ".join(
            quants if len(quants) == len(models) else [*firsts[:12], *["…"][: len(models) > 12]]
        )
        raise UsageError(
            f"{where} has {len(models)} GGUF files that fit, and one must be chosen",
            hint=f"name one of: {listed}",
        )
    return choose_gguf(ggufs[0], ggufs)


def choose_gguf(name: str, names: Collection[str]) -> FileChoice:
    """The model of the GGUF file `name`, with its other parts among `names` where it is a part."""
    parts = parts_with(name, names)
    return FileChoice("gguf", parts[0], parts, quant=quant_of(name))


def _model_of(name: str) -> tuple[str, int]:
    """The same for all parts of a model."""
    part = parse_part_name(name)
    return (name, 0) if part is None else (part.stem, part.count)


def _quants_of(ggufs: Sequence[str]) -> list[str]:
    return sorted({quant for name in ggufs if (quant := quant_of(name))})


def _nothing_usable(where: str, names: Sequence[str], has_safetensors: bool) -> Exception:
    if has_safetensors:
        return UnsupportedModelError(
            f"{where} has safetensors but no {CONFIG_FILE}, so nothing says what model they are",
            hint=f"add the model's {CONFIG_FILE}",
        )
    if "adapter_config.json" in names:
        return UnsupportedModelError(
            f"{where} is an adapter, not a whole model", hint="merge it into its base model first"
        )
    if any(name.lower().endswith(_PICKLE_SUFFIXES) for name in names):
        return UnsupportedModelError(
            f"{where} has only pickled weights (.bin, .pt), never loaded because they can run any code",
            hint="look for a safetensors or GGUF version of the model, or convert it to safetensors",
        )
    return UnknownModelError(
        f"{where} holds no model: neither {CONFIG_FILE} with safetensors nor a GGUF file",
        hint="check the name; a model has config.json and model.safetensors, or a .gguf file",
    )
