"""Policy of open pools: who may come in without a token, what those on probation get, who is promoted or expelled.

Whoever comes to an open cluster without a token is a *stranger*: a key of which nothing is known, from a network of
which a little is. It is on probation until others have computed again enough of what it has computed. Pure: pools in,
pools out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shardcompute.trust.judgement import Blame, Judgement
from shardcompute.trust.reputation import Finding, audit_rate

Standing = Literal["probation", "promoted", "expelled"]
UNKNOWN_NETWORK = "unknown"
"""Of those who come through a relay: all of them share the places of one network."""
_DAY_S = 86_400.0
_HOUR_S = 3600.0


class PoolPolicy(Struct, frozen=True):
    """The numbers by which strangers come in and rise. Times are those of the wall."""

    joins_per_hour: int = 12
    """Of new keys, from all networks together."""
    per_network: int = 2
    """Keys of one network (IPv4 /24, IPv6 /48) that are in the pool or were expelled of late."""
    most_on_probation: int = 16
    """At once: what they do is computed twice, on machines that came with a token."""
    most_known: int = 4096
    """Keys that are remembered at all."""
    expelled_for_s: float = 30 * _DAY_S
    """So long an expelled key takes up a place of its network; it never comes back itself."""
    lapses_after_s: float = 7 * _DAY_S
    """After so long on probation a key that is not here any more gives up its place."""
    promoted_after: int = 256
    """Windows of 32 rows that were audited, every one of which passed."""
    least_age_s: float = _DAY_S
    """No record is worth anything before that: whoever asks for the work that it does itself gains no time."""
    promoted_rate: float = 0.25
    """Of what promoted machines compute at least so much is audited for good: a record shows what a key did, not what
    it will do, and a name must not be worth much to whoever waits for it in order to cheat."""
    most_layers: int = 4
    most_share: float = 0.125
    """Of the model's layers, whichever is less, but one at least."""

    def layers_of(self, layer_count: int) -> int:
        """How many layers of a model a machine on probation may hold."""
        return max(1, min(self.most_layers, int(layer_count * self.most_share)))


class PoolMember(Struct, frozen=True):
    """What is known of a key that came without a token."""

    network: str
    admitted_s: float
    standing: Standing = "probation"
    windows: int = 0
    """Audited, and passed."""
    reason: str = ""
    """Why it has this standing."""
    decided_s: float = 0.0
    """Since when."""

    @property
    def is_on_probation(self) -> bool:
        return self.standing == "probation"


Pool = Mapping[str, PoolMember]
"""By node id, which is a digest of its key."""


def network_of(address: str) -> str:
    """The network whose addresses one party usually has together: IPv4 /24, IPv6 /48."""
    try:
        found = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return UNKNOWN_NETWORK
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return network_of(str(found.ipv4_mapped))
        return str(ipaddress.ip_network((found, 48), strict=False))
    return str(ipaddress.ip_network((found, 24), strict=False))


def why_refused(
    pool: Pool, policy: PoolPolicy, node: str, network: str, now_s: float, present: Iterable[str] = ()
) -> str:
    """Why a key may not come in without a token now, and what to do; "": it may. `present` are nodes that are in the
    cluster at this moment."""
    known = pool.get(node)
    if known is not None:
        if known.standing == "expelled":
            return f"this key was expelled: {known.reason}"
        return ""
    here = set(present)
    if len(pool) >= policy.most_known:
        return "this pool remembers as many keys as it can; ask its operator for a token"
    newest = [each for each in pool.values() if now_s - each.admitted_s < _HOUR_S]
    if len(newest) >= policy.joins_per_hour:
        return f"{policy.joins_per_hour} new keys have come within this hour; try again in an hour"
    held = [id for id, each in pool.items() if _holds_place(each, policy, now_s, is_here=id in here)]
    if sum(pool[id].network == network for id in held) >= policy.per_network:
        return (
            f"{policy.per_network} keys of this network ({network}) are in the pool, or were expelled of late"
        )
    if sum(pool[id].is_on_probation for id in held) >= policy.most_on_probation:
        return f"{policy.most_on_probation} machines are on probation; try again when some are promoted"
    return ""


def _holds_place(member: PoolMember, policy: PoolPolicy, now_s: float, *, is_here: bool) -> bool:
    if member.standing == "promoted":
        return True
    if member.standing == "expelled":
        return now_s - member.decided_s < policy.expelled_for_s
    return is_here or now_s - member.admitted_s < policy.lapses_after_s


def admitted(pool: Pool, node: str, network: str, now_s: float) -> dict[str, PoolMember]:
    """The pool with this key on probation; one that is known stays what it is."""
    if node in pool:
        return dict(pool)
    reason = "joined without a token"
    return {**pool, node: PoolMember(network, now_s, reason=reason, decided_s=now_s)}


def after_finding(
    member: PoolMember, policy: PoolPolicy, finding: Finding, windows: int, reason: str, now_s: float
) -> PoolMember:
    """After an audit of so many windows. A contradiction expels for good, whoever it was before; a record promotes;
    rows that are not shown, and disputes, end a record: it begins anew."""
    if finding == "failed":
        return replace(member, standing="expelled", reason=reason, decided_s=now_s)
    if member.standing == "expelled" or (finding == "passed" and not member.is_on_probation):
        return member
    if finding != "passed":
        return replace(member, standing="probation", windows=0, reason=reason, decided_s=now_s)
    member = replace(member, windows=member.windows + windows)
    if member.windows < policy.promoted_after or now_s - member.admitted_s < policy.least_age_s:
        return member
    return replace(
        member, standing="promoted", reason=f"{member.windows} audited windows passed", decided_s=now_s
    )


def suspends(member: PoolMember | None, finding: Finding) -> bool:
    """Whether this finding alone puts a machine in quarantine, whatever its reputation: of those who came without a
    token, all but passing. Where it is no proof an operator may pardon it."""
    return member is not None and finding != "passed"


def rate_of(member: PoolMember | None, policy: PoolPolicy, base: float, reputation: float) -> float:
    """The share of a machine's answers that is audited: all of them on probation, many of them after that."""
    usual = audit_rate(base, reputation)
    if member is None:
        return usual
    return 1.0 if member.is_on_probation else max(policy.promoted_rate, usual)


def may_audit(auditor: PoolMember | None) -> bool:
    """Whoever came without a token judges nobody, record or not: else keys of one hand would vouch for each other, and
    two of them together could convict a machine that came with a token."""
    return auditor is None


def weigh(judgement: Judgement, pool: Pool) -> Judgement:
    """Where a stranger on probation contradicts somebody who is not, the stranger is at fault: it must not cost a good
    machine its name that strangers dispute with it."""
    on_probation = [each for each in judgement.blames if _is_on_probation(pool, each.node)]
    others = [each for each in judgement.blames if not _is_on_probation(pool, each.node)]
    if judgement.outcome != "disputed" or not on_probation or not others:
        return judgement
    blames = tuple(Blame(each.node, "failed", each.reason) for each in on_probation)
    return Judgement("failed", blames)


def _is_on_probation(pool: Pool, node: str) -> bool:
    member = pool.get(node)
    return member is not None and member.is_on_probation


def standing_in_words(member: PoolMember, policy: PoolPolicy) -> str:
    """For people, with why."""
    if member.standing == "probation":
        return f"on probation: {member.windows} of {policy.promoted_after} audited windows passed"
    return f"{member.standing}: {member.reason}"
