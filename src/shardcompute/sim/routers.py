"""Homes behind routers, in network namespaces: a public host, routers that translate addresses, and hosts behind them.

    public host 203.0.113.10 ── the internet ── router 203.0.113.N ── host 192.168.N.2 (and .3)
    2001:db8:ffff::10            2001:db8:ffff::N           2001:db8:N::2 (and ::3)

Needs root, `ip`, `iptables` and, for IPv6, `ip6tables`. What a router lets through is what its kind says; IPv6 is
routed and not translated.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from shardcompute.core.closing import Closing
from shardcompute.core.errors import BackendError
from shardcompute.sim.leftovers import namespace_name, remove_leftovers, remove_namespace
from shardcompute.sim.namespaces import run_ip, try_namespaces

PUBLIC = "public"
PUBLIC_HOST = "203.0.113.10"
PUBLIC_HOST6 = "2001:db8:ffff::10"
_SECONDS = 20.0
_numbers = itertools.count(1000)


class RouterKind(StrEnum):
    """What homes have."""

    CONE = "cone"
    """One outer port for an inner one, answers let in: most homes."""
    SYMMETRIC = "symmetric"
    """Another outer port for every connection, at random."""
    WEB_ONLY = "only-443-out"
    """Nothing goes out but TCP to port 443."""
    UDP_BLOCKED = "udp-blocked"
    RESETTING = "resetting"
    """Says no (RST) to what it does not let in, instead of nothing."""
    IPV6_OPEN = "ipv6-open"
    """No IPv4; whoever knows an address of the home can dial it."""
    IPV6_FIREWALL = "ipv6-firewall"
    """No IPv4; nothing is let in that was not asked for."""
    DUAL = "dual-stack"
    """IPv4 as CONE, IPv6 as IPV6_FIREWALL."""
    DUAL_BROKEN = "ipv6-blackhole"
    """IPv4 as CONE; hosts have IPv6 and a route, and all that goes there is lost."""

    @property
    def has_ipv4(self) -> bool:
        return self not in (RouterKind.IPV6_OPEN, RouterKind.IPV6_FIREWALL)

    @property
    def has_ipv6(self) -> bool:
        return self in (
            RouterKind.IPV6_OPEN,
            RouterKind.IPV6_FIREWALL,
            RouterKind.DUAL,
            RouterKind.DUAL_BROKEN,
        )


class Homes(Closing):
    """`kinds`: the router of each home, numbered from 1; each home has two hosts. Closing it removes everything."""

    def __init__(self, kinds: Sequence[RouterKind]) -> None:
        """BackendError where this machine cannot have them."""
        if problem := why_no_homes():
            raise BackendError(problem, hint="run it as root, with iproute2 and iptables installed")
        remove_leftovers()
        number = next(_numbers)
        self._number = number
        self._made: list[str] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._add(PUBLIC)
            self._public("link", "add", "br0", "type", "bridge")
            self._public("link", "set", "br0", "up")
            self._public("addr", "add", f"{PUBLIC_HOST}/24", "dev", "br0")
            self._kinds = dict(enumerate(kinds, 1))
            for index, kind in self._kinds.items():
                self._add_home(index, kind)
            if any(kind.has_ipv6 for kind in kinds):
                self._add_ipv6()
            undo.pop_all()

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        """How to run this on `PUBLIC` or on a host such as "home1a"."""
        return ["ip", "netns", "exec", self._name(machine), *command]

    def address(self, machine: str) -> str:
        """Where a machine listens, as it sees itself; over IPv6 where it has that."""
        has_ipv6 = any(kind.has_ipv6 for kind in self._kinds.values())
        if machine == PUBLIC:
            return PUBLIC_HOST6 if has_ipv6 else PUBLIC_HOST
        home, last = machine[4:-1], 2 if machine[-1] == "a" else 3
        return f"2001:db8:{home}::{last}" if self._kinds[int(home)].has_ipv6 else f"192.168.{home}.{last}"

    def close(self) -> None:
        while self._made:
            remove_namespace(self._made.pop())

    def _add_home(self, index: int, kind: RouterKind) -> None:
        router, outer, inner = f"router{index}", f"203.0.113.{index}", f"192.168.{index}"
        self._add(router)
        self._public("link", "add", f"wan{index}", "type", "veth", "peer", "name", "wan")
        self._public("link", "set", "wan", "netns", self._name(router))
        self._public("link", "set", f"wan{index}", "master", "br0", "up")
        self._on(router, "addr", "add", f"{outer}/24", "dev", "wan")
        self._on(router, "link", "set", "wan", "up")
        self._on(router, "link", "add", "lan", "type", "bridge")
        self._on(router, "link", "set", "lan", "up")
        self._on(router, "addr", "add", f"{inner}.1/24", "dev", "lan")
        for letter, last in (("a", 2), ("b", 3)):
            host = f"home{index}{letter}"
            self._add(host)
            self._on(router, "link", "add", f"lan{letter}", "type", "veth", "peer", "name", "eth0")
            self._on(router, "link", "set", "eth0", "netns", self._name(host))
            self._on(router, "link", "set", f"lan{letter}", "master", "lan", "up")
            self._on(host, "link", "set", "eth0", "up")
            if kind.has_ipv4:
                self._on(host, "addr", "add", f"{inner}.{last}/24", "dev", "eth0")
                self._on(host, "route", "add", "default", "via", f"{inner}.1")
        self._run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for rule in _rules(kind):
            self._run(router, "iptables", *rule.split())

    def _add_ipv6(self) -> None:
        """Addresses are good at once ("nodad"): nobody else is here who could have them."""
        self._public("-6", "addr", "add", f"{PUBLIC_HOST6}/64", "dev", "br0", "nodad")
        self._run(PUBLIC, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        for index, kind in self._kinds.items():
            if kind.has_ipv6:
                self._add_ipv6_home(index, kind)

    def _add_ipv6_home(self, index: int, kind: RouterKind) -> None:
        router, outer, inner = f"router{index}", f"2001:db8:ffff::{index}", f"2001:db8:{index}::"
        self._on(router, "-6", "addr", "add", f"{outer}/64", "dev", "wan", "nodad")
        self._on(router, "-6", "addr", "add", f"{inner}1/64", "dev", "lan", "nodad")
        self._run(router, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        self._on(router, "-6", "route", "add", "default", "via", PUBLIC_HOST6)
        self._public("-6", "route", "add", f"{inner}/64", "via", outer)
        for letter, last in (("a", 2), ("b", 3)):
            host = f"home{index}{letter}"
            self._on(host, "-6", "addr", "add", f"{inner}{last}/64", "dev", "eth0", "nodad")
            self._on(host, "-6", "route", "add", "default", "via", f"{inner}1")
        for rule in _rules6(kind):
            self._run(router, "ip6tables", *rule.split())

    def _add(self, machine: str) -> None:
        name = self._name(machine)
        self._made.append(name)
        run_ip("netns", "add", name)
        self._on(machine, "link", "set", "lo", "up")

    def _public(self, *arguments: str) -> None:
        self._on(PUBLIC, *arguments)

    def _on(self, machine: str, *arguments: str) -> None:
        run_ip("-n", self._name(machine), *arguments)

    def _run(self, machine: str, *command: str) -> None:
        done = subprocess.run(
            self.command(machine, command), capture_output=True, text=True, check=False, timeout=_SECONDS
        )
        if done.returncode:
            raise BackendError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")

    def _name(self, machine: str) -> str:
        return namespace_name(self._number, machine)


def _rules(kind: RouterKind) -> list[str]:
    """For `iptables`, in their order."""
    no = "REJECT --reject-with tcp-reset" if kind == RouterKind.RESETTING else "DROP"
    tcp = " -p tcp" if kind == RouterKind.RESETTING else ""
    rules = [
        "-t nat -A POSTROUTING -o wan -j MASQUERADE"
        + (" --random-fully" if kind == RouterKind.SYMMETRIC else ""),
        f"-A INPUT -i wan{tcp} -j {no}",
        "-A FORWARD -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        f"-A FORWARD -i wan{tcp} -j {no}",
    ]
    if kind == RouterKind.UDP_BLOCKED:
        rules.insert(0, "-I FORWARD -p udp -j DROP")
    if kind == RouterKind.WEB_ONLY:
        rules += ["-A FORWARD -i lan -p tcp --dport 443 -j ACCEPT", "-A FORWARD -i lan -o wan -j DROP"]
    return rules


def _rules6(kind: RouterKind) -> list[str]:
    """For `ip6tables`. Neighbours are found by messages of ICMP, which stay."""
    if kind == RouterKind.IPV6_OPEN:
        return []
    if kind == RouterKind.DUAL_BROKEN:
        return ["-A FORWARD -j DROP"]
    return [
        "-A FORWARD -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        "-A FORWARD -i wan -j DROP",
    ]


def why_no_homes(*, with_ipv6: bool = False) -> str:
    """Why this machine cannot have them; "" if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    tools = ("ip", "iptables", "ip6tables") if with_ipv6 else ("ip", "iptables")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found"
    if with_ipv6 and not Path("/proc/net/if_inet6").exists():
        return "this system has no IPv6"
    return try_namespaces()
