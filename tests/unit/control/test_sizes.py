from __future__ import annotations

from shardcompute.control import describe_model
from shardcompute.control.sizes import sizes_of
from shardcompute.models.spec import Experts, Layer, ModelSpec


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
    model = describe_model("smol", spec(), weight_form="f32", bytes_per_weight=4, kv_tokens=0)
    assert round(sizes_of(model).total_bytes / 4e6) == 134
    assert model.work_bytes == model.layer_bytes


def test_kv_memory_grows_with_tokens() -> None:
    few, many = (
        describe_model("smol", spec(), weight_form="int8", bytes_per_weight=1, kv_tokens=tokens)
        for tokens in (0, 1000)
    )
    extra = sizes_of(many).memory_bytes(0, 10) - sizes_of(few).memory_bytes(0, 10)
    assert extra == 10 * 1000 * 2 * 4 * 3 * 64


def test_experts_are_held_whole_but_read_in_part() -> None:
    experts = Experts(count=8, per_token=2, intermediate=512)
    sparse = spec(layers=(Layer(), Layer(is_sparse=True)), experts=experts, tied_head=False)
    model = describe_model("moe", sparse, weight_form="int8", bytes_per_weight=1, kv_tokens=0)
    one = 3 * 576 * 512
    assert model.layer_bytes[1] - model.work_bytes[1] == 6 * one
    assert model.work_bytes[0] == model.layer_bytes[0]


def test_only_what_is_not_there_is_moved() -> None:
    model = describe_model("smol", spec(), weight_form="int8", bytes_per_weight=1, kv_tokens=0)
    sizes, layer = sizes_of(model), model.layer_bytes[0]
    assert sizes.bytes_to_move(0, 4, []) == 4 * layer + model.embedding_bytes
    assert sizes.bytes_to_move(0, 4, [(0, 3)]) == layer
    assert sizes.bytes_to_move(28, 30, [(29, 30)]) == layer
    assert sizes.bytes_to_move(0, 30, []) == 30 * layer + model.embedding_bytes
