"""Host files of `launch ssh`: one machine in a line, `[user@]host[:port]`, perhaps with options of its worker.

# the lab
gpu1
ada@10.0.0.7:2222  name=attic max-memory=16G
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import SourceError, UsageError

_MOST_HOSTS = 1024
_MOST_BYTES = 1 << 20
# Never begins with a dash, which ssh would take for an option.
_HOST = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%]+\])")
_OPTIONS = ("name", "max-memory", "device", "backend", "threads", "host", "port", "advertise")
_VALUE = re.compile(r"[A-Za-z0-9_.:,\[\]%+-]+")


@dataclass(frozen=True, slots=True)
class LaunchHost:
    address: str
    """As ssh takes it, perhaps with a user."""
    port: int | None = None
    options: tuple[str, ...] = ()
    """Of its worker, as words."""

    @property
    def title(self) -> str:
        return self.address if self.port is None else f"{self.address}:{self.port}"


def read_hosts(path: Path) -> list[LaunchHost]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror or error}", hint="write one host in each line of it"
        ) from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is no text", hint="write one host in each line of it") from error
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str) -> list[LaunchHost]:
    """UsageError, with the line, for what is no host."""
    hosts: dict[str, LaunchHost] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _parse(words, f"{source}, line {number}")
        if host.title in hosts:
            raise UsageError(
                f"{source}, line {number}: {host.title} is there twice", hint="one worker for each machine"
            )
        hosts[host.title] = host
    if not 1 <= len(hosts) <= _MOST_HOSTS:
        raise UsageError(f"{source} names {len(hosts)} hosts", hint=f"1 to {_MOST_HOSTS}, one in each line")
    return list(hosts.values())


def _parse(words: list[str], where: str) -> LaunchHost:
    address, port = words[0], None
    before, colon, after = address.rpartition(":")
    if colon and after.isascii() and after.isdigit():
        address, port = before, int(after)
    if not _HOST.fullmatch(address) or not (port is None or 1 <= port <= 65535):
        raise UsageError(f"{where}: {words[0][:80]!r} is no host", hint="write [user@]host[:port]")
    options: list[str] = []
    for word in words[1:]:
        name, is_given, value = word.partition("=")
        if name not in _OPTIONS or not is_given or not _VALUE.fullmatch(value):
            raise UsageError(
                f"{where}: {word[:80]!r} is no option of a worker",
                hint=f"write one of {', '.join(_OPTIONS)}=VALUE",
            )
        options += [f"--{name}", value]
    return LaunchHost(address, port, tuple(options))
