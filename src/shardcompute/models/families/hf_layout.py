"""Where a Hugging Face checkpoint keeps the tensors of a spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardcompute.models.families.hf_family import HfFamily
from shardcompute.models.families.places import Slot, fused_rows, make_layout
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import ModelSpec

_HEAD = "lm_head.weight"
_SPARSE_BLOCKS = ("block_sparse_moe", "mlp")
_ROUTERS = ("gate", "router")
_WHOLE_NAMES = ("attention.sinks", "mlp.choice_bias")
"""Tensors whose stored names end without `.weight`."""
_MLX_EXPERTS = ("switch_mlp", "experts")
"""Where MLX keeps all experts' gates, ups and downs, each stacked to one tensor."""
_BLOCKS = "_blocks"
"""Behind the name of a matrix of stacked experts that is kept in MXFP4, as published for gpt-oss."""
_EXPERT_NAMES = (
    {"gate": "w1", "up": "w3", "down": "w2"},
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
)


def hf_layout(spec: ModelSpec, family: HfFamily, stored: Collection[str], extra_layers: int = 0) -> Layout:
    """`extra_layers` behind the last are in the file and not in the spec."""
    names = frozenset(stored)
    locator = _HfLocator(spec, family, names)
    # Old files carry the rotations' frequencies; they follow from the spec.
    ignored = ["model.rotary_emb.inv_freq"]
    ignored += [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(spec.layer_count)]
    ignored += [f"model.layers.{spec.layer_count + i}.*" for i in range(extra_layers)]
    if spec.tied_head:
        ignored.append(_HEAD)
    return make_layout(spec, locator.locate, names, tuple(ignored))


class _HfLocator:
    def __init__(self, spec: ModelSpec, family: HfFamily, names: frozenset[str]) -> None:
        self._spec = spec
        self._family = family
        self._names = names
        self._model = {
            "embedding": "model.embed_tokens.weight",
            "norm": "model.norm.weight",
            "norm.bias": "model.norm.bias",
            "head": "model.embed_tokens.weight" if spec.tied_head else _HEAD,
        }

    def locate(self, slot: Slot) -> TensorPlace:
        if slot.layer is None:
            place = slot.at(self._model[slot.name])
        elif slot.expert is not None:
            place = self._expert(slot, *slot.expert)
        elif slot.matrix == "mlp.router":
            place = slot.at(self._router(slot.layer) + _suffix(slot))
        else:
            place = self._plain(slot)
        return replace(place, plus_one=True) if slot.is_norm and self._family.norms_lack_one else place

    def _plain(self, slot: Slot) -> TensorPlace:
        stored = self._family.names[slot.matrix]
        if slot.matrix == "attention.q" and self._spec.latent is not None and self._spec.latent.q_rank:
            stored = "self_attn.q_b_proj"
        suffix = "" if slot.name in _WHOLE_NAMES else _suffix(slot)
        place = slot.at(f"model.layers.{slot.layer}.{stored}{suffix}")
        if slot.matrix in self._family.fused:
            place = replace(place, rows=fused_rows(self._spec, slot.matrix))
        if self._family.is_interleaved and slot.matrix in ("attention.q", "attention.k"):
            turning = 2 * len(self._spec.ropes[0].inverse_frequencies)
            place = replace(place, interleaved_head_dim=self._spec.head_dim, interleaved_dim=turning)
        return place

    def _expert(self, slot: Slot, expert: int, part: str) -> TensorPlace:
        block = self._router(slot.layer).rsplit(".", 1)[0]
        stacked = f"{block}.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        if stacked in self._names or stacked + _BLOCKS in self._names:
            return self._stacked(slot, stacked, expert, part)
        for holder in _MLX_EXPERTS:
            stacked = f"{block}.{holder}.{part}_proj"
            if f"{stacked}.weight" in self._names:
                return replace(slot.at(stacked + _suffix(slot)), expert=expert)
        by_name = _EXPERT_NAMES[0]
        if f"{block}.experts.{expert}.{by_name[part]}.weight" not in self._names:
            by_name = _EXPERT_NAMES[1]
        return slot.at(f"{block}.experts.{expert}.{by_name[part]}{_suffix(slot)}")

    def _stacked(self, slot: Slot, stacked: str, expert: int, part: str) -> TensorPlace:
        if self._family.has_sinks:  # gpt-oss: gate and up interleaved, [experts, in, out] unless in blocks
            is_blocks = stacked not in self._names
            matrix = stacked + _BLOCKS if is_blocks else stacked
            place = replace(
                slot.at(f"{stacked}_bias" if slot.is_bias else matrix),
                expert=expert,
                is_transposed=not slot.is_bias and not is_blocks,
            )
            every = {"gate": (0, 2), "up": (1, 2), "down": None}[part]
            return replace(place, every=every)
        place = replace(slot.at(stacked), expert=expert)
        return place if part == "down" else replace(place, rows=self._expert_rows(part))

    def _expert_rows(self, part: str) -> tuple[int, int]:
        width = self._spec.experts.intermediate if self._spec.experts is not None else 0
        return (0, width) if part == "gate" else (width, 2 * width)

    def _router(self, layer: int | None) -> str:
        prefix = f"model.layers.{layer}"
        for block in _SPARSE_BLOCKS:
            for router in _ROUTERS:
                if f"{prefix}.{block}.{router}.weight" in self._names:
                    return f"{prefix}.{block}.{router}"
        return f"{prefix}.mlp.gate"


def _suffix(slot: Slot) -> str:
    return ".bias" if slot.is_bias else ".weight"
