"""Checkpoints of any architecture that `transformers` may know: what a chain must know of a model without a family.

Layers are told by the numbers in their tensors' names (`model.layers.3.…`), tables by their rows, sizes by the names
that configurations have for them. Nothing of ours can compute with the spec, which its family's name tells; what
`transformers` makes of the configuration, only a machine that has it knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families.fields import MAX_CONTEXT, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import Layer, ModelSpec

_FALLBACK = "transformers:"
SHARED = "shared."
"""Begins the names of tensors that every stage reads: norms and tables that belong to no layer."""
EMBEDDING = "embedding."
"""Begins the names of tables besides the embedding that the first stage looks up."""
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.(.+)")
_OTHER = re.compile(r"vision|visual|audio|image|multi_modal|mtp\.")
"""In the names of tensors that text is computed without."""
_MOST_SHARED_BYTES = 64 << 20
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "model_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "seq_length"),
    "inner": ("mamba_d_ssm",),
    "inner_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads"),
    "inner_head_dim": ("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim"),
    "expand": ("mamba_expand", "expand"),
    "state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "conv": ("mamba_d_conv", "conv_kernel", "mamba_d_conv_kernel", "linear_conv_kernel_dim", "conv_L_cache"),
}
_SHARING: Mapping[str, str] = {
    "num_kv_shared_layers": "layers read the keys and values of others",
    "hidden_size_per_layer_input": "every layer takes inputs of its own for each token",
    "altup_num_inputs": "layers pass on several streams of rows",
    "num_mem_blocks": "layers share blocks of weights and look at the embedded tokens again",
}
"""Configuration fields that tell, where they are above 0, why a model's layers cannot be on several machines."""
_STATE_MARGIN = 1.25


def is_fallback(spec: ModelSpec) -> bool:
    """Whether only `transformers` can run the model."""
    return spec.family.startswith(_FALLBACK)


def fallback_type(spec: ModelSpec) -> str:
    """The model's type as `transformers` names it."""
    return spec.family.removeprefix(_FALLBACK)


def why_whole(config: Mapping[str, Any]) -> str:
    """Why the layers of a model cannot be on several machines; "": nothing that is known of."""
    text = _text_of(config)
    found = (why for name, why in _SHARING.items() if _is_count(text.get(name)))
    return next(found, "")


def from_fallback_config(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ModelSpec, Layout]:
    """Spec and layout of a decoder of any type. UnsupportedModelError where its tensors do not show what is what,
    CorruptModelError for numbers that cannot be true."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not 0 < len(kind) <= 64:
        raise UnsupportedModelError("its config.json names no model_type")
    text = _text_of(config)
    count = _number(text, "layers", most=MAX_LAYERS)
    hidden = _number(text, "hidden", most=MAX_WIDTH)
    vocabulary = text.get("vocab_size", config.get("vocab_size"))
    if not isinstance(vocabulary, int) or not 0 < vocabulary <= MAX_VOCABULARY:
        raise CorruptModelError(
            f"config.json: vocab_size is {str(vocabulary)[:20]}", hint="fetch the model again"
        )
    ahead = text.get("num_nextn_predict_layers")
    layers, prefix = _layers(count, shapes, ahead if isinstance(ahead, int) else 0)
    model, is_tied = _ends(shapes, prefix, vocabulary, layers)
    kv_heads, head_dim = _attention(text, hidden)
    spec = ModelSpec(
        family=f"{_FALLBACK}{kind}",
        layers=(Layer(rope=None),) * count,
        hidden=hidden,
        heads=_number(text, "heads", 1, MAX_WIDTH),
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_number(text, "intermediate", 4 * hidden, 1 << 24),
        vocab_size=vocabulary,
        context_length=_number(text, "context", 2048, MAX_CONTEXT),
        ropes=(),
        norm_eps=1e-5,
        attention_scale=1.0,
        tied_head=is_tied,
        state_bytes=_state_bytes(text, hidden),
        is_whole=bool(why_whole(config)),
    )
    return spec, Layout(model, layers)


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _layers(
    count: int, shapes: Mapping[str, tuple[int, ...]], ahead: int
) -> tuple[tuple[dict[str, TensorPlace], ...], str]:
    """By the first number in names: the stack that has all of `count` layers and the most weights; `ahead` more may
    be there that predict further tokens."""
    stacks: dict[str, dict[int, dict[str, TensorPlace]]] = {}
    for name, shape in shapes.items():
        match = _NUMBERED.fullmatch(name)
        if match is not None and len(match[2]) <= 4:
            layer = stacks.setdefault(match[1], {}).setdefault(int(match[2]), {})
            layer[match[3]] = TensorPlace(name, shape)
    whole = {
        prefix: sum(math.prod(place.shape) for layer in found.values() for place in layer.values())
        for prefix, found in stacks.items()
        if all(index in found for index in range(count))
    }
    if not whole:
        raise UnsupportedModelError(f"no tensors of {count} numbered layers are in the checkpoint")
    prefix = max(whole, key=lambda each: (whole[each], each))
    if max(stacks[prefix]) >= count + ahead:
        raise UnsupportedModelError(
            f"the checkpoint has {prefix}.{max(stacks[prefix])}, and its configuration {count} layers"
        )
    return tuple(stacks[prefix][index] for index in range(count)), prefix


def _ends(
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    vocabulary: int,
    layers: tuple[dict[str, TensorPlace], ...],
) -> tuple[dict[str, TensorPlace], bool]:
    """What belongs to no layer: tables of the vocabulary's rows at the ends, the rest with every stage."""
    plain = {
        name: shape
        for name, shape in shapes.items()
        if not re.fullmatch(rf"{re.escape(prefix)}\.\d+\..+", name) and not _OTHER.search(name)
    }
    tables = {
        name: shape
        for name, shape in plain.items()
        if len(shape) == 2 and shape[0] >= vocabulary and not re.search(r"position|wpe", name)
    }
    heads = [name for name in tables if re.search(r"head|embed_out|output", name)]
    embeddings = sorted((name for name in tables if name not in heads), key=lambda name: (len(name), name))
    if not embeddings:
        raise UnsupportedModelError(f"no table of {vocabulary} tokens is in the checkpoint")
    head = heads[0] if heads else embeddings[0]
    rest = [name for name in plain if name not in tables]
    shared_bytes = 4 * sum(math.prod(plain[name]) for name in rest)
    if shared_bytes > _MOST_SHARED_BYTES:
        raise UnsupportedModelError(
            f"{shared_bytes >> 20} MiB of the checkpoint belong to no layer and would go with every stage"
        )
    norms = [name for name in rest if re.search(r"norm|ln_f", name) and len(plain[name]) == 1]
    norm = TensorPlace(norms[-1], plain[norms[-1]]) if norms else _smallest(layers[-1])
    model = {
        "embedding": TensorPlace(embeddings[0], tables[embeddings[0]]),
        "norm": norm,
        "head": TensorPlace(head, tables[head]),
        **{f"{EMBEDDING}{name}": TensorPlace(name, tables[name]) for name in embeddings[1:]},
        **{f"{SHARED}{name}": TensorPlace(name, plain[name]) for name in rest},
    }
    return model, not heads


