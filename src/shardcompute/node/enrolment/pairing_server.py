"""Pairing server: the coordinator's side of a machine that has a code instead of a token (see `pairing_client`)."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Callable

import msgspec

from shardcompute.core.errors import AuthError, ShardComputeError
from shardcompute.core.fields import shorten
from shardcompute.node.enrolment.admission import (
    PairingAnswer,
    PairingGrant,
    PairingProof,
    PairingStart,
    receive,
    send,
)
from shardcompute.node.enrolment.pairing_client import pairing_channel
from shardcompute.security.pairing.codes import PairingCode, PairingDesk
from shardcompute.security.pairing.cpace import SESSION_BYTES, SHARE_BYTES, agree, begin_exchange, proof_of

_MOST_CHARACTERS = 64


class PairingServer:
    """Pairs machines with one cluster. `grant` makes a token for the machine of this name; `on_refused` hears that
    somebody had a wrong code."""

    def __init__(
        self,
        desk: PairingDesk,
        fingerprint: str,
        grant: Callable[[str], str],
        on_refused: Callable[[str], None] = lambda machine: None,
    ) -> None:
        self._desk = desk
        self._channel = pairing_channel(fingerprint)
        self._grant = grant
        self._on_refused = on_refused

    def answer(self, connection: ssl.SSLSocket, start: PairingStart) -> None:
        """One exchange. Raises, after having told the machine, where that did not lead to a token."""
        machine = _plain(start.machine)
        try:
            code, key = self._exchange(connection, start)
        except ShardComputeError as error:
            send(connection, msgspec.json.encode(PairingAnswer(b"", error.message, type(error).__name__)))
            raise
        proof = _decode_proof(receive(connection))
        try:
            self._settle(code, proof, key, machine)
            granted = PairingGrant(proof_of(key, "responder"), self._grant(machine))
        except ShardComputeError as error:
            send(connection, msgspec.json.encode(PairingGrant(b"", "", error.message, type(error).__name__)))
            raise
        send(connection, msgspec.json.encode(granted))

    def _exchange(self, connection: ssl.SSLSocket, start: PairingStart) -> tuple[PairingCode, bytes]:
        """Our share is worth nothing to whoever does not know the code, and says nothing about it."""
        if len(start.session) != SESSION_BYTES or len(start.share) != SHARE_BYTES:
            raise AuthError("The request to pair cannot be understood")
        code = self._desk.begin()
        share = begin_exchange(code.digits.encode(), self._channel, start.session)
        key = agree(share, start.session, start.share, share.public)
        send(connection, msgspec.json.encode(PairingAnswer(share.public)))
        return code, key

    def _settle(self, code: PairingCode, proof: bytes, key: bytes, machine: str) -> None:
        is_right = hmac.compare_digest(proof, proof_of(key, "initiator"))
        try:
            self._desk.settle(code, is_right=is_right)
        except AuthError:
            if not is_right:
                self._on_refused(machine)
            raise


def _decode_proof(content: bytes) -> bytes:
    """Nonsense is a wrong proof: it must use the code up like any other."""
    try:
        return msgspec.json.decode(content, type=PairingProof).proof
    except (ValueError, RecursionError):
        return b""


def _plain(name: str) -> str:
    """What a stranger calls its machine, fit to be shown."""
    return shorten("".join(each for each in name if each.isprintable()), _MOST_CHARACTERS) or "a machine"
