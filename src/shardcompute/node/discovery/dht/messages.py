"""Messages of the distributed hash table, each in one datagram of at most 1,400 bytes.

A request is as long as the longest answer to it may be (it is padded), so that nobody can have us send a third party
more than he sends himself. To store, a node must show a token that we gave its address a moment before: a forged
address gets none.
"""

from __future__ import annotations

import msgspec

from shardcompute.node.discovery.dht.records import SignedRecord

MOST_DATAGRAM_BYTES = 1400
_VERSION = 1
ID_BYTES = 20
MOST_CONTACTS = 8


class Contact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node and where it is."""

    node_id: bytes
    host: str
    port: int


class FindRecord(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Asks for whom we know near `target`, and for a record that is kept there."""

    target: bytes


class KeepRecord(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    record: SignedRecord
    token: bytes


class Neighbours(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """What `FindRecord` is answered with; `token` lets the asker store here for a while."""

    contacts: tuple[Contact, ...]
    token: bytes
    record: SignedRecord | None = None


class RecordKept(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    is_kept: bool


Body = FindRecord | KeepRecord | Neighbours | RecordKept


class Datagram(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`number` ties an answer to its request; `padding` means nothing."""

    version: int
    number: bytes
    sender: bytes
    body: Body
    padding: bytes = b""


def encode(number: bytes, sender: bytes, body: Body) -> bytes:
    """One datagram; requests are filled up."""
    plain = msgspec.msgpack.encode(Datagram(_VERSION, number, sender, body))
    if isinstance(body, FindRecord | KeepRecord):
        padding = bytes(max(0, MOST_DATAGRAM_BYTES - len(plain) - 4))
        plain = msgspec.msgpack.encode(Datagram(_VERSION, number, sender, body, padding))
    return plain


def decode(content: bytes) -> Datagram | None:
    """None for whatever no node of ours sends."""
    if len(content) > MOST_DATAGRAM_BYTES:
        return None
    try:
        said = msgspec.msgpack.decode(content, type=Datagram)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    if said.version != _VERSION or len(said.sender) != ID_BYTES or len(said.number) != 8:
        return None
    if isinstance(said.body, FindRecord) and len(said.body.target) != ID_BYTES:
        return None
    if isinstance(said.body, Neighbours) and not _are_contacts(said.body.contacts):
        return None
    return said


def _are_contacts(contacts: tuple[Contact, ...]) -> bool:
    return len(contacts) <= MOST_CONTACTS and all(
        len(each.node_id) == ID_BYTES
        and 0 < len(each.host) <= 45
        and each.host.isascii()
        and 0 < each.port < 65_536
        for each in contacts
    )
