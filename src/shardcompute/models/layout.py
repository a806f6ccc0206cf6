"""Tensor layout: where the decoder's tensors lie in a checkpoint.

The decoder asks for tensors by our own names; a family's layout says which checkpoint tensor each comes from
and how it was stored. Names, per layer: `attention.{norm,q,k,v,out,q_norm,k_norm,sinks,post_norm}`,
of latent attention `attention.{q_down,q_latent_norm,kv_down,kv_norm,kv_up}` (`k_up`, `v_up` where those lie apart),
`mlp.{norm,gate,up,down,post_norm,router,choice_bias,shared_score}`, `experts.{e}.{gate,up,down}`,
`shared.{gate,up,down}`; for the whole model `embedding`, `norm`, `head`. A bias has its
matrix's name with `.bias` behind it. Models without a family of ours have more for the whole model: `embedding.…`
that the first stage reads, and `shared.…` that every stage does (see `families`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardcompute.models.spec import Stage

EMBEDDING = "embedding"
"""Begins the names of what the first stage reads before its layers: the table, further ones, and what sees."""
TOWER = "embedding.vision."
"""Begins the names of tensors that see (`models.vision`): they belong to the stage that embeds."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One of our tensors inside a checkpoint.

    `rows` picks a range of the stored tensor's rows (a fused qkv). `every` = (offset, step) picks every
    step-th row (gate and up interleaved). `expert` indexes the leading axis of a tensor that stacks all
    experts' matrices or biases, and `is_transposed` says that a matrix is stored `[in, out]`; rows are
    counted after both. `interleaved_head_dim` undoes a row order in which entries that turn together lie side by
    side, in the first `interleaved_dim` rows of a head (None: in all). `plus_one` adds 1 (Gemma stores
    `weight − 1`). `stored_shape` is the stored tensor's, where that has the same numbers on other axes (heads' matrices
    stacked, one row as a vector, a convolution over patches). `shape` is what the decoder expects after all that.
    """

    stored: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    every: tuple[int, int] | None = None
    expert: int | None = None
    is_transposed: bool = False
    interleaved_head_dim: int | None = None
    interleaved_dim: int | None = None
    plus_one: bool = False
    stored_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a model: `model[name]` and `layers[i][name]`.

    `ignored` are stored names that carry no weights of ours (inverse frequencies, a tied head's copy); a name
    may end in `*`. Everything else that is stored must be used.
    """

    model: Mapping[str, TensorPlace]
    layers: tuple[Mapping[str, TensorPlace], ...]
    ignored: tuple[str, ...] = ()

    def stage_tensors(self, stage: Stage) -> Iterator[tuple[str, TensorPlace]]:
        """What a stage reads, by our names, in the order in which the decoder asks for it."""
        if stage.is_first:
            yield "embedding", self.model["embedding"]
            yield from (each for each in self.model.items() if each[0].startswith("embedding."))
        yield from (each for each in self.model.items() if each[0].startswith("shared."))
        for layer in self.layers[stage.start : stage.stop]:
            yield from layer.items()
        if stage.is_last:
            ends = ("embedding", "shared.")
            yield from (each for each in self.model.items() if not each[0].startswith(ends))

    def stage_places(self, stage: Stage) -> Iterator[TensorPlace]:
        return (place for _, place in self.stage_tensors(stage))
