"""The coordinator's record of join tokens: a value without clock, files or secrets.

Every change returns a new book. Of a token's secret only the SHA-256 is kept; the secret has 160 random bits,
so nothing slower is needed. What is wrong with a token is told only to whoever has proven its secret; to all
others an unknown id and a wrong secret look the same, in words and in time.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shardcompute.core.errors import AuthError, ForbiddenError, UsageError
from shardcompute.security.names import Role
from shardcompute.security.stored import Stored, read_stored, write_stored
from shardcompute.security.tokens import SECRET_BYTES, TOKEN_ID_BYTES, JoinToken

DAY_S = 86_400.0
TokenState = Literal["valid", "expired", "revoked", "used up"]
MOST_COMPANIONS = 31
"""Nodes that one machine brings besides the first."""
_MAX_LIFE_S = 366 * DAY_S
_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What the coordinator knows about one token. `used_by` lists the nodes that joined with it."""

    token_id: str
    secret_sha256: bytes = field(repr=False)
    roles: frozenset[Role]
    created_at_s: float
    expires_at_s: float
    max_uses: int | None
    used_by: tuple[str, ...]
    is_revoked: bool
    companions: tuple[str, ...] = ()
    """Nodes that joined along with one of those, from the same machine: a machine uses a token once, whatever it
    computes on."""

    def has_admitted(self, node_id: str) -> bool:
        return node_id in self.used_by or node_id in self.companions

    def state(self, now_s: float) -> TokenState:
        """Valid up to, and not at, the moment of expiry."""
        if self.is_revoked:
            return "revoked"
        if not now_s < self.expires_at_s:
            return "expired"
        if self.max_uses is not None and len(self.used_by) >= self.max_uses:
            return "used up"
        return "valid"


@dataclass(frozen=True, slots=True)
class TokenSummary:
    """A line of the list of tokens: nothing in it helps to join."""

    token_id: str
    roles: frozenset[Role]
    state: TokenState
    created_at_s: float
    expires_at_s: float
    max_uses: int | None
    used_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenBook:
    """All tokens of a cluster."""

    records: tuple[TokenRecord, ...] = ()

    def create(
        self,
        *,
        addresses: Sequence[str],
        fingerprint: str,
        cluster: str,
        now_s: float,
        roles: Collection[Role] = (Role.WORKER,),
        life_s: float = DAY_S,
        max_uses: int | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> tuple[TokenBook, JoinToken]:
        """(the book with a new token, the token with its secret, which is not kept)."""
        if not roles or not set(roles) <= {Role.WORKER, Role.DRIVER}:
            raise UsageError("A join token is for workers, drivers or both", hint="name one of these roles")
        if not (math.isfinite(life_s) and 0 < life_s <= _MAX_LIFE_S):
            raise UsageError(
                "A join token lives more than 0 and at most 366 days", hint="choose another time"
            )
        if max_uses is not None and max_uses < 1:
            raise UsageError("A join token that nobody can use", hint="allow at least one use")
        token_id = random_bytes(TOKEN_ID_BYTES).hex()
        while self._find(token_id) is not None:
            token_id = random_bytes(TOKEN_ID_BYTES).hex()
        token = JoinToken(
            token_id=token_id,
            secret=random_bytes(SECRET_BYTES),
            addresses=tuple(addresses),
            fingerprint=fingerprint,
            cluster=cluster,
        )
        record = TokenRecord(
            token_id=token.token_id,
            secret_sha256=_digest(token.secret),
            roles=frozenset(roles),
            created_at_s=now_s,
            expires_at_s=now_s + life_s,
            max_uses=max_uses,
            used_by=(),
            is_revoked=False,
        )
        return TokenBook((*self.records, record)), token

    def verify(self, token_id: str, secret: bytes, *, node_id: str, role: Role, now_s: float) -> TokenRecord:
        """The token's record, if `node_id` may join with it in this role now; else `AuthError`.

        A node that has used the token may use it again until it expires: its first answer may have got lost.
        """
        record = self._find(token_id)
        # Digests are compared for unknown ids too, so that the time taken does not tell ids apart.
        is_right = hmac.compare_digest(_digest(secret), record.secret_sha256 if record else _NO_DIGEST)
        if record is None or not is_right:
            raise AuthError(
                "The join token is not known to this cluster", hint="ask the coordinator for a new token"
            )
        state = record.state(now_s)
        if state == "used up" and record.has_admitted(node_id):
            state = "valid"
        if state != "valid":
            verb = "has" if state == "expired" else "is"
            raise AuthError(f"The join token {verb} {state}", hint="ask the coordinator for a new token")
        if role not in record.roles:
            allowed = " or ".join(sorted(record.roles))
            raise ForbiddenError(
                f"This join token does not admit a {role}",
                hint=f"join as {allowed}, or ask for another token",
            )
        return record

    def use(
        self,
        token_id: str,
        secret: bytes,
        *,
        node_id: str,
        role: Role,
        now_s: float,
        companions: Sequence[str] = (),
    ) -> tuple[TokenBook, TokenRecord]:
        """Like `verify`, and counts the node. Its companions come in with it and are not counted; AuthError where a
        token has let in more of them than its machines can have devices."""
        record = self.verify(token_id, secret, node_id=node_id, role=role, now_s=now_s)
        used_by = record.used_by if record.has_admitted(node_id) else (*record.used_by, node_id)
        others = dict.fromkeys(each for each in (*record.companions, *companions) if each not in used_by)
        if len(others) > MOST_COMPANIONS * len(used_by):
            raise AuthError(
                f"A machine joins with at most {MOST_COMPANIONS + 1} nodes", hint="name fewer devices"
            )
        used = replace(record, used_by=used_by, companions=tuple(others))
        return (self, record) if used == record else (self._with(used), used)

    def revoke(self, token_id: str) -> TokenBook:
        """Nobody joins with this token any more; nodes that have joined with it stay."""
        record = self._find(token_id)
        if record is None:
            raise UsageError(
                f"There is no join token {token_id[:40]!r}", hint="list the tokens to see their ids"
            )
        return self._with(replace(record, is_revoked=True))

    def used_by(self, node_id: str, now_s: float) -> tuple[str, ...]:
        """Ids of tokens that this node joined with and that are still good for something."""
        return tuple(
            record.token_id
            for record in self.records
            if record.has_admitted(node_id) and record.state(now_s) in ("valid", "used up")
        )

    def summaries(self, now_s: float) -> tuple[TokenSummary, ...]:
        """Every token, oldest first."""
        return tuple(
            TokenSummary(
                token_id=record.token_id,
                roles=record.roles,
                state=record.state(now_s),
                created_at_s=record.created_at_s,
                expires_at_s=record.expires_at_s,
                max_uses=record.max_uses,
                used_by=record.used_by,
            )
            for record in self.records
        )

    def to_bytes(self) -> bytes:
        return write_stored(_StoredTokens(1, self.records))

    @classmethod
    def from_bytes(cls, content: bytes) -> TokenBook:
        return cls(read_stored(content, _StoredTokens, "The record of join tokens").records)

    def _find(self, token_id: str) -> TokenRecord | None:
        return next((record for record in self.records if record.token_id == token_id), None)

    def _with(self, changed: TokenRecord) -> TokenBook:
        return TokenBook(
            tuple(changed if record.token_id == changed.token_id else record for record in self.records)
        )


class _StoredTokens(Stored, frozen=True):
    records: tuple[TokenRecord, ...]


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
