"""Join client, how a machine becomes a node: it shows a join token and goes away with a certificate.

It first makes sure that it talks to the cluster that the token names (see `security.bootstrap`); only then does it
send the token's secret.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from shardcompute.core.errors import AuthError, LinkError, UsageError, rebuild_error
from shardcompute.core.sockets.connecting import ConnectError, connect_first
from shardcompute.core.sockets.hosts import with_host
from shardcompute.node.enrolment.admission import (
    TIMEOUT_S,
    Admission,
    Application,
    Companion,
    receive,
    send,
)
from shardcompute.relay.client import RelayDoor
from shardcompute.relay.tunnel import door_url
from shardcompute.security.bootstrap import open_join
from shardcompute.security.credentials import Credentials
from shardcompute.security.identity import NodeIdentity
from shardcompute.security.names import Role
from shardcompute.security.token_book import MOST_COMPANIONS
from shardcompute.security.tokens import JoinToken


def join_cluster(
    token: JoinToken, folder: Path, role: Role, through: str = "", evidence: bytes = b""
) -> tuple[Credentials, list[str]]:
    """Join with a token: this node's credentials, saved in `folder`, and the coordinator's control URLs.

    Tries the token's addresses side by side, the first with a head start, or only `through`, a door of the
    coordinator's relay. Raises AuthError when the token is refused, LinkError when nobody answers.
    """
    [credentials], urls = join_together(token, [folder], role, through, evidence)
    return credentials, urls


def join_together(
    token: JoinToken, folders: Sequence[Path], role: Role, through: str = "", evidence: bytes = b""
) -> tuple[list[Credentials], list[str]]:
    """Like `join_cluster` for several nodes of this machine at once: they use the token once. Evidence of its hardware
    is about one node's key."""
    if evidence and len(folders) > 1:
        raise UsageError(
            "evidence is about the key of one worker", hint="join with one --device, and a folder for each"
        )
    if len(folders) > MOST_COMPANIONS + 1:
        raise UsageError(
            f"{len(folders)} places of one machine are more than can join", hint="name fewer with --device"
        )
    identities = [NodeIdentity.open(folder) for folder in folders]
    first, *others = [(each.node_id, each.certificate_request()) for each in identities]
    companions = [Companion(*other) for other in others]
    application = Application(token.token_id, token.secret, role.value, *first, companions, evidence)
    failures: dict[str, str] = {}
    left = [through] if through else list(token.addresses)
    while left:
        try:
            sock, address = _connect_any(left, failures)
        except LinkError as error:
            failures = failures or {left[0]: error.message}
            break
        left.remove(address)
        try:
            return _apply(sock, address, token, identities, application)
        except LinkError as error:
            failures[address] = error.message
    told = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
    raise LinkError(
        f"the cluster {token.cluster} cannot be reached ({told})",
        hint="check that the coordinator is running and that its ports are open to this machine",
    )


def _apply(
    sock: socket.socket,
    address: str,
    token: JoinToken,
    identities: Sequence[NodeIdentity],
    application: Application,
) -> tuple[list[Credentials], list[str]]:
    connection, authority_pem = open_join(sock, token)
    with connection:
        try:
            send(connection, msgspec.json.encode(application))
            admission = msgspec.json.decode(receive(connection), type=Admission)
        except (ValueError, RecursionError, OSError) as error:
            raise LinkError(f"the coordinator did not answer as it should: {error}") from error
    if admission.error:
        hint = "ask the operator of the pool" if token.is_public else "ask the coordinator for a new token"
        raise rebuild_error(admission.code, admission.error, hint, otherwise=AuthError)
    issued = [admission.certificate_pem, *admission.companion_pems]
    if len(issued) != len(identities):
        raise LinkError(f"the coordinator answered with {len(issued)} certificates for {len(identities)}")
    credentials = [
        Credentials(identity, certificate, authority_pem)
        for identity, certificate in zip(identities, issued, strict=True)
    ]
    for each in credentials:
        each.save()
    is_door = "://" in address
    host = urlsplit(address).hostname or "" if is_door else split_join_address(address)[0]
    # A coordinator that listens everywhere names no host: the one that answered is it.
    urls = [with_host(url, host) for url in admission.control_urls]
    return credentials, list(dict.fromkeys([door_url(address), *urls])) if is_door else urls


def _connect_any(addresses: Sequence[str], failures: dict[str, str]) -> tuple[socket.socket, str]:
    """To where machines join, or to the door of a relay that leads there; and which of these it was. LinkError, and in
    `failures` why, where none answers."""
    if "://" in addresses[0]:
        with RelayDoor(addresses[0], TIMEOUT_S) as door:
            return door.enter("join", TIMEOUT_S), addresses[0]
    try:
        sock, place = connect_first([split_join_address(each) for each in addresses], TIMEOUT_S)
    except ConnectError as error:
        failures |= {addresses[place]: f"no connection: {reason}" for place, reason in error.reasons.items()}
        raise LinkError(f"no connection: {error.strerror}") from error
    return sock, addresses[place]


def split_join_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, where an IPv6 address may have brackets. LinkError for anything else."""
    host, _, port = address.rpartition(":")
    try:
        return host.strip("[]"), int(port)
    except ValueError as error:
        raise LinkError(f"{address[:80]!r} is no address to join at", hint="ask for a new token") from error
