"""The rotations of a Hugging Face model, whichever way its `config.json` writes them."""

from __future__ import annotations

from dataclasses import replace

from shardcompute.models.families.fields import MAX_CONTEXT, Fields
from shardcompute.models.families.hf_family import HfFamily
from shardcompute.models.families.hf_layers import FULL, SLIDING
from shardcompute.models.families.rope import ROPE_TYPES, ScaledRope, rotary_dim, scaled_rope
from shardcompute.models.spec import Growth, Rope


def hf_ropes(family: HfFamily, fields: Fields, head_dim: int, context_length: int) -> list[ScaledRope]:
    """The model's rotation; for a family with `local_theta` also that of its sliding layers, for one with
    `query_growth` that of queries that grow."""
    original = fields.optional_integer(
        "original_max_position_embeddings", family.original_context, low=2, high=MAX_CONTEXT
    )
    theta = fields.number("rope_theta", family.theta, low=1.0)
    part = fields.number("partial_rotary_factor", _turning_part(family, fields, head_dim), high=1.0)

    def rope(parameters: Fields | None, base: float) -> ScaledRope:
        parameters = parameters or _nothing(family)
        base = parameters.number("rope_theta", base, low=1.0)
        own_part = parameters.number("partial_rotary_factor", part, high=1.0)
        if own_part != 1.0 and family.turning_part is None:
            raise parameters.unsupported("partial_rotary_factor", own_part, "supported: 1.0")
        return scaled_rope(
            parameters,
            _kind(family, parameters),
            theta=base,
            dim=rotary_dim(parameters, head_dim, own_part),
            context_length=context_length,
            original_context=original,
            harmless=family.rope_harmless,
        )

    scaling, parameters = fields.child("rope_scaling"), fields.child("rope_parameters")
    if family.local_theta is None:
        chosen = scaling or parameters or _nothing(family)
        growth = None if family.query_growth is None else family.query_growth(fields, chosen)
        main = rope(chosen, theta)
        return [main] if growth is None else [main, _growing(family, main, growth, head_dim)]
    local_theta = fields.number("rope_local_base_freq", family.local_theta, low=1.0)
    full = sliding = None
    if parameters is not None:
        full, sliding = parameters.child(FULL), parameters.child(SLIDING)
        parameters.refuse_unread(())
    return [rope(scaling or full, _own_theta(full, theta)), rope(sliding, local_theta)]


def _growing(family: HfFamily, main: ScaledRope, growth: Growth, head_dim: int) -> ScaledRope:
    turning = Rope((0.0,) * (head_dim // 2)) if family.grows_still else main.rope
    return replace(main, rope=replace(turning, growth=growth))


def _turning_part(family: HfFamily, fields: Fields, head_dim: int) -> float:
    """When there is no field for it; some files give the number of entries instead."""
    if family.turning_part is None:
        return 1.0
    dim = fields.optional_integer("rotary_dim", high=head_dim)
    return family.turning_part if dim is None else dim / head_dim


def _nothing(family: HfFamily) -> Fields:
    return Fields(family.rope or {}, "the family's own rope parameters")


def _own_theta(parameters: Fields | None, theta: float) -> float:
    """A base stays when `rope_scaling` overrules the rest of the parameters it stands in."""
    return theta if parameters is None else parameters.number("rope_theta", theta, low=1.0)


def _kind(family: HfFamily, parameters: Fields) -> str:
    older = parameters.text("type", "default")
    kind = parameters.text("rope_type", older)
    return parameters.one_of("rope_type", family.rope_types.get(kind, kind), ROPE_TYPES)
