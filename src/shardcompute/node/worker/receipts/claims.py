"""Claims of stages: what a worker says it computes layers with, for receipts."""

from __future__ import annotations

from collections.abc import Callable

from shardcompute.backends.devices import ComputeDevice
from shardcompute.backends.processor import own_class, own_fallback_class
from shardcompute.core.kv_types import KvType
from shardcompute.models.families import is_fallback
from shardcompute.models.spec import Stage
from shardcompute.security.receipts.records import StageClaim
from shardcompute.version import VERSION
from shardcompute.weights.card import Card

ClaimStage = Callable[[Card, Stage, str, KvType], StageClaim]
"""What is claimed of layers that this backend computes."""


def claim_stage(device: ComputeDevice, card: Card, stage: Stage, backend: str, kv_type: KvType) -> StageClaim:
    """Of nobody yet: whose it is, and who computes it together, is known once it is in a chain."""
    if is_fallback(card.spec):
        exactness = own_fallback_class(device)
    else:
        exactness = own_class(device, backend=backend, kv_type=kv_type).name
    return StageClaim(
        node="",
        start=stage.start,
        stop=stage.stop,
        is_last=stage.is_last,
        model=card.model,
        fingerprint=card.fingerprint,
        form=card.form,
        exactness=exactness,
        version=VERSION,
    )
