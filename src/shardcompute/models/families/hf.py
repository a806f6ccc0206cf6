"""Config reader: from a Hugging Face `config.json` and the names of the stored tensors to a spec and a layout.

Both the old way to write rotary parameters (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`)
are understood, experts stored one by one and stacked. Every field is honoured, known to be harmless, or
refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError
from shardcompute.models.families.fields import (
    FALLBACK_HINT,
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_VOCABULARY,
    Fields,
)
from shardcompute.models.families.hf_deepseek import latent_heads
from shardcompute.models.families.hf_families import HF_FALLBACKS, HF_FAMILIES, HF_SEEING
from shardcompute.models.families.hf_family import HfFamily
from shardcompute.models.families.hf_layout import hf_layout
from shardcompute.models.families.hf_rope import hf_ropes
from shardcompute.models.families.places import layer_slots, model_slots
from shardcompute.models.families.rope import check_head_dim
from shardcompute.models.layout import Layout
from shardcompute.models.spec import Activation, ModelSpec, QkNorm

_WHERE = "config.json"

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_UNGATED_ACTIVATIONS: Mapping[str, Activation] = {**_ACTIVATIONS, "relu2": "relu2"}

_SEEING_FIELDS = frozenset(
    {
        "image_token_id",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    }
)
_SEEING_TENSORS = tuple(
    f"{stem}{part}.*"
    for stem in ("", "model.")
    for part in ("multi_modal_projector", "vision_model", "vision_tower", "visual")
)

# Written by trainers, tokenizers, generation settings and tools; none of them changes a logit.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "max_sequence_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


def from_hf_config(
    config: Mapping[str, Any], stored: Collection[str], spare: Collection[str] = ()
) -> tuple[ModelSpec, Layout]:
    """Spec and layout of a checkpoint with tensors `stored`, of which the family need not have those in `spare`.

    Raises UnsupportedModelError for what we would run wrongly, CorruptModelError for what cannot be true.
    """
    outer = config.get("model_type")
    sees = isinstance(outer, str) and outer in HF_SEEING
    if sees:
        config = _text_part(config, stored)
    name, family = _family(Fields(config, _WHERE))
    fields = Fields({**family.defaults, **config}, f"{_WHERE}, text part" if sees else _WHERE)
    fields.text("model_type")
    spec = _spec(name, family, fields, len(stored))
    # Layers behind the last, which predict further tokens and which we do not run.
    ahead = fields.integer("num_nextn_predict_layers", family.predicts, low=0, high=MAX_LAYERS)
    fields.refuse_unread(HARMLESS | family.harmless)
    ignored = [f"model.layers.{spec.layer_count + i}.*" for i in range(ahead)]
    return spec, hf_layout(spec, family, stored, [*ignored, *spare, *(_SEEING_TENSORS if sees else ())])


def outline_of_config(config: Mapping[str, Any]) -> tuple[ModelSpec, Layout]:
    """Spec and layout of a model of which there is only a config: tensors are called by our own names."""
    name, family = _family(Fields(config, _WHERE))
    fields = Fields({**family.defaults, **config}, _WHERE)
    fields.text("model_type")
    spec = _spec(name, family, fields, MAX_LAYERS)
    fields.refuse_unread(HARMLESS | family.harmless)
    layers = [[(slot, f"{i}.{slot.name}") for slot in layer_slots(spec, i)] for i in range(spec.layer_count)]
    return spec, Layout(
        model={
            slot.name: slot.at("embedding" if slot.name == "head" and spec.tied_head else slot.name)
            for slot in model_slots(spec)
        },
        layers=tuple({slot.name: slot.at(stored) for slot, stored in layer} for layer in layers),
    )


def _text_part(config: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """The fields of the text model inside one that also sees; older files do not set them apart."""
    inner = config.get("text_config")
    flat = {name: value for name, value in config.items() if name not in _SEEING_FIELDS}
    text = dict(inner) if isinstance(inner, Mapping) else {**flat, "model_type": ""}
    text["model_type"] = text.get("model_type") or HF_SEEING[config["model_type"]]
    # The outer and the inner field contradict each other in published files.
    text["tie_word_embeddings"] = not any(name.endswith("lm_head.weight") for name in stored)
    return text


def _family(fields: Fields) -> tuple[str, HfFamily]:
    name = fields.text("model_type")
    if name in HF_FAMILIES:
        return name, HF_FAMILIES[name]
    if name in HF_FALLBACKS:
        raise UnsupportedModelError(
            f"{_WHERE}: a {name} model {HF_FALLBACKS[name]}, which our own backends do not run",
            hint=FALLBACK_HINT,
        )
    near = difflib.get_close_matches(name[:64], HF_FAMILIES, n=1, cutoff=0.0)[0]
    if fields.child("text_config") is not None or fields.child("vision_config") is not None:
        raise UnsupportedModelError(
            f"{_WHERE}: model_type {name[:64]!r} is a model for more than text, which we do not run",
            hint=f"use a text-only checkpoint (nearest supported family: {near}); {FALLBACK_HINT}",
        )
    raise UnsupportedModelError(
        f"{_WHERE}: model_type {name[:64]!r} is not supported",
        hint=f"the nearest supported family is {near}; {FALLBACK_HINT}",
    )


def _spec(name: str, family: HfFamily, fields: Fields, stored_count: int) -> ModelSpec:
    layer_count = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    if layer_count > stored_count:
        raise CorruptModelError(
            f"{_WHERE}: num_hidden_layers is {layer_count}, but the checkpoint holds {stored_count} tensors",
            hint="fetch the model again, all its files",
        )
    hidden = fields.integer("hidden_size")
    latent = None if family.latent is None else family.latent(fields)
    if latent is None:
        heads, kv_heads, head_dim = _heads(family, fields, hidden)
    else:
        heads, kv_heads, head_dim = latent_heads(fields, latent)
    context = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    ropes = hf_ropes(family, fields, head_dim if latent is None else latent.rotated, context)
    biases = family.biases(fields)
    scales = family.scales(fields, hidden, head_dim)
    return ModelSpec(
        family=name,
        layers=family.layers(fields, layer_count),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.integer(family.intermediate_field, family.intermediate),
        vocab_size=fields.integer("vocab_size", high=MAX_VOCABULARY),
        context_length=min(rope.context_length for rope in ropes),
        ropes=tuple(rope.rope for rope in ropes),
        norm_eps=fields.number(family.norm_eps_field, family.norm_eps, high=1.0),
        attention_scale=scales.attention,
        activation=_activation(family, fields),
        has_gate=family.has_gate,
        norm=family.norm,
        has_norm_bias=family.has_norm_bias,
        norm_placement=family.norm_placement,
        is_parallel=family.is_parallel,
        qk_norm=_qk_norm(family, fields),
        norms_turned=family.norms_turned,
        has_qkv_bias=biases.qkv,
        has_out_bias=biases.out,
        has_mlp_bias=biases.mlp,
        has_sinks=family.has_sinks,
        embedding_scale=scales.embedding,
        residual_scale=scales.residual,
        logit_scale=scales.logits,
        attention_softcap=_attention_softcap(family, fields),
        logit_softcap=_softcap(family, fields, "final_logit_softcapping", family.logit_softcap),
        tied_head=fields.flag("tie_word_embeddings", family.is_tied),
        experts=family.experts(fields) if family.experts is not None else None,
        latent=latent,
    )


def _heads(family: HfFamily, fields: Fields, hidden: int) -> tuple[int, int, int]:
    heads = fields.integer("num_attention_heads", high=MAX_HEAD_DIM)
    kv_heads = fields.optional_integer("num_key_value_heads", family.kv_heads, high=MAX_HEAD_DIM) or heads
    if heads % kv_heads:
        raise fields.corrupt("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.optional_integer("head_dim", family.head_dim, high=MAX_HEAD_DIM)
    if head_dim is None:
        if hidden % heads:
            raise fields.corrupt("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
        head_dim = hidden // heads
    return heads, kv_heads, check_head_dim(fields, "head_dim", head_dim)


def _qk_norm(family: HfFamily, fields: Fields) -> QkNorm:
    switch = family.qk_norm_field
    return family.qk_norm if switch is None or fields.flag(*switch) else "none"


def _activation(family: HfFamily, fields: Fields) -> Activation:
    if family.has_sinks:  # gpt-oss has an activation of its own
        return "silu"
    if not family.is_gemma:
        known = _ACTIVATIONS if family.has_gate else _UNGATED_ACTIVATIONS
        return known[fields.one_of("hidden_act", fields.text("hidden_act", family.activation), known)]
    fields.text("hidden_act", "")  # older Gemma files carry it; hidden_activation is what counts
    name = fields.text("hidden_activation", "gelu_pytorch_tanh")
    return _ACTIVATIONS[fields.one_of("hidden_activation", name, _ACTIVATIONS)]


def _softcap(family: HfFamily, fields: Fields, name: str, absent: float | None) -> float | None:
    return fields.optional_number(name, absent, low=1e-3) if family.is_gemma else None


def _attention_softcap(family: HfFamily, fields: Fields) -> float | None:
    cap = _softcap(family, fields, "attn_logit_softcapping", family.attention_softcap)
    if cap is not None and family.attention_softcap is None:
        raise fields.unsupported("attn_logit_softcapping", cap, f"supported: null; {FALLBACK_HINT}")
    return cap
