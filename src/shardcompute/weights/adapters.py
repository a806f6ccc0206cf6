"""Adapters: PEFT's LoRA folders, read for one base model and checked against it before any number is.

`adapter_config.json` says how matrices were adapted, `adapter_model.safetensors` holds two small ones for each. What an
adapter has must be exactly what its config and the base call for. Variants that change more than that (trained biases,
whole modules saved besides, bases that were changed first) are refused: they would be computed wrongly. So is DoRA
where an adapter is kept beside its base; merged into it, its lengths of rows are applied.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.backends.host.low_rank import NO_ADAPTERS, AdapterLayers, AdapterMatrix
from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import CorruptModelError, UnknownModelError, UnsupportedModelError, UsageError
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.formats.bytes import LocalBytes
from shardcompute.weights.formats.safetensors_file import open_safetensors
from shardcompute.weights.formats.tensor_file import TensorFile, read_matrix, read_vector
from shardcompute.weights.loader import placed_rows

MAX_ADAPTERS = 64
MAX_RANK = 1024
"""Of one adapter: more would hardly be a small addition."""
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLAIN = re.compile(r"[\w.]{1,200}")
_TENSOR = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.([\w.]{1,200})\.lora_([AB])(?:\.default)?\.weight")
_LENGTHS = re.compile(
    r"(?:.*\.)?layers\.(\d{1,6})\.([\w.]{1,200})\.lora_(m)agnitude_vector(?:\.default)?(?:\.weight)?"
)
_STORED = re.compile(r"(?:.*\.)?(?:layers)\.(\d{1,6})\.([\w.]{1,200})\.weight")
_FLOATS = ("F32", "F16", "BF16")
ADAPTABLE = (
    "attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down",
)  # fmt: skip
"""Our matrices that may be adapted; the first three not in latent attention."""
_GGUF_MODULES: Mapping[str, str] = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
"""What adapters call the matrices of a model that comes as GGUF, where other names are stored."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
_REFUSED: Mapping[str, str] = {
    "modules_to_save": "whole modules that were trained besides (modules_to_save)",
    "lora_bias": "biases in its additions (lora_bias)",
    "trainable_token_indices": "tokens that were trained besides (trainable_token_indices)",
    "layer_replication": "layers that are repeated (layer_replication)",
    "target_parameters": "additions to parameters that are no linear maps (target_parameters)",
    "use_qalora": "QALoRA's grouped additions (use_qalora)",
    "alora_invocation_tokens": "additions that begin at certain tokens (alora_invocation_tokens)",
    "arrow_config": "additions that are routed by token (arrow_config)",
}


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One linear map of the base, as the adapter's files name it, and what is added to it, in their order of rows."""

    stored: str
    places: tuple[tuple[str, TensorPlace | None], ...]
    """Our matrices that are read from it; None: as it is."""
    added: AdapterMatrix
    lengths: Float32 | None = None
    """Of the rows of base and addition together (DoRA); None: as they come."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of one base model, in memory."""

    name: str
    modules: Mapping[int, Sequence[AdaptedModule]]
    """By layer."""
    folder: Path
    """From where it was read."""

    def layer(self, index: int) -> dict[str, AdapterMatrix]:
        """What it adds to our matrices of a layer."""
        return {
            name: AdapterMatrix(
                module.added.down,
                module.added.up if place is None else placed_rows(place, module.added.up),
            )
            for module in self.modules.get(index, ())
            for name, place in module.places
        }


def adapter_bytes(adapters: Sequence[Adapter], layer: int) -> int:
    """What adapters add to a layer, in bytes."""
    return sum(matrix.size_bytes for adapter in adapters for matrix in adapter.layer(layer).values())


def stage_adapters(adapters: Sequence[Adapter], stage: Stage) -> AdapterLayers:
    """What adapters add to the layers of a stage."""
    if not adapters:
        return NO_ADAPTERS
    layers = {index: [each.layer(index) for each in adapters] for index in range(stage.start, stage.stop)}
    return AdapterLayers(tuple(each.name for each in adapters), layers)


def check_adapter_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for an adapter",
            hint="use up to 64 letters, digits, dots, hyphens and underscores, a letter or digit first",
        )
    return name


