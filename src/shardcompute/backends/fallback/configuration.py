"""Configurations for `transformers`, read from a checkpoint's `config.json` without trusting it.

What names code, kernels or other files is dropped, and numbers are bounded by what building an empty model may cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardcompute.core.errors import ShardComputeError, UnsupportedModelError

_DROPPED = {
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "fusion_config",
    "name_or_path",
    "torch_dtype",
    "transformers_weights",
    "use_kernels",
}
"""Choices that are ours, and what would have code or files be fetched. So are all names that begin with `_`."""
_MOST_LAYERS, _MOST_EXPERTS, _LARGEST = 1024, 4096, 1 << 31
_DEEPEST = 8
_FLOAT = "__float__"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf}
"""How configurations write numbers that JSON has none of."""


def read_causal_config(config: Mapping[str, Any]) -> Any:
    """The configuration as `transformers` has it; UnsupportedModelError for what it does not know or must not build."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise refusal(f"the transformers installed here does not know the model type {str(kind)[:64]!r}")
    if config.get("quantization_config") is not None:
        raise refusal(
            "its weights are quantised, which is read for models of known families only",
            "take the checkpoint without quantisation",
        )
    plain = _plain(config, 0)
    try:
        found = CONFIG_MAPPING[kind].from_dict(plain)
    except Exception as error:  # validation of foreign values fails in any way
        raise refusal(f"transformers does not accept its configuration: {_first_line(error)}") from error
    if type(found) not in AutoModelForCausalLM._model_mapping:
        raise refusal(f"transformers has no causal language model of the type {kind}")
    return found


def text_config(config: Any) -> Any:
    text = config.get_text_config()
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int) or not 0 < count <= _MOST_LAYERS:
        raise refusal(f"its configuration counts {str(count)[:20]} layers")
    return text


def refusal(reason: str, hint: str = "choose a model of a known family") -> UnsupportedModelError:
    return UnsupportedModelError(f"this model cannot be run through transformers: {reason}", hint=hint)


def as_refusal(error: Exception, doing: str) -> ShardComputeError:
    """What code of `transformers` failed with, as an error of ours."""
    if isinstance(error, ShardComputeError):
        return error
    return refusal(f"{doing}: {type(error).__name__}: {_first_line(error)}")


def _plain(values: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth > _DEEPEST:
        raise refusal("its configuration is nested too deeply")
    kept = {}
    for name, value in values.items():
        if name in _DROPPED or name.startswith("_"):
            continue
        kept[name] = _plain_value(value, depth)
        is_count = name.startswith(("num_", "n_"))
        most = _MOST_EXPERTS if "experts" in name and is_count else _LARGEST
        if isinstance(value, int) and not -_LARGEST <= value <= most:
            raise refusal(
                f"its configuration asks for {name} of {value}, and {most} are the most that is built"
            )
    return kept


def _plain_value(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return _FLOATS.get(str(value.get(_FLOAT))) or _plain(value, depth + 1)
    if isinstance(value, list):
        return [_plain_value(each, depth + 1) for each in value]
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
