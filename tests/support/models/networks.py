"""Small random networks, made on the spot, in any weight form."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from shardcompute.backends.matrix import BlockMatrix, DenseMatrix, Float32, Matrix
from shardcompute.core.expert_routing import Routing
from shardcompute.models.spec import Experts, LatentAttention, Layer, ModelSpec, Rope


def rope(dim: int) -> Rope:
    return Rope(tuple(float(f) for f in 10000.0 ** (-np.arange(0, dim, 2) / dim)))


def plain_spec(layers: int = 3) -> ModelSpec:
    """Llama-like, grouped heads."""
    return ModelSpec("plain", (Layer(),) * layers, 96, 6, 2, 32, 160, 320, 1024, (rope(32),), 1e-5, 32**-0.5)


def odd_spec() -> ModelSpec:
    """Everything unusual at once: windows, soft-caps, sinks, norms around and per head, no rotation, one head group."""
    layers = (Layer(0, 40), Layer(None), Layer(0, 7))
    return ModelSpec(
        "odd", layers, 128, 4, 4, 32, 256, 320, 1024, (rope(16),), 1e-5, 1.0, "gelu_tanh", "around", "head",
        attention_softcap=20.0, logit_softcap=10.0, has_sinks=True, embedding_scale=3.0,
        has_qkv_bias=True, has_out_bias=True,
    )  # fmt: skip


def sparse_spec() -> ModelSpec:
    """Experts in one layer, a plain block in the other."""
    layers = (Layer(0, None, True), Layer(0, 5, False))
    return ModelSpec(
        "sparse", layers, 128, 4, 2, 32, 96, 320, 1024, (rope(32),), 1e-5, 32**-0.5, experts=Experts(4, 2, 96)
    )


def routed_spec() -> ModelSpec:
    """DeepSeek's routing: sigmoid scores with a bias for the choice, groups, shared experts."""
    layers = (Layer(), Layer(is_sparse=True))
    routing = Routing(
        "sigmoid", has_choice_bias=True, groups=4, chosen_groups=2, group_by="best_two", scale=2.5
    )
    experts = Experts(8, 3, 96, routing, shared_intermediate=64)
    return ModelSpec(
        "routed", layers, 128, 4, 2, 32, 96, 320, 1024, (rope(32),), 1e-5, 32**-0.5, experts=experts
    )


def latent_spec(q_rank: int | None = 64) -> ModelSpec:
    """DeepSeek's attention: one compressed row per token."""
    latent = LatentAttention(kv_rank=64, plain=32, rotated=16, value=32, q_rank=q_rank)
    return ModelSpec(
        "latent", (Layer(),) * 3, 128, 4, 1, 80, 96, 320, 1024, (rope(16),), 1e-5, 48**-0.5, latent=latent
    )


SPECS = {
    "plain": plain_spec,
    "odd": odd_spec,
    "sparse": sparse_spec,
    "routed": routed_spec,
    "latent": latent_spec,
}


@dataclass(frozen=True)
class RandomTensors:
    """A TensorSource whose tensors depend on their names alone. `bits` 32 is dense, 4 and 8 are blocks of 32."""

    spec: ModelSpec
    bits: int = 32
    has_shifts: bool = False

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        shape = self._shape(name)
        random = self._random(name, layer)
        if self.bits == 32 or name in ("embedding", "mlp.router"):
            return DenseMatrix((random.standard_normal(shape) * 0.08).astype(np.float32))
        blocks = (shape[0], shape[1] // 32)
        codes = random.integers(0, 256, (*blocks, 4 * self.bits), dtype=np.uint8)
        scales = (random.random(blocks) + 0.5).astype(np.float32) * np.float32(0.1 / 2 ** (self.bits - 1))
        shifts = (random.random(blocks) - 0.5).astype(np.float32) * np.float32(0.02)
        return BlockMatrix(self.bits, 32, codes, scales, shifts if self.has_shifts else None)

    def vector(self, name: str, layer: int | None = None) -> Float32:
        spec, random = self.spec, self._random(name, layer)
        kind = name.removesuffix(".bias")
        if kind != name:
            return (random.standard_normal(self._shape(kind)[0]) * 0.05).astype(np.float32)
        width = spec.head_dim if name.endswith(("q_norm", "k_norm")) else spec.hidden
        if spec.latent is not None and name.endswith(("latent_norm", "kv_norm")):
            width = spec.latent.kv_rank if name.endswith("kv_norm") else spec.latent.q_rank or 0
        width = spec.heads if name.endswith("sinks") else width
        if spec.experts is not None and name.endswith("choice_bias"):
            return (0.2 * random.standard_normal(spec.experts.count)).astype(np.float32)
        return (1 + 0.1 * random.standard_normal(width)).astype(np.float32)

    def _random(self, name: str, layer: int | None) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{name} {layer}".encode()))

    def _shape(self, name: str) -> tuple[int, int]:
        spec = self.spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        if spec.latent is not None and name.startswith("attention."):
            return latent_shapes(spec, spec.latent)[name.removeprefix("attention.")]
        wide = spec.intermediate
        if spec.experts is not None and name.startswith(("experts", "shared")):
            is_shared = name.startswith("shared")
            wide = spec.experts.shared_intermediate if is_shared else spec.experts.intermediate
        return {
            "q": (q, spec.hidden),
            "k": (kv, spec.hidden),
            "v": (kv, spec.hidden),
            "out": (spec.hidden, q),
            "gate": (wide, spec.hidden),
            "up": (wide, spec.hidden),
            "down": (spec.hidden, wide),
            "router": (spec.experts.count if spec.experts else 0, spec.hidden),
            "embedding": (spec.vocab_size, spec.hidden),
            "head": (spec.vocab_size, spec.hidden),
        }[name.rsplit(".", 1)[-1]]


def latent_shapes(spec: ModelSpec, latent: LatentAttention) -> dict[str, tuple[int, int]]:
    return {
        "q_down": (latent.q_rank or 0, spec.hidden),
        "q": (spec.heads * (latent.plain + latent.rotated), latent.q_rank or spec.hidden),
        "kv_down": (latent.kv_rank + latent.rotated, spec.hidden),
        "kv_up": (spec.heads * (latent.plain + latent.value), latent.kv_rank),
        "out": (spec.hidden, spec.heads * latent.value),
    }