def _smallest(layer: Mapping[str, TensorPlace]) -> TensorPlace:
    """In the place of a norm, for models whose last one has no weights."""
    return min(layer.values(), key=lambda place: math.prod(place.shape))


def _attention(text: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Heads of keys, and entries of each, by which a token's KV is counted: of layers that attend. Those that do not
    are counted alike; a model without any has next to nothing for each token."""
    if not any(_is_count(text.get(name)) for name in _NAMES["heads"]):
        return 1, 1
    heads = _number(text, "heads", 1, MAX_WIDTH)
    latent = [text.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(isinstance(part, int) for part in latent):
        return heads, max(1, sum(latent))  # type: ignore[arg-type]
    own = text.get("head_dim")
    head_dim = own if isinstance(own, int) and 0 < own <= MAX_WIDTH else max(1, hidden // heads)
    kv_heads = _number(text, "kv_heads", heads, MAX_WIDTH)
    return min(kv_heads, heads), head_dim


def _state_bytes(text: Mapping[str, Any], hidden: int) -> int:
    """Of a recurrent layer and one session, nearly, in 32 bits; 0 for models that have none."""
    state, conv = _number(text, "state", 0, MAX_WIDTH), _number(text, "conv", 0, MAX_WIDTH)
    linear = [text.get(f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim")]
    if all(_is_count(each) for each in linear):
        heads, key, value = (int(each) for each in linear if each is not None)
        numbers = heads * key * value + (conv + 1) * heads * (2 * key + value)
    elif state:
        inner = _number(text, "inner", 0, MAX_WIDTH)
        inner = inner or _number(text, "inner_heads", 0, MAX_WIDTH) * _number(
            text, "inner_head_dim", 0, MAX_WIDTH
        )
        inner = max(inner, _number(text, "expand", 2, 64) * hidden)
        numbers = inner * state + (conv + 1) * (inner + 2 * _number(text, "groups", 1, MAX_WIDTH) * state)
    elif conv and "layer_types" in text:
        numbers = (conv + 1) * 3 * hidden
    else:
        return 0
    return min(int(4 * numbers * _STATE_MARGIN), 1 << 40)


def _number(text: Mapping[str, Any], what: str, default: int | None = None, most: int = MAX_WIDTH) -> int:
    found = next((text[name] for name in _NAMES[what] if text.get(name) is not None), default)
    if isinstance(found, list):
        found = max((each for each in found if isinstance(each, int)), default=default)
    if found is None:
        raise UnsupportedModelError(f"config.json says nothing of {' or '.join(_NAMES[what][:2])}")
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= most:
        raise CorruptModelError(
            f"config.json: {_NAMES[what][0]} is {str(found)[:20]}, where {most} are the most",
            hint="fetch the model again",
        )
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
