from __future__ import annotations

from msgspec.structs import replace

from shardcompute.control.sizes import LAYER_OVERHEAD_BYTES, layer_weights, layer_work, sizes_of
from shardcompute.models.spec import Experts, Layer, ModelSpec
from support.models.plain_model import plain_model


def spec(**changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "family": "llama",
        "layers": (Layer(),) * 30,
        "hidden": 576,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "intermediate": 1536,
        "vocab_size": 49152,
        "context_length": 8192,
        "ropes": (),
        "norm_eps": 1e-5,
        "attention_scale": 0.125,
        "tied_head": True,
    }
    return ModelSpec(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_135m_model_has_135m_weights() -> None:
    smol = spec()
    weights = [layer_weights(smol, layer) for layer in smol.layers]
    assert round((sum(held for held, _ in weights) + smol.vocab_size * smol.hidden) / 1e6) == 134
    assert all(held == read for held, read in weights)


def test_kv_memory_grows_with_tokens() -> None:
    few, many = (replace(plain_model(), kv_tokens=tokens) for tokens in (0, 1000))
    extra = sizes_of(many).on("").memory_bytes(0, 4) - sizes_of(few).on("").memory_bytes(0, 4)
    assert extra == 4 * 1000 * few.kv_bytes_per_token_and_layer > 0


def test_experts_are_held_whole_but_read_in_part() -> None:
    experts = Experts(count=8, per_token=2, intermediate=512)
    sparse = spec(layers=(Layer(), Layer(is_sparse=True)), experts=experts, tied_head=False)
    (dense_held, dense_read), (held, read) = (layer_weights(sparse, layer) for layer in sparse.layers)
    assert held - read == 6 * 3 * 576 * 512
    assert dense_held == dense_read
    work = layer_work(sparse, (dense_held, held))
    assert work == (dense_read + LAYER_OVERHEAD_BYTES, read + LAYER_OVERHEAD_BYTES)


def test_only_what_is_not_there_is_moved() -> None:
    model = plain_model()
    sizes, layer = sizes_of(model), model.layer_bytes[0]
    assert sizes.bytes_to_move(0, 4, []) == 4 * layer + model.embedding_bytes
    assert sizes.bytes_to_move(0, 4, [(0, 3)]) == layer
    assert sizes.bytes_to_move(4, 6, [(5, 6)]) == layer
    assert sizes.bytes_to_move(4, 6, []) == 2 * layer + model.head_bytes
