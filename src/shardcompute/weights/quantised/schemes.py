"""The quantisation methods that a `quantization_config` may name: those that open, and why others do not.

`METHODS` is the list. A scheme travels as the JSON of its config (`quantization_of`), so that a worker folds the
tensors that it was sent exactly as the first machine does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.weights.formats.tensor_file import TensorEntry, TensorFile
from shardcompute.weights.quantised.awq import awq_scheme
from shardcompute.weights.quantised.bitsandbytes import bitsandbytes_scheme
from shardcompute.weights.quantised.compressed import compressed_scheme
from shardcompute.weights.quantised.floats import fp8_scheme
from shardcompute.weights.quantised.folded_file import FoldedEntries, FoldedTensorFile
from shardcompute.weights.quantised.gptq import gptq_scheme
from shardcompute.weights.quantised.modelopt import modelopt_scheme
from shardcompute.weights.quantised.mxfp4 import mxfp4_scheme
from shardcompute.weights.quantised.scheme import Scheme

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": awq_scheme,
    "bitsandbytes": bitsandbytes_scheme,
    "compressed-tensors": compressed_scheme,
    "fbgemm_fp8": fp8_scheme,
    "fp8": fp8_scheme,
    "gptq": gptq_scheme,
    "modelopt": modelopt_scheme,
    "mxfp4": mxfp4_scheme,
}
_KEYS = ("quantization_config", "compression_config")
_CONFIG_BYTES = 4 << 20
_FALLBACK = "use the unquantised checkpoint, a GGUF file, or a version quantised by one of"


def quantization_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A config without what it says about quantisation, and that as JSON; empty where it says nothing.

    UnsupportedModelError for a method that cannot be run here.
    """
    found = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if found is None:
        return config, ""
    if not isinstance(found, dict):
        raise CorruptModelError(
            f"config.json: quantization_config is {str(found)[:40]!r}, not an object",
            hint="fetch the model again",
        )
    text = json.dumps(found, sort_keys=True)
    scheme_of(text)
    return {name: value for name, value in config.items() if name not in _KEYS}, text


@lru_cache(maxsize=16)
def scheme_of(text: str) -> Scheme:
    """The scheme of a config that `quantization_of` gave."""
    if len(text) > _CONFIG_BYTES:
        raise CorruptModelError(
            f"config.json: a quantization_config of {len(text)} bytes is far too long",
            hint="fetch the model again",
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"the quantisation of the model cannot be read: {error}") from error
    method = str(config.get("quant_method") or _guess(config)) if isinstance(config, dict) else "?"
    make = METHODS.get(method)
    if make is None:
        raise UnsupportedModelError(
            f"config.json: weights quantised by {method[:64]!r} cannot be run here",
            hint=f"{_FALLBACK} {', '.join(METHODS)}",
        )
    return make(config)


def _guess(config: Mapping[str, Any]) -> str:
    """Old files of bitsandbytes, and some of AWQ, do not name their method."""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in config else "unknown"


def open_quantised(file: TensorFile, text: str) -> TensorFile:
    """The tensors of `file`, folded as `quantization_of` said; as they are where it said nothing."""
    return FoldedTensorFile(file, scheme_of(text)) if text else file


def spare_biases(names: Collection[str], text: str) -> tuple[str, ...]:
    """Biases that a quantiser has written beside its matrices whether the model has them or not."""
    if not text or not scheme_of(text).writes_biases:
        return ()
    return tuple(
        name
        for name in names
        if name.endswith(".bias") and scheme_of(text).find(name.removesuffix(".bias") + ".weight", names)
    )


def fold_entries(entries: Mapping[str, TensorEntry], text: str) -> Mapping[str, TensorEntry]:
    """The same for entries alone, where no file is at hand."""
    return FoldedEntries(entries, scheme_of(text)) if text else entries
