"""API keys of the HTTP server: `sk-sc-` and 40 letters and digits, kept as SHA-256 only.

The first 8 of the 40 are the key's public id, by which it is listed and revoked; the other 32 carry 190
random bits. A `KeyBook` is a value: every change returns a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shardcompute.core.errors import AuthError, UsageError
from shardcompute.security.stored import Stored, read_stored, write_stored

KEY_PREFIX = "sk-sc-"
_ID_CHARACTERS = 8
_RANDOM_CHARACTERS = 40
_MAX_LABEL = 80
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is kept of one key."""

    key_id: str
    sha256: bytes = field(repr=False)
    label: str
    created_at_s: float
    is_revoked: bool


@dataclass(frozen=True, slots=True)
class KeySummary:
    """A line of the list of keys: nothing in it helps to guess one."""

    key_id: str
    label: str
    created_at_s: float
    is_revoked: bool


@dataclass(frozen=True, slots=True)
class KeyBook:
    """All API keys of a cluster."""

    records: tuple[KeyRecord, ...] = ()

    def create(
        self, *, label: str, now_s: float, choose: Callable[[Sequence[str]], str] = secrets.choice
    ) -> tuple[KeyBook, str]:
        """(the book with a new key, the key, which is shown once and not kept)."""
        if len(label) > _MAX_LABEL or not label.isprintable():
            raise UsageError(
                "The label of an API key has to fit one line", hint=f"use at most {_MAX_LABEL} characters"
            )
        taken = {record.key_id for record in self.records}
        while True:
            key = KEY_PREFIX + "".join(choose(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))
            if key_id_of(key) not in taken:
                break
        record = KeyRecord(key_id_of(key), _digest(key), label, created_at_s=now_s, is_revoked=False)
        return KeyBook((*self.records, record)), key

    def verify(self, key: str) -> KeySummary:
        """Whose key this is; `AuthError` if it is unknown or revoked."""
        offered = _digest(key)
        # Every digest is compared, so that the time taken does not depend on which one matches.
        matches = [record for record in self.records if hmac.compare_digest(offered, record.sha256)]
        if not matches:
            raise AuthError("The API key is not one that this server accepts", hint="check the key")
        if matches[0].is_revoked:
            raise AuthError(f"The API key {matches[0].key_id} has been revoked", hint="ask for a new key")
        return _summary(matches[0])

    def revoke(self, key_id: str) -> KeyBook:
        """The book in which the key with this id (with or without `sk-sc-`) opens nothing."""
        wanted = KEY_PREFIX + key_id.removeprefix(KEY_PREFIX)
        if wanted not in {record.key_id for record in self.records}:
            raise UsageError(
                f"There is no API key {key_id_of(wanted)}", hint="list the keys to see their ids"
            )
        return KeyBook(
            tuple(
                replace(record, is_revoked=True) if record.key_id == wanted else record
                for record in self.records
            )
        )

    def summaries(self, prefix: str = "") -> tuple[KeySummary, ...]:
        """The keys whose id starts with `prefix`, oldest first."""
        return tuple(_summary(record) for record in self.records if record.key_id.startswith(prefix))

    def to_bytes(self) -> bytes:
        return write_stored(_StoredKeys(1, self.records))

    @classmethod
    def from_bytes(cls, content: bytes) -> KeyBook:
        return cls(read_stored(content, _StoredKeys, "The record of API keys").records)


class _StoredKeys(Stored, frozen=True):
    records: tuple[KeyRecord, ...]


def key_id_of(key: str) -> str:
    """The public part of a key."""
    return key[: len(KEY_PREFIX) + _ID_CHARACTERS]


def _summary(record: KeyRecord) -> KeySummary:
    return KeySummary(record.key_id, record.label, record.created_at_s, record.is_revoked)


def _digest(key: str) -> bytes:
    # A header may hold anything; text that no key has must be refused, not break the comparison.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
