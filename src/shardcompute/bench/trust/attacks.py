"""Attacks on an open pool, simulated around the policy that a cluster uses: many keys, waiting, covering, coming anew.

Hours and answers instead of machines; who comes in, who is audited, promoted and expelled is decided by `trust.pools`
and `trust.reputation` themselves. Seeded: equal settings give equal results. Pure.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import structs

from shardcompute.trust.pools import (
    PoolMember,
    PoolPolicy,
    admitted,
    after_finding,
    rate_of,
    suspends,
    why_refused,
)
from shardcompute.trust.reputation import NEW, Finding, after_audit, audit_rate, is_expelled

Attack = Literal["none", "greedy", "sleeper", "rare sleeper", "covering pair"]
ATTACKS: tuple[Attack, ...] = ("none", "greedy", "sleeper", "rare sleeper", "covering pair")
"""`greedy`: cheats from the first answer on. `sleeper`: computes honestly until it is promoted. `rare sleeper`: cheats
in one answer of twenty then. `covering pair`: cheats where another of the same hand sits before it, which does not show
its rows. Whoever is expelled comes back with a new key as soon as its network has a place."""
_HOUR_S = 3600.0
_RARELY = 0.05


@dataclass(frozen=True, slots=True)
class PoolAttack:
    """One simulated pool."""

    attack: Attack
    networks: int
    """Of the attacker; honest strangers have one each."""
    policy: PoolPolicy | None
    """None: every key is let in, and counts as promoted from the first moment on."""
    days: int = 30
    answers_per_hour: int = 60
    windows: int = 4
    seats: int = 3
    """Inner stages that strangers may have; who sits there is drawn every hour."""
    honest: int = 8
    audit_rate: float = 0.05
    unauditable: float = 0.05
    """The share of answers that audits cannot compute again: interrupted ones, with pictures, late ones."""


@dataclass(slots=True)
class _Machine:
    key: str
    is_attacker: bool
    network: str
    reputation: float = NEW
    is_quarantined: bool = False


@dataclass(slots=True)
class _Tally:
    answers: int = 0
    bad: int = 0
    unnoticed: int = 0
    audits: int = 0
    strangers_work: int = 0
    attacker_keys: int = 0
    attacker_promoted: int = 0
    attacker_expelled: int = 0
    honest_windows: int = 0
    first_promoted_h: list[float] = field(default_factory=list)
    honest_promoted_h: list[float] = field(default_factory=list)
    honest_expelled: int = 0


class PoolSimulation:
    """One run. `run` gives what came of it, as a row of results."""

    def __init__(self, settings: PoolAttack, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)
        self._pool: dict[str, PoolMember] = {}
        self._machines: dict[str, _Machine] = {}
        self._tally = _Tally()
        self._keys = 0
        self._arrivals = [self._rng.uniform(0, 72) for _ in range(settings.honest)]

    def run(self) -> dict[str, Any]:
        for hour in range(24 * self._settings.days):
            self._let_in(hour)
            seated = self._seat()
            for _ in range(self._settings.answers_per_hour):
                self._answer(seated, hour)
        return self._result()

    def _let_in(self, hour: int) -> None:
        for number, arrival_h in enumerate(self._arrivals):
            if arrival_h <= hour and f"honest {number}" not in self._machines:
                self._apply(_Machine(f"honest {number}", False, f"own {number}"), hour)
        if self._settings.attack == "none":
            return
        for number in range(self._settings.networks):
            self._keys += 1
            key = f"attacker {self._keys}"
            if self._apply(_Machine(key, True, f"theirs {number}"), hour):
                self._tally.attacker_keys += 1

    def _apply(self, machine: _Machine, hour: int) -> bool:
        policy, now_s = self._settings.policy, hour * _HOUR_S
        if policy is None:
            # One machine for each network: what limits it then is what it owns.
            here = (each for each in self._able() if each.network == machine.network)
            if any(here):
                return False
            self._pool[machine.key] = PoolMember(machine.network, now_s, "promoted")
        else:
            # Whoever is in quarantine stays, in the hope of a pardon.
            present = list(self._machines)
            if why_refused(self._pool, policy, machine.key, machine.network, now_s, present):
                return False
            self._pool = admitted(self._pool, machine.key, machine.network, now_s)
        self._machines[machine.key] = machine
        return True

    def _able(self) -> list[_Machine]:
        return [each for each in self._machines.values() if self._is_able(each)]

    def _is_able(self, machine: _Machine) -> bool:
        return not machine.is_quarantined and self._pool[machine.key].standing != "expelled"

    def _seat(self) -> list[_Machine]:
        able = self._able()
        return self._rng.sample(able, min(self._settings.seats, len(able)))

    def _answer(self, seated: Sequence[_Machine], hour: int) -> None:
        """One answer through these stages, and what audits make of it."""
        stages = [each for each in seated if self._is_able(each)]
        cheats = [self._cheats(each, stages[at - 1] if at else None) for at, each in enumerate(stages)]
        can_audit = self._rng.random() >= self._settings.unauditable
        found = False
        for at, machine in enumerate(stages):
            member = self._pool[machine.key]
            drawn = self._rng.random() < self._rate(member, machine.reputation)
            is_audited = can_audit and drawn
            self._tally.audits += is_audited
            self._tally.strangers_work += 1
            if machine.is_attacker and not cheats[at]:
                self._tally.honest_windows += self._settings.windows
            if is_audited:
                found |= self._audit(stages, at, cheats[at], hour)
        self._tally.answers += 1
        self._tally.bad += any(cheats)
        self._tally.unnoticed += any(cheats) and not found

    def _rate(self, member: PoolMember, reputation: float) -> float:
        policy, base = self._settings.policy, self._settings.audit_rate
        return audit_rate(base, reputation) if policy is None else rate_of(member, policy, base, reputation)

    def _cheats(self, machine: _Machine, before: _Machine | None) -> bool:
        if not machine.is_attacker:
            return False
        promoted = self._pool[machine.key].standing == "promoted"
        if self._settings.attack == "sleeper":
            return promoted
        if self._settings.attack == "rare sleeper":
            return promoted and self._rng.random() < _RARELY
        if self._settings.attack == "covering pair":
            return before is not None and before.is_attacker
        return self._settings.attack == "greedy"

    def _audit(self, stages: Sequence[_Machine], at: int, has_cheated: bool, hour: int) -> bool:
        """Whether it finds something wrong with the answer."""
        if has_cheated and self._settings.attack == "covering pair":
            self._find(stages[at - 1], "withheld", hour)
            return True
        self._find(stages[at], "failed" if has_cheated else "passed", hour)
        return has_cheated

    def _find(self, machine: _Machine, finding: Finding, hour: int) -> None:
        before = self._pool[machine.key]
        policy = self._settings.policy or PoolPolicy()
        windows, now_s = self._settings.windows, hour * _HOUR_S
        member = after_finding(before, policy, finding, windows, finding, now_s)
        self._pool[machine.key] = member
        machine.reputation = after_audit(machine.reputation, finding)
        is_suspended = self._settings.policy is not None and suspends(before, finding)
        machine.is_quarantined |= is_suspended or is_expelled(machine.reputation)
        if member.standing == before.standing:
            return
        if member.standing == "promoted":
            waited_h = (now_s - member.admitted_s) / _HOUR_S
            told = self._tally.first_promoted_h if machine.is_attacker else self._tally.honest_promoted_h
            told.append(waited_h)
            self._tally.attacker_promoted += machine.is_attacker
        else:
            self._tally.attacker_expelled += machine.is_attacker
            self._tally.honest_expelled += not machine.is_attacker

    def _result(self) -> dict[str, Any]:
        tally, days = self._tally, self._settings.days
        return {
            "bad_share": tally.bad / tally.answers,
            "unnoticed_share": tally.unnoticed / tally.answers,
            "bad_answers": tally.bad,
            "bad_answers_per_day": tally.bad / days,
            "keys": tally.attacker_keys,
            "promoted": tally.attacker_promoted,
            "expelled": tally.attacker_expelled,
            "honest_windows_per_bad_answer": tally.honest_windows / tally.bad if tally.bad else None,
            "hours_to_promotion": _median(tally.honest_promoted_h),
            "attacker_hours_to_promotion": _median(tally.first_promoted_h),
            "honest_expelled": tally.honest_expelled,
            "audited_share_of_strangers_work": tally.audits / max(tally.strangers_work, 1),
        }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def run_attack(settings: PoolAttack, trials: int) -> dict[str, Any]:
    """The mean over trials; where something never happened in one, over the others."""
    rows = [PoolSimulation(settings, seed=17 + trial).run() for trial in range(trials)]
    found: dict[str, Any] = {"attack": settings.attack, "networks": settings.networks}
    found["policy"] = _named(settings.policy)
    for name in rows[0]:
        known = [row[name] for row in rows if row[name] is not None]
        found[name] = round(statistics.fmean(known), 5) if known else None
    return found


def attacks_on(settings: PoolAttack, networks: Sequence[int]) -> list[PoolAttack]:
    """Every attack by as many networks, with and without the policy; those that wait also where whoever is promoted is
    audited by its reputation alone."""
    found = [replace(settings, attack="none", networks=0)]
    for attack in ATTACKS[1:]:
        found += [replace(settings, attack=attack, networks=each) for each in networks]
    waiting = [each for each in found if each.attack in ("sleeper", "rare sleeper")]
    lenient = structs.replace(settings.policy or PoolPolicy(), promoted_rate=0.0)
    found += [replace(each, policy=None) for each in found[1:]]
    return found + [replace(each, policy=lenient) for each in waiting]


def _named(policy: PoolPolicy | None) -> str:
    if policy is None:
        return "none"
    return "probation" if policy.promoted_rate else "lenient"
