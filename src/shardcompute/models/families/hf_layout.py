"""Where a Hugging Face checkpoint keeps the tensors of a spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardcompute.models.families.hf_family import HfFamily
from shardcompute.models.families.places import Slot, fused_rows, make_layout
from shardcompute.models.layout import Layout, TensorPlace
from shardcompute.models.spec import ModelSpec

_STEMS = ("model.", "model.language_model.", "language_model.model.")
"""Where the text model's tensors begin; behind others in checkpoints that also see."""
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_SPARSE_BLOCKS = ("block_sparse_moe", "mlp", "feed_forward")
_ROUTERS = ("gate", "router", "gate.wg", "router.layer")
_CHOICE_BIASES = {
    "mlp.gate.e_score_correction_bias": None,
    "mlp.e_score_correction_bias": None,
    "block_sparse_moe.e_score_correction_bias": None,
    "mlp.moe_statics.e_score_correction_bias": 0,
    "mlp.gate.moe_statics.e_score_correction_bias": 0,
}
"""With the row that it is, where it is stored as a matrix."""
_STACKS = (
    {"gate": "experts.gate_up_proj", "up": "experts.gate_up_proj", "down": "experts.down_proj"},
    {"gate": "input_linear.weight", "up": "input_linear.weight", "down": "output_linear.weight"},
)
_MLX_EXPERTS = ("switch_mlp", "experts")
"""Where MLX keeps all experts' gates, ups and downs, each stacked to one tensor."""
_BLOCKS = "_blocks"
"""Behind the name of a matrix of stacked experts that is kept in MXFP4, as published for gpt-oss."""
_EXPERT_NAMES = (
    {"gate": "w1", "up": "w3", "down": "w2"},
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
)


def hf_layout(
    spec: ModelSpec, family: HfFamily, stored: Collection[str], ignored: Collection[str] = ()
) -> Layout:
    """`ignored` are stored tensors of what is not run, besides those of the family."""
    names = frozenset(stored)
    locator = _HfLocator(spec, family, names)
    # Old files carry the rotations' frequencies; they follow from the spec.
    frequencies = [f"{locator.stem}rotary_emb.inv_freq"]
    frequencies += [f"{locator.layer(i)}.self_attn.rotary_emb.inv_freq" for i in range(spec.layer_count)]
    copies = _HEADS if spec.tied_head else ()
    ignored = (*frequencies, *copies, *family.ignored, *ignored)
    return make_layout(spec, locator.locate, names, ignored)


class _HfLocator:
    def __init__(self, spec: ModelSpec, family: HfFamily, names: frozenset[str]) -> None:
        self._spec = spec
        self._family = family
        self._names = names
        self.stem = next((stem for stem in _STEMS if f"{stem}embed_tokens.weight" in names), _STEMS[0])
        embedding = f"{self.stem}embed_tokens.weight"
        head = next((head for head in _HEADS if head in names), _HEADS[0])
        self._model = {
            "embedding": embedding,
            "norm": f"{self.stem}norm.weight",
            "norm.bias": f"{self.stem}norm.bias",
            "head": embedding if spec.tied_head else head,
        }

    def layer(self, index: int | None) -> str:
        return f"{self.stem}layers.{index}"

    def locate(self, slot: Slot) -> TensorPlace:
        if slot.layer is None:
            place = slot.at(self._model[slot.name])
        elif slot.expert is not None:
            place = self._expert(slot, *slot.expert)
        elif slot.matrix == "mlp.router":
            place = slot.at(".".join(self._router(slot.layer)) + _suffix(slot))
        elif slot.name == "mlp.choice_bias":
            place = self._choice_bias(slot)
        else:
            place = self._plain(slot)
        return replace(place, plus_one=True) if slot.is_norm and self._family.norms_lack_one else place

    def _plain(self, slot: Slot) -> TensorPlace:
        stored = self._family.names[slot.matrix]
        if slot.matrix == "attention.q" and self._spec.latent is not None and self._spec.latent.q_rank:
            stored = "self_attn.q_b_proj"
        suffix = "" if slot.name == "attention.sinks" else _suffix(slot)
        place = slot.at(f"{self.layer(slot.layer)}.{stored}{suffix}")
        if slot.matrix in self._family.fused:
            place = replace(place, rows=fused_rows(self._spec, slot.matrix))
        if self._family.is_interleaved and slot.matrix in ("attention.q", "attention.k"):
            turning = 2 * len(self._spec.ropes[0].inverse_frequencies)
            place = replace(place, interleaved_head_dim=self._spec.head_dim, interleaved_dim=turning)
        return place

    def _choice_bias(self, slot: Slot) -> TensorPlace:
        for name, row in _CHOICE_BIASES.items():
            if (stored := f"{self.layer(slot.layer)}.{name}") in self._names:
                return replace(slot.at(stored), expert=row)
        return slot.at(f"{self.layer(slot.layer)}.{next(iter(_CHOICE_BIASES))}")

    def _expert(self, slot: Slot, expert: int, part: str) -> TensorPlace:
        block, _ = self._router(slot.layer)
        for names in _STACKS:
            stacked = f"{block}.{names[part]}"
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
        is_blocks = stacked not in self._names
        matrix = stacked + _BLOCKS if is_blocks else stacked
        place = replace(
            slot.at(f"{stacked}_bias" if slot.is_bias else matrix),
            expert=expert,
            is_transposed=self._family.stacks != "halves" and not slot.is_bias and not is_blocks,
        )
        if part == "down":
            return place
        if self._family.stacks == "interleaved":
            return replace(place, every={"gate": (0, 2), "up": (1, 2)}[part])
        return replace(place, rows=self._expert_rows(part))

    def _expert_rows(self, part: str) -> tuple[int, int]:
        width = self._spec.experts.intermediate if self._spec.experts is not None else 0
        return (0, width) if part == "gate" else (width, 2 * width)

    def _router(self, layer: int | None) -> tuple[str, str]:
        """The sparse block of a layer, and the router's name in it."""
        for block in _SPARSE_BLOCKS:
            for router in _ROUTERS:
                if f"{self.layer(layer)}.{block}.{router}.weight" in self._names:
                    return f"{self.layer(layer)}.{block}", router
        return f"{self.layer(layer)}.mlp", "gate"


def _suffix(slot: Slot) -> str:
    return ".bias" if slot.is_bias else ".weight"