def open_adapters(
    folders: Mapping[str, Path], spec: ModelSpec, layout: Layout, *, is_gguf: bool
) -> tuple[Adapter, ...]:
    """Adapters by their names, in the order of these: every machine numbers them so."""
    if len(folders) > MAX_ADAPTERS:
        raise UsageError(
            f"{len(folders)} adapters are too many for one model", hint=f"load at most {MAX_ADAPTERS}"
        )
    return tuple(
        open_adapter(check_adapter_name(name), folders[name], spec, layout, is_gguf=is_gguf)
        for name in sorted(folders)
    )


def open_adapter(
    name: str, folder: Path, spec: ModelSpec, layout: Layout, *, is_gguf: bool, is_merged: bool = False
) -> Adapter:
    """Read an adapter for a model of this layout. Shapes are checked before numbers are read. One that is to be merged
    may be DoRA."""
    config = _read_config(folder, allows_dora=is_merged)
    base = base_modules(spec, layout, is_gguf=is_gguf)
    path = folder / _TENSORS
    if not path.is_file():
        raise UnknownModelError(
            f"{folder} has no {_TENSORS}",
            hint="save the adapter with PEFT's save_pretrained, which writes safetensors; .bin files are not read",
        )
    with contextlib.closing(LocalBytes(path)) as source:
        file = open_safetensors(source)
        found = _find_tensors(file, "ABm" if config.has_lengths else "AB")
        wanted = _wanted(config, folder, base)
        if not found:
            raise CorruptModelError(f"{path} holds no LoRA matrices", hint="fetch the adapter again")
        _check_wanted(folder, found, wanted, base)
        modules: dict[int, list[AdaptedModule]] = {}
        for (layer, tail), names in sorted(found.items()):
            module = base[layer, tail]
            down, up = (names[part] for part in "AB")
            rank = _check_shapes(file, (down, up), module, config.rank(tail, layer))
            scale = np.float32(config.scale(tail, layer, rank))
            added = AdapterMatrix(_numbers(file, down), _numbers(file, up) * scale)
            lengths = _read_lengths(file, names["m"], module) if config.has_lengths else None
            modules.setdefault(layer, []).append(AdaptedModule(module.stored, module.places, added, lengths))
    return Adapter(name, modules, folder)


@dataclass(frozen=True, slots=True)
class BaseModule:
    stored: str
    places: tuple[tuple[str, TensorPlace | None], ...]
    width_out: int
    width_in: int
    is_adaptable: bool


ModuleKey = tuple[int, str]
"""Layer, and the module's name within it."""


def base_modules(spec: ModelSpec, layout: Layout, *, is_gguf: bool) -> dict[ModuleKey, BaseModule]:
    """The linear maps of the base's layers by what adapters call them."""
    modules: dict[ModuleKey, BaseModule] = {}
    for layer, places in enumerate(layout.layers):
        if is_gguf:
            named = {tail: {name: places[name]} for tail, name in _GGUF_MODULES.items() if name in places}
        else:
            named = {}
            for name, place in places.items():
                match = _STORED.fullmatch(place.stored)
                if match is not None and len(place.shape) == 2:
                    named.setdefault(match[2], {})[name] = place
        for tail, parts in named.items():
            modules[layer, tail] = _base_module(spec, parts, is_gguf=is_gguf)
    return modules


def _base_module(spec: ModelSpec, parts: Mapping[str, TensorPlace], *, is_gguf: bool) -> BaseModule:
    own = ADAPTABLE if spec.latent is None else ADAPTABLE[3:]
    width = max(_stored_rows(place, is_gguf=is_gguf) for place in parts.values())
    first = next(iter(parts.values()))
    return BaseModule(
        first.stored,
        # GGUF's own order of rows is not the adapter's: ours is.
        tuple((name, None if is_gguf else place) for name, place in parts.items()),
        width,
        first.shape[1],
        is_adaptable=all(name in own and place.expert is None for name, place in parts.items()),
    )


def _stored_rows(place: TensorPlace, *, is_gguf: bool) -> int:
    if is_gguf:
        return place.shape[0]
    if place.rows is not None:
        return place.rows[1]
    return place.shape[0] * (1 if place.every is None else place.every[1])


