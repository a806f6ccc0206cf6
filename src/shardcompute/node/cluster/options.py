"""Cluster options: where a cluster lives and listens, and how it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardcompute.backends.cpu_choice import CpuBackendChoice
from shardcompute.control import PlacementPolicy
from shardcompute.core.generation import Speculation
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.decoding.drafting import Drafter
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.pool import PATIENCE_S
from shardcompute.node.driver.repair_wait import QUIET_S
from shardcompute.node.reach.cluster_relays import RelayOptions
from shardcompute.security.attestation.policy import AttestationPolicy
from shardcompute.trust.pools import PoolPolicy
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.wire import Transports, default_transports
from shardcompute.wire.codecs.mode import EXACT


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where a cluster lives and listens. Port 0: any free one. `advertise` is the host that others dial."""

    folder: Path
    name: str = "home"
    host: str = "127.0.0.1"
    port: int = 7420
    join_port: int = 7421
    advertise: str = ""
    api_url: str = ""
    """Where clients find the HTTP API of this machine, for other coordinators to say; "": nobody knows."""
    kv_tokens: int = 16_384
    kv_type: KvType = DEFAULT_KV_TYPE
    """What every CPU stage of a model rounds keys and values to, where its order does not say: the same in all of them,
    so that tokens do not depend on where it is cut."""
    context_length: int = 8192
    placing: PlacementPolicy | None = None
    wire: str = EXACT
    """How activations travel between stages, see `codec_choice`."""
    speculation: Speculation = field(default_factory=Speculation)
    patience_s: float = PATIENCE_S
    """So long streams wait for a model that no machines can serve any more."""
    quiet_s: float = QUIET_S
    """So long streams wait for a chain whose repair comes no further; as long as it does, they wait."""
    open_drafters: Callable[[Tokenizer, int], Sequence[Drafter]] = lambda tokenizer, vocab_size: ()
    """Opens what drafts for a model, given its tokenizer and vocabulary's size."""
    transports: Transports = field(default_factory=default_transports)
    """How links are made, by the scheme of their URLs."""
    draft_heads: Path | None = None
    """Where draft heads lie, besides those that come with the package."""
    choose_backend: Callable[[Checkpoint, str], CpuBackendChoice] | None = None
    """What computes a model in a form on CPUs whose owners left that open; None: each by its own backend."""
    also_at: tuple[str, ...] = ()
    """Other hosts by which it is reached, such as an IPv4 address beside an IPv6 one."""
    relays: RelayOptions = field(default_factory=RelayOptions)
    """Where nodes meet that cannot dial each other."""
    audit_rate: float = 0.0
    """The share of what machines of good reputation compute that is computed again elsewhere; 0: nothing is audited."""
    pool: PoolPolicy | None = None
    """By which machines come in without a token; None: nobody does."""
    has_receipts: bool = False
    """Every answer has a receipt, whether or not it was asked for."""
    canaries_every_s: float = 0.0
    """How often, on average, known prompts are asked to see whether answers have changed; 0: never."""
    attestation: AttestationPolicy | None = None
    """What evidence of their hardware workers have to show; None: none."""
    recovers_journal: bool = False
    """Go on with what is left of a journal that is missing or damaged."""

    @property
    def has_audits(self) -> bool:
        """What strangers compute is audited wholly, whatever the rate for others."""
        return self.audit_rate > 0.0 or self.pool is not None
