"""API keys of the HTTP server: `sk-sc-` and 40 letters and digits, kept as SHA-256 only.

The first 8 of the 40 are the key's public id, by which it is listed and revoked; the other 32 carry 190
random bits. Each has a role; those that only use models may be bounded further. A `KeyBook` is a value: every
change returns a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shardcompute.core.errors import AuthError, UsageError
from shardcompute.security.stored import Stored, read_stored, write_stored

KEY_PREFIX = "sk-sc-"
_ID_CHARACTERS = 8
_RANDOM_CHARACTERS = 40
_MAX_LABEL = 80
_MAX_MODELS = 64
_MAX_MODEL_NAME = 512
_MAX_RATE = 100_000
_MAX_TOKENS = 10**12
_MAX_LIFE_S = 10 * 366 * 86_400.0
_ALPHABET = string.ascii_letters + string.digits


class KeyRole(StrEnum):
    """What a key is for; each role may do what those before it may."""

    USE = "use"
    """Ask models, and see what was asked with this key."""
    OBSERVE = "observe"
    """See the cluster: state, events, requests, usage, metrics."""
    OPERATE = "operate"
    """Change it: models, machines, join tokens, keys."""

    def includes(self, other: KeyRole) -> bool:
        order = list(KeyRole)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What bounds a key of role `use`; None: nothing."""

    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    """Of prompts and answers together, from midnight to midnight UTC."""


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is kept of one key."""

    key_id: str
    sha256: bytes = field(repr=False)
    label: str
    created_at_s: float
    is_revoked: bool
    role: KeyRole
    limits: KeyLimits
    expires_at_s: float | None


@dataclass(frozen=True, slots=True)
class KeySummary:
    """A line of the list of keys: nothing in it helps to guess one."""

    key_id: str
    label: str = ""
    created_at_s: float = 0.0
    is_revoked: bool = False
    role: KeyRole = KeyRole.USE
    limits: KeyLimits = NO_LIMITS
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class KeyBook:
    """All API keys of a cluster."""

    records: tuple[KeyRecord, ...] = ()

    def create(
        self,
        *,
        label: str,
        now_s: float,
        role: KeyRole = KeyRole.USE,
        limits: KeyLimits = NO_LIMITS,
        life_s: float | None = None,
        choose: Callable[[Sequence[str]], str] = secrets.choice,
    ) -> tuple[KeyBook, str]:
        """(the book with a new key, the key, which is shown once and not kept). `life_s` None: until it is revoked."""
        if len(label) > _MAX_LABEL or not label.isprintable():
            raise UsageError(
                "The label of an API key has to fit one line", hint=f"use at most {_MAX_LABEL} characters"
            )
        _check_limits(role, limits)
        if life_s is not None and not (math.isfinite(life_s) and 0 < life_s <= _MAX_LIFE_S):
            raise UsageError("An API key lives more than 0 and at most 3660 days", hint="choose another time")
        taken = {record.key_id for record in self.records}
        while True:
            key = KEY_PREFIX + "".join(choose(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))
            if key_id_of(key) not in taken:
                break
        record = KeyRecord(
            key_id_of(key),
            _digest(key),
            label,
            created_at_s=now_s,
            is_revoked=False,
            role=role,
            limits=limits,
            expires_at_s=None if life_s is None else now_s + life_s,
        )
        return KeyBook((*self.records, record)), key

    def find(self, key: str, *, now_s: float) -> KeySummary | None:
        """Whose key this is, None if it is unknown; `AuthError` if it was good once."""
        offered = _digest(key)
        # Every digest is compared, so that the time taken does not depend on which one matches.
        matches = [record for record in self.records if hmac.compare_digest(offered, record.sha256)]
        if not matches:
            return None
        record = matches[0]
        if record.is_revoked:
            raise AuthError(f"The API key {record.key_id} has been revoked", hint="ask for a new key")
        if record.expires_at_s is not None and not now_s < record.expires_at_s:
            raise AuthError(f"The API key {record.key_id} has expired", hint="ask for a new key")
        return _summary(record)

    def verify(self, key: str, *, now_s: float) -> KeySummary:
        """Whose key this is; `AuthError` if it is unknown, revoked or expired."""
        found = self.find(key, now_s=now_s)
        if found is None:
            raise AuthError("The API key is not one that this server accepts", hint="check the key")
        return found

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
    return KeySummary(
        record.key_id,
        record.label,
        record.created_at_s,
        record.is_revoked,
        record.role,
        record.limits,
        record.expires_at_s,
    )


def _check_limits(role: KeyRole, limits: KeyLimits) -> None:
    if role is not KeyRole.USE and limits != NO_LIMITS:
        raise UsageError(
            f"A key of role {role} has no limits on models, requests or tokens",
            hint="leave them out, or make a key of role use",
        )
    if limits.models is not None and not 1 <= len(limits.models) <= _MAX_MODELS:
        raise UsageError(f"A key is for 1 to {_MAX_MODELS} models", hint="name them, or none to allow all")
    if not all(1 <= len(model) <= _MAX_MODEL_NAME for model in limits.models or ()):
        raise UsageError("A model that a key is for has no name, or too long a one", hint="name it again")
    for what, value, most in (
        ("Requests per minute", limits.requests_per_minute, _MAX_RATE),
        ("Tokens per day", limits.tokens_per_day, _MAX_TOKENS),
    ):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{what} of a key are from 1 to {most}", hint="leave it out for no limit")


def _digest(key: str) -> bytes:
    # A header may hold anything; text that no key has must be refused, not break the comparison.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
