"""From a model's card to the sizes that placement works with."""

from __future__ import annotations

from collections.abc import Iterable

from shardcompute.control.sizes import layer_work
from shardcompute.control.state import Model
from shardcompute.weights.card import Card


def describe_card(card: Card, *, kv_tokens: int, context_length: int) -> Model:
    """The sizes of a model as it is served, for placement."""
    spec = card.spec

    def size_of(names: Iterable[str]) -> int:
        return sum(card.entries[name].size_bytes for name in names)

    layer_bytes = tuple(size_of(card.layer_tensors(layer)) for layer in range(spec.layer_count))
    return Model(
        name=card.model,
        layer_bytes=layer_bytes,
        work_bytes=layer_work(spec, layer_bytes),
        embedding_bytes=size_of(card.stored_names(card.layout.model["embedding"])),
        head_bytes=size_of(
            name for part in ("head", "norm") for name in card.stored_names(card.layout.model[part])
        ),
        kv_bytes_per_token_and_layer=spec.kv_bytes_per_token_and_layer,
        kv_tokens=kv_tokens,
        hidden=spec.hidden,
        context_length=context_length,
        weight_form=card.form,
        is_head_tied=spec.tied_head,
    )
