"""`bench reach`: two homes behind routers of every kind: which rung is taken, how fast it is, and what it carries."""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompute.bench.report import Result, Say
from shardcompute.core.closing import Closing
from shardcompute.core.errors import BackendError
from shardcompute.sim.routers import PUBLIC, PUBLIC_HOST, PUBLIC_HOST6, Homes, RouterKind

_PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class ReachCase:
    """Two homes, or two hosts of one home (`is_one_home`) that only know the address of their router."""

    name: str
    kinds: tuple[RouterKind, ...]
    is_one_home: bool = False

    @property
    def hosts(self) -> tuple[str, str]:
        return ("home1a", "home1b") if self.is_one_home else ("home1a", "home2a")


CASES = (
    ReachCase("cone, cone", (RouterKind.CONE, RouterKind.CONE)),
    ReachCase("cone, symmetric", (RouterKind.CONE, RouterKind.SYMMETRIC)),
    ReachCase("symmetric, symmetric", (RouterKind.SYMMETRIC, RouterKind.SYMMETRIC)),
    ReachCase("only 443 out, cone", (RouterKind.WEB_ONLY, RouterKind.CONE)),
    ReachCase("UDP blocked, UDP blocked", (RouterKind.UDP_BLOCKED, RouterKind.UDP_BLOCKED)),
    ReachCase("resetting, resetting", (RouterKind.RESETTING, RouterKind.RESETTING)),
    ReachCase("one home without hairpin", (RouterKind.CONE,), is_one_home=True),
    ReachCase("IPv6 only, open", (RouterKind.IPV6_OPEN, RouterKind.IPV6_OPEN)),
    ReachCase("IPv6 only, firewalls", (RouterKind.IPV6_FIREWALL, RouterKind.IPV6_FIREWALL)),
    ReachCase("dual stack, firewalls", (RouterKind.DUAL, RouterKind.DUAL)),
    ReachCase("IPv6 only, IPv4 only", (RouterKind.IPV6_FIREWALL, RouterKind.CONE)),
    ReachCase("IPv6 lost on the way, twice", (RouterKind.DUAL_BROKEN, RouterKind.DUAL_BROKEN)),
)


@dataclass(frozen=True, slots=True)
class ReachRow:
    """What a case came to. Times are medians of the links after the first, which has nothing to remember."""

    case: str
    rung: str
    first_s: float
    linked_s: float
    rtt_s: float
    bytes_per_s: float
    relayed_share: float


class _Program(Closing):
    """A process of the bench in a namespace."""

    def __init__(self, homes: Homes, machine: str, setup: dict[str, Any]) -> None:
        self._machine = machine
        command = [sys.executable, "-m", "shardcompute.bench.reach.node", json.dumps(setup)]
        self._process = subprocess.Popen(
            homes.command(machine, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **asked: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            is_ready = bool(select.select([stdout], [], [], _PATIENCE_S)[0])
            line = stdout.readline() if is_ready else ""
        except OSError:
            line = ""
        if not line:
            code = self._process.poll()
            raise BackendError(
                f"the process on {self._machine} does not answer"
                + ("" if code is None else f": it ended with {code}")
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise BackendError(f"{self._machine}: {said['error']}")
        return said

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def run_case(case: ReachCase, *, rounds: int = 5, loads: int = 8) -> ReachRow:
    """Measure one case. BackendError where this machine cannot have routers, or no link came about."""
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        homes = opened.enter_context(Homes(case.kinds))
        hosts = [PUBLIC_HOST6, PUBLIC_HOST] if any(kind.has_ipv6 for kind in case.kinds) else [PUBLIC_HOST]
        setup = {"is_public": True, "folder": str(folder / "cluster"), "hosts": hosts}
        public = opened.enter_context(_Program(homes, PUBLIC, setup))
        token = public.ask(token=True)["token"]
        nodes = []
        for index, host in enumerate(case.hosts):
            kind = case.kinds[0 if case.is_one_home else index]
            setup = {
                "is_public": False,
                "folder": str(folder / host),
                # In a home of two, what others are told is the router's address, which leads nowhere from inside.
                "host": "0.0.0.0" if case.is_one_home else homes.address(host),
                "advertise": "203.0.113.1" if case.is_one_home else "",
                "token": token,
                "through": f"wss://{PUBLIC_HOST}:443" if kind == RouterKind.WEB_ONLY else "",
            }
            nodes.append(opened.enter_context(_Program(homes, host, setup)))
        first, second = nodes
        first.ask()
        other = second.ask()
        return _measure(case.name, public, first, other, rounds, loads)


def _measure(
    name: str, public: _Program, first: _Program, other: dict[str, Any], rounds: int, loads: int
) -> ReachRow:
    before = public.ask()["relayed"]
    began_s = time.monotonic()
    seen = []
    for number in range(rounds + 1):
        seen.append(first.ask(dial=other["node"], url=other["url"], loads=loads if number else 0))
        if time.monotonic() - began_s > _PATIENCE_S:
            break
    relayed = public.ask()["relayed"] - before
    later = seen[1:] or seen
    sent = sum(each["sent"] for each in seen)
    return ReachRow(
        case=name,
        rung=statistics.mode(each["rung"] for each in later),
        first_s=seen[0]["linked_s"],
        linked_s=statistics.median(each["linked_s"] for each in later),
        rtt_s=statistics.median(each["rtt_s"] for each in later),
        bytes_per_s=statistics.median(each["bytes_per_s"] for each in later),
        relayed_share=min(relayed / sent, 1.0) if sent else 0.0,
    )


def run_reach_bench(cases: Sequence[ReachCase], say: Say, *, rounds: int, loads: int) -> list[ReachRow]:
    rows = []
    for case in cases:
        say(case.name)
        rows.append(run_case(case, rounds=rounds, loads=loads))
    return rows


def results_of(rows: Sequence[ReachRow]) -> list[Result]:
    """Every number, labelled with its case and rung."""
    found = []
    for row in rows:
        labels = {"routers": row.case, "rung": row.rung}
        found += [
            Result("first link", row.first_s * 1e3, "ms", labels),
            Result("link", row.linked_s * 1e3, "ms", labels),
            Result("round trip", row.rtt_s * 1e3, "ms", labels),
            Result("throughput", row.bytes_per_s / 1e6, "MB/s", labels),
            Result("relayed bytes", row.relayed_share * 100, "%", labels),
        ]
    return found


def table_of(rows: Sequence[ReachRow]) -> str:
    """For people to read."""
    heads = ("routers", "rung", "first link ms", "link ms", "round trip ms", "MB/s", "relayed %")
    cells = [
        (
            row.case,
            row.rung,
            f"{row.first_s * 1e3:.0f}",
            f"{row.linked_s * 1e3:.0f}",
            f"{row.rtt_s * 1e3:.2f}",
            f"{row.bytes_per_s / 1e6:.1f}",
            f"{row.relayed_share * 100:.0f}",
        )
        for row in rows
    ]
    lines = [heads, tuple("---" for _ in heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
