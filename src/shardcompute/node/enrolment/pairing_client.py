"""Pairing client: a machine without a token gets one from a cluster, by a code that people carry between two screens.

The connection is to the coordinator of some cluster. Both sides then prove by the code, without sending it, that they
mean the same cluster (the fingerprint of its authority is part of what is proven); only then is the token believed.
Somebody in between who does not know the code has one guess, and after a wrong one the code is good for nothing.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shardcompute.core.errors import AuthError, LinkError, UsageError, rebuild_error
from shardcompute.core.sockets.connecting import connect_first
from shardcompute.node.enrolment.admission import (
    TIMEOUT_S,
    PairingAnswer,
    PairingGrant,
    PairingProof,
    PairingStart,
    receive,
    send,
)
from shardcompute.node.enrolment.join_client import split_join_address
from shardcompute.security.bootstrap import open_pairing
from shardcompute.security.certificates import certificate_der, fingerprint_of, parse_certificate
from shardcompute.security.pairing.codes import parse_code
from shardcompute.security.pairing.cpace import SESSION_BYTES, agree, begin_exchange, lv_cat, proof_of
from shardcompute.security.tokens import JoinToken, parse_token

_HINT = "make a new code on the cluster's page or with: shardcompute pair"


def pair(address: str, code: str, machine: str, *, others: Sequence[str] = ()) -> JoinToken:
    """A join token for this machine from the cluster that lets machines join at `address` (`host:port`), or at one of
    its `others`, for the code that it shows. AuthError where the code is wrong on either side, LinkError where nobody
    answers."""
    digits = parse_code(code)
    addresses = (address, *others)
    try:
        sock, place = connect_first([split_join_address(each) for each in addresses], TIMEOUT_S)
    except (OSError, LinkError) as error:
        why = error.message if isinstance(error, LinkError) else error.strerror or error
        raise LinkError(
            f"no cluster answers at {', '.join(addresses)}: {why}",
            hint="check the address, and that the cluster listens to other machines (--host 0.0.0.0)",
        ) from error
    address = addresses[place]
    connection, authority_pem = open_pairing(sock)
    fingerprint = fingerprint_of(certificate_der(parse_certificate(authority_pem)))
    session = secrets.token_bytes(SESSION_BYTES)
    share = begin_exchange(digits.encode(), pairing_channel(fingerprint), session)
    with connection:
        try:
            send(connection, msgspec.json.encode(PairingStart(session, share.public, machine)))
            answer = msgspec.json.decode(receive(connection), type=PairingAnswer)
            _check(answer.code, answer.error)
            key = agree(share, session, share.public, answer.share)
            send(connection, msgspec.json.encode(PairingProof(proof_of(key, "initiator"))))
            grant = msgspec.json.decode(receive(connection), type=PairingGrant)
        except (ValueError, RecursionError, OSError) as error:
            raise LinkError(f"the coordinator did not answer as it should: {error}", hint=_HINT) from error
    _check(grant.code, grant.error)
    if not hmac.compare_digest(grant.proof, proof_of(key, "responder")):
        raise AuthError(
            "The machine that answered does not know the code: it is not this cluster", hint=_HINT
        )
    return _reached_at(address, grant.token, fingerprint)


def pairing_channel(fingerprint: str) -> bytes:
    """What both sides must mean: this protocol, and the cluster with this authority."""
    return lv_cat(b"shardcompute pairing 1", fingerprint.encode())


def _reached_at(address: str, text: str, fingerprint: str) -> JoinToken:
    """The token, with the address first at which its cluster has just answered."""
    try:
        token = parse_token(text)
        others = [each for each in token.addresses if each != address]
        reached = replace(token, addresses=(address, *others)[:8])
    except UsageError as error:
        raise LinkError(
            f"the coordinator did not answer as it should: {error.message}", hint=_HINT
        ) from error
    if token.fingerprint != fingerprint:
        raise AuthError("The machine that answered names another cluster than its own", hint=_HINT)
    return reached


def _check(code: str, error: str) -> None:
    if error:
        raise rebuild_error(code, error, _HINT, otherwise=AuthError)