@dataclass(frozen=True, slots=True)
class _LoraConfig:
    default_rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None
    """Names, or ends of names, of modules; None: whatever there are tensors of."""
    layers: frozenset[int] | None
    has_lengths: bool
    """DoRA."""

    def rank(self, tail: str, layer: int) -> int:
        return int(_matching(self.ranks, tail, layer, self.default_rank))

    def scale(self, tail: str, layer: int, rank: int) -> float:
        alpha = float(_matching(self.alphas, tail, layer, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _matching(patterns: Mapping[str, Any], tail: str, layer: int, default: Any) -> Any:
    name = f".layers.{layer}.{tail}"
    return next((value for key, value in patterns.items() if name.endswith(f".{key}")), default)


def _read_config(folder: Path, *, allows_dora: bool) -> _LoraConfig:
    path = folder / _CONFIG
    if not path.is_file():
        raise UnknownModelError(
            f"{folder} has no {_CONFIG}", hint="give a folder that PEFT's save_pretrained has written"
        )
    with contextlib.closing(LocalBytes(path)) as source:
        if source.size > _CONFIG_BYTES:
            raise CorruptModelError(f"{path} has {source.size} bytes, more than any config needs")
        text = bytes(source.read(0, source.size))
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is not JSON: {error}", hint="fetch the adapter again") from error
    if not isinstance(config, dict):
        raise CorruptModelError(f"{path} is not a JSON object", hint="fetch the adapter again")
    _refuse_variants(folder, config, allows_dora=allows_dora)
    try:
        return _parse_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModelError(
            f"{path} cannot be understood: {error!r}", hint="save the adapter again with a current PEFT"
        ) from error


def _refuse_variants(folder: Path, config: Mapping[str, Any], *, allows_dora: bool) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"the adapter in {folder} is of PEFT's type {str(kind)[:40]!r}", hint="only LORA is supported"
        )
    if config.get("use_dora") and not allows_dora:
        raise UnsupportedModelError(
            f"the adapter in {folder} has DoRA, which changes the length of weights as well, and cannot be kept beside "
            "others",
            hint="merge it into the model with --merge-adapter FOLDER",
        )
    has = [words for key, words in _REFUSED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        has.append("trained biases")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        has.append(f"a base that was changed first ({start[:40]})")
    if has:
        raise UnsupportedModelError(
            f"the adapter in {folder} has {', '.join(has)}",
            hint="only plain LoRA is supported; merge this one into its base with PEFT and serve that",
        )


def _parse_config(config: Mapping[str, Any]) -> _LoraConfig:
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    if isinstance(targets, str) and _PLAIN.fullmatch(targets):
        targets = [targets]
    # Patterns and exclusions are PEFT's to match: what they came to is what there are tensors of.
    is_named = isinstance(targets, list) and not config.get("exclude_modules")
    if isinstance(targets, list) and not all(isinstance(each, str) for each in targets):
        raise ValueError("target_modules are names")
    return _LoraConfig(
        default_rank=_whole(config["r"]),
        alpha=_finite(config.get("lora_alpha", 8)),
        is_rank_stabilised=bool(config.get("use_rslora", False)),
        ranks={_plain(key): _whole(value) for key, value in (config.get("rank_pattern") or {}).items()},
        alphas={_plain(key): _finite(value) for key, value in (config.get("alpha_pattern") or {}).items()},
        targets=tuple(targets) if is_named and targets else None,
        layers=None if layers is None else frozenset(_whole(each, least=0) for each in layers),
        has_lengths=bool(config.get("use_dora", False)),
    )


def _whole(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 30:
        raise ValueError(f"{str(value)[:40]} is no number for a rank or layer")
    return value


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ValueError(f"{str(value)[:40]} is no scale")
    return float(value)


def _plain(key: Any) -> str:
    if not isinstance(key, str) or not _PLAIN.fullmatch(key):
        raise ValueError(f"{str(key)[:40]!r} is a pattern, and only names of modules are read")
    return key


def _find_tensors(file: TensorFile, wanted: str) -> dict[ModuleKey, dict[str, str]]:
    found: dict[ModuleKey, dict[str, str]] = {}
    for name in file.entries:
        match = _TENSOR.fullmatch(name) or (_LENGTHS.fullmatch(name) if "m" in wanted else None)
        if match is None:
            what = "DoRA" if "lora_magnitude" in name else "embedding or head" if "embed" in name else "other"
            raise UnsupportedModelError(
                f"{file.name} has the tensor {name[:120]!r} ({what}), which is no LoRA matrix of a layer's linear map",
                hint="only plain LoRA of linear maps in layers is supported; merge this adapter with PEFT instead",
            )
        parts = found.setdefault((int(match[1]), match[2]), {})
        if match[3] in parts:
            raise CorruptModelError(f"{file.name} has {name[:120]!r} twice", hint="fetch the adapter again")
        parts[match[3]] = name
    for (layer, tail), parts in found.items():
        if len(parts) != len(wanted):
            raise CorruptModelError(
                f"{file.name} has only lora_{' and lora_'.join(sorted(parts))} of {tail} in layer {layer}",
                hint="fetch the adapter again",
            )
    return found


def _wanted(config: _LoraConfig, folder: Path, base: Mapping[ModuleKey, BaseModule]) -> set[ModuleKey] | None:
    """The modules that the config asks for; None: it leaves that open."""
    if config.targets is None:
        return None
    wanted: set[ModuleKey] = set()
    for target in config.targets:
        of_target = {key for key in base if f".layers.{key[0]}.{key[1]}".endswith(f".{target}")}
        if not of_target:
            known = ", ".join(sorted({tail for _, tail in base})[:12])
            raise UnsupportedModelError(
                f"the adapter in {folder} adapts {target[:80]!r}, which this model's layers do not have",
                hint=f"it may belong to another model; this one has {known}",
            )
        wanted |= of_target
    return wanted if config.layers is None else {key for key in wanted if key[0] in config.layers}


def _check_wanted(
    folder: Path,
    found: Mapping[ModuleKey, object],
    wanted: set[ModuleKey] | None,
    base: Mapping[ModuleKey, BaseModule],
) -> None:
    for layer, tail in found:
        module = base.get((layer, tail))
        if module is None:
            raise UnsupportedModelError(
                f"the adapter in {folder} adapts {tail} in layer {layer}, which this model does not have",
                hint="it belongs to another model",
            )
        if not module.is_adaptable:
            raise UnsupportedModelError(
                f"the adapter in {folder} adapts {tail}, and additions to experts, routers and latent attention are "
                "not computed",
                hint="merge it into its base with PEFT and serve that",
            )
    if wanted is None:
        return
    for what, keys in (("lacks", wanted - found.keys()), ("has besides its config", found.keys() - wanted)):
        if keys:
            layer, tail = min(keys)
            raise CorruptModelError(
                f"the adapter in {folder} {what} {tail} of layer {layer}",
                hint="its config and its tensors do not belong together; fetch the adapter again",
            )


def _check_shapes(file: TensorFile, names: Sequence[str], module: BaseModule, rank: int) -> int:
    if rank > MAX_RANK:
        raise UnsupportedModelError(
            f"{file.name} has the rank {rank}", hint=f"ranks up to {MAX_RANK} are supported"
        )
    for name, shape in zip(names, ((rank, module.width_in), (module.width_out, rank)), strict=True):
        entry = file.entries[name]
        if entry.shape != shape or entry.dtype not in _FLOATS:
            raise CorruptModelError(
                f"{name[:120]} in {file.name} is {entry.dtype} of the shape {'×'.join(map(str, entry.shape))}, where "
                f"config and base call for {'×'.join(map(str, shape))} in {', '.join(_FLOATS)}",
                hint="the adapter belongs to another model, or is damaged",
            )
    return rank


def _read_lengths(file: TensorFile, name: str, module: BaseModule) -> Float32:
    entry = file.entries[name]
    if entry.shape != (module.width_out,) or entry.dtype not in _FLOATS:
        raise CorruptModelError(
            f"{name[:120]} in {file.name} is {entry.dtype} of the shape {'×'.join(map(str, entry.shape))}, where the "
            f"base calls for {module.width_out}",
            hint="the adapter belongs to another model, or is damaged",
        )
    lengths = read_vector(file, name)
    if not np.isfinite(lengths).all():
        raise CorruptModelError(f"{name[:120]} in {file.name} has numbers that are none")
    return lengths


def _numbers(file: TensorFile, name: str) -> Float32:
    values = read_matrix(file, name).to_dense()
    if not np.isfinite(values).all():
        raise CorruptModelError(f"{name[:120]} in {file.name} has numbers that are none")
    return values
