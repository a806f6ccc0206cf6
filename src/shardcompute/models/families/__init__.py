"""Model families as data: what a checkpoint says about itself becomes a spec and a layout.

Owns the readers of `config.json` and of GGUF metadata, and rotary embeddings. A field that nobody reads is refused:
what is silently overlooked would change tokens. May call `models.spec`, `models.layout` and `core`.
"""

from shardcompute.models.families.gguf import LONG_FACTORS, from_gguf, rope_factors_tensor
from shardcompute.models.families.gguf_architectures import GGUF_ARCHITECTURES
from shardcompute.models.families.gguf_foreign import from_foreign_gguf, is_foreign, refuse_foreign
from shardcompute.models.families.hf import HARMLESS, from_hf_config, outline_of_config
from shardcompute.models.families.hf_fallback import (
    EMBEDDING,
    SHARED,
    fallback_type,
    from_fallback_config,
    is_fallback,
    why_whole,
)
from shardcompute.models.families.hf_families import HF_FALLBACKS, HF_FAMILIES, HF_SEEING
from shardcompute.models.families.places import UnknownTensorsError

__all__ = [
    "EMBEDDING",
    "GGUF_ARCHITECTURES",
    "HARMLESS",
    "HF_FALLBACKS",
    "HF_FAMILIES",
    "HF_SEEING",
    "LONG_FACTORS",
    "SHARED",
    "UnknownTensorsError",
    "fallback_type",
    "from_fallback_config",
    "from_foreign_gguf",
    "from_gguf",
    "from_hf_config",
    "is_fallback",
    "is_foreign",
    "outline_of_config",
    "refuse_foreign",
    "rope_factors_tensor",
    "why_whole",
]
