"""Shape of a student: which of its parent's layers it begins with, and the plain decoder that it is.

Whatever a parent does besides (scaled rows, windows, stretched rotations) is folded into the student's weights and
frequencies, or left to its teaching, so that a student is of one of three families that every backend runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardcompute.core.errors import UnsupportedModelError, UsageError
from shardcompute.models.families import is_fallback, is_foreign
from shardcompute.models.families.rope import default_frequencies
from shardcompute.models.spec import Layer, ModelSpec, Rope

StudentFamily = Literal["llama", "qwen2", "qwen3"]
_LAYERS_PER_KEPT = 8
_FEWEST, _MOST = 2, 6
_SAME = 1e-5
_ARCHITECTURES: dict[StudentFamily, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class StudentShape:
    """`kept` are the parent's layers that the student's begin as, in order; `spec` is the student itself."""

    family: StudentFamily
    kept: tuple[int, ...]
    spec: ModelSpec

    def config(self, end_ids: Sequence[int], start_id: int | None) -> dict[str, Any]:
        """Its `config.json`."""
        spec = self.spec
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": spec.hidden,
            "intermediate_size": spec.intermediate,
            "num_hidden_layers": spec.layer_count,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.context_length,
            "rms_norm_eps": spec.norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": spec.tied_head,
            "dtype": "float16",
            "bos_token_id": start_id,
            "eos_token_id": list(end_ids),
            **_rope_fields(spec),
        }
        if self.family != "qwen2":
            config["attention_bias"] = spec.has_qkv_bias
        if self.family == "llama":
            config["mlp_bias"] = spec.has_mlp_bias
        return config


def plan_student(parent: ModelSpec, layers: int | Sequence[int] | None = None) -> StudentShape:
    """A student of so many layers, or of these; UnsupportedModelError for a parent that is no plain dense decoder."""
    family = _family(parent)
    kept = choose_layers(parent.layer_count, layers)
    if len({parent.layers[layer].rope for layer in kept}) > 1:
        raise _refusal("its layers turn in different ways")
    rope = parent.ropes[parent.layers[kept[0]].rope or 0]
    context = parent.context_length
    if rope.long_frequencies is not None:
        context = min(context, rope.long_beyond)
    spec = replace(
        parent,
        family=family,
        layers=(Layer(),) * len(kept),
        ropes=(Rope(rope.inverse_frequencies, rope.amplitude),),
        context_length=context,
        attention_scale=parent.head_dim**-0.5,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        # A table that is scaled on its way in is not the one on the way out.
        tied_head=parent.tied_head and parent.embedding_scale == 1.0,
        vision=None,
    )
    return StudentShape(family, kept, spec)


def choose_layers(count: int, wanted: int | Sequence[int] | None) -> tuple[int, ...]:
    """By default one in eight, from the first to the last at equal distances."""
    if wanted is None:
        wanted = min(_MOST, max(_FEWEST, round(count / _LAYERS_PER_KEPT)), max(1, count - 1))
    if isinstance(wanted, int):
        if wanted == 1:
            wanted = (count - 1,)
        else:
            wanted = tuple(round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted))
    chosen = tuple(wanted)
    is_rising = all(before < after for before, after in itertools.pairwise(chosen))
    if not chosen or not is_rising or chosen[0] < 0 or chosen[-1] >= count:
        raise UsageError(
            f"a student cannot begin with the layers {', '.join(map(str, chosen))} of {count}",
            hint=f"name layers from 0 to {count - 1} in rising order, or how many",
        )
    if len(chosen) == count:
        raise UsageError(
            f"a student of all {count} layers would be the model itself", hint="keep fewer with --layers"
        )
    return chosen


def _family(parent: ModelSpec) -> StudentFamily:
    reasons = {
        "another library runs it": is_fallback(parent) or is_foreign(parent),
        "it has experts": parent.experts is not None,
        "its attention is latent": parent.latent is not None,
        "its layers keep states": bool(parent.state_bytes) or parent.is_whole,
        "its norms are not before its blocks": parent.norm_placement != "before" or parent.is_parallel,
        "its norms are centred": parent.norm != "rms" or parent.has_norm_bias,
        f"its activation is {parent.activation}": parent.activation != "silu" or not parent.has_gate,
        "its queries are normed in a way of their own": parent.norms_turned
        or parent.qk_norm not in ("none", "head"),
        "it caps its scores": parent.attention_softcap is not None or parent.logit_softcap is not None,
        "its attention has sinks": parent.has_sinks,
        "its heads turn in part, or not at all": not all(
            _turns_plainly(parent, each) for each in parent.layers
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise _refusal(reason)
    biases = parent.has_qkv_bias, parent.has_out_bias, parent.has_mlp_bias
    if parent.qk_norm == "head" and not parent.has_mlp_bias and biases[0] == biases[1]:
        return "qwen3"
    if parent.qk_norm == "none" and biases == (True, False, False):
        return "qwen2"
    if parent.qk_norm == "none" and biases[0] == biases[1]:
        return "llama"
    raise _refusal("no family that students are of has its biases")


def _turns_plainly(parent: ModelSpec, layer: Layer) -> bool:
    if layer.rope is None or layer.query_rope not in (None, layer.rope):
        return False
    rope = parent.ropes[layer.rope]
    return rope.growth is None and 2 * len(rope.inverse_frequencies) == parent.head_dim


def _refusal(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"students are made of dense decoders like Llama and Qwen, and of this model {why}",
        hint="draft with `shardcompute draft-head train`, or with a smaller model of its family",
    )


def _rope_fields(spec: ModelSpec) -> dict[str, Any]:
    """A base where frequencies have one; else each as a factor of its own, which is what LongRoPE is."""
    rope = spec.ropes[0]
    found, dim = rope.inverse_frequencies, spec.head_dim
    theta = found[1] ** (-dim / 2) if len(found) > 1 else 10_000.0
    theta = round(theta) if abs(round(theta) - theta) < _SAME * theta else theta
    usual = default_frequencies(theta, dim)
    is_usual = all(abs(a - b) <= _SAME * b for a, b in zip(found, usual, strict=True))
    if is_usual and rope.amplitude == 1.0:
        return {"rope_theta": float(theta)}
    theta = 10_000.0
    factors = [a / b for a, b in zip(default_frequencies(theta, dim), found, strict=True)]
    scaling = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": rope.amplitude,
        "original_max_position_embeddings": spec.context_length,
    }
    return {"rope_theta": theta, "rope_scaling": scaling}
