"""Tickets: what a member shows at a relay, signed by the cluster's authority, for a few hours and one key only.

A relay knows nothing of a cluster but the public key of its authority. A ticket says which node's key it is for, and
whoever shows it must sign a number that the relay has just made up: a ticket that was overheard, or copied from another
node, is of no use. Revoked nodes get no new ticket, so they are out when theirs has run out.
"""

from __future__ import annotations

import base64
import math
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shardcompute.core.errors import AuthError, UsageError
from shardcompute.security.authority import ClusterAuthority
from shardcompute.security.identity import NodeIdentity, verify_signature
from shardcompute.security.names import node_id_of

TICKET_LIFE_S = 7200.0
MOST_TICKET_BYTES = 512
_KEY_PREFIX = "sck1."
_KEY_BYTES = 32
_VERSION = 1
# The same key signs certificates, which never begin with these bytes.
_SIGNING_CONTEXT = b"shardcompute relay ticket v1\x00"
_PROOF = b"relay proof\x00"
_ASK = "the node asks its coordinator for another by itself; check both machines' clocks"


class RelayTicket(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a ticket says: this node, by this key, until then. `attends`: it is a coordinator, to which whoever enters
    may be led."""

    version: int
    public_key: Annotated[bytes, msgspec.Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    expires_at_s: int
    attends: bool = False

    @property
    def node_id(self) -> str:
        return node_id_of(self.public_key)


class _SignedTicket(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    content: bytes
    signature: bytes


def issue_ticket(
    authority: ClusterAuthority,
    public_key: bytes,
    *,
    now_s: float,
    life_s: float = TICKET_LIFE_S,
    attends: bool = False,
) -> bytes:
    """A ticket for the node with this key. Issue it only to a member that is not revoked."""
    ticket = RelayTicket(_VERSION, public_key, math.ceil(now_s + life_s), attends)
    content = msgspec.msgpack.encode(ticket)
    signature = authority.private_key.sign(_SIGNING_CONTEXT + content)
    return msgspec.msgpack.encode(_SignedTicket(content, signature))


def read_ticket(ticket: bytes, cluster_key: bytes, *, now_s: float) -> RelayTicket:
    """What a ticket says, if the authority with this key signed it and it has not run out; else `AuthError`."""
    try:
        if len(ticket) > MOST_TICKET_BYTES:
            raise ValueError("it is too long")
        signed = msgspec.msgpack.decode(ticket, type=_SignedTicket)
        Ed25519PublicKey.from_public_bytes(cluster_key).verify(
            signed.signature, _SIGNING_CONTEXT + signed.content
        )
        read = msgspec.msgpack.decode(signed.content, type=RelayTicket)
        if read.version != _VERSION:
            raise ValueError(f"it has version {read.version}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise AuthError(
            f"the relay ticket cannot be read: {error}", hint="run the same release on every node"
        ) from error
    except InvalidSignature as error:
        raise AuthError(
            "the relay ticket is not of this relay's cluster",
            hint="start the relay with the key that `shardcompute relay --show-key` prints at the coordinator",
        ) from error
    if read.expires_at_s <= now_s:
        raise AuthError(f"the relay ticket expired {now_s - read.expires_at_s:.0f} s ago", hint=_ASK)
    return read


def prove_ticket(identity: NodeIdentity, challenge: bytes, request: bytes) -> bytes:
    """A signature that shows that we are whom our ticket names, good for this challenge and request alone."""
    return identity.sign(_PROOF + challenge + request)


def check_proof(ticket: RelayTicket, proof: bytes, challenge: bytes, request: bytes) -> None:
    """`AuthError` unless `prove_ticket` made this with the ticket's own key."""
    if not verify_signature(ticket.public_key, proof, _PROOF + challenge + request):
        raise AuthError(
            f"the relay ticket of {ticket.node_id} was shown by somebody else",
            hint="every node has a ticket of its own",
        )


def cluster_key_text(authority: ClusterAuthority) -> str:
    """The authority's public key, for people to copy to a relay. It is no secret."""
    raw = authority.private_key.public_key().public_bytes_raw()
    return _KEY_PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def parse_cluster_key(text: str) -> bytes:
    """What `cluster_key_text` printed; `UsageError` for anything else."""
    body = text.strip().removeprefix(_KEY_PREFIX)
    try:
        if body == text.strip():
            raise ValueError("it does not start with sck1.")
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        if len(raw) != _KEY_BYTES:
            raise ValueError(f"it holds {len(raw)} bytes")
        return raw
    except ValueError as error:
        raise UsageError(
            f"this is no cluster's key: {error}",
            hint="copy what `shardcompute relay --show-key` prints at the coordinator",
        ) from error
