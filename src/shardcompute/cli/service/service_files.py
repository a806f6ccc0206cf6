"""The files that make systemd or launchd run a command of ours in the background, as text.

What the system's manager reads names no argument of the command: those are in a file of their own that only its
owner can read. API keys are in neither: they come from the file that `--api-key-file` names.
"""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardcompute.core.errors import AuthError, UnknownModelError, UnsupportedModelError, UsageError
from shardcompute.core.settings import DEFAULT_HUB_URL, Settings

ACTIONS = ("up", "join", "driver")
_HOPELESS = (
    UsageError.exit_code,
    UnknownModelError.exit_code,
    UnsupportedModelError.exit_code,
    AuthError.exit_code,
)
"""Trying again changes nothing."""


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """One command in the background. `program` is what starts ours; `log` is where launchd puts what it says."""

    name: str
    program: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    @property
    def command(self) -> list[str]:
        return [*self.program, "service", "exec", self.name]


class ServiceSystem(Protocol):
    """A manager of background programs: where its files are, what is in them, and how it is talked to."""

    def path(self, name: str) -> Path: ...

    def render(self, service: ServiceDefinition) -> str: ...

    def next_steps(self, name: str) -> list[str]:
        """Commands that start a service whose file has just been written."""
        ...

    def stop_commands(self, name: str) -> list[list[str]]:
        """End the service, and have it not start again."""
        ...

    def state_command(self, name: str) -> list[str]:
        """Ends with 0 if and only if the service runs."""
        ...


@dataclass(frozen=True, slots=True)
class Systemd:
    """User units: no rights of an administrator are needed."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / self._unit(name)

    def render(self, service: ServiceDefinition) -> str:
        environment = [
            f"Environment={quote_systemd(f'{name}={value}')}" for name, value in service.environment.items()
        ]
        lines = [
            "[Unit]",
            f"Description=ShardCompute {service.name}",
            "",
            "[Service]",
            "Type=exec",
            # Only in commands does a dollar sign mean something.
            f"ExecStart={' '.join(quote_systemd(part).replace('$', '$$') for part in service.command)}",
            *environment,
            "Restart=on-failure",
            "RestartSec=5",
            f"RestartPreventExitStatus={' '.join(map(str, _HOPELESS))}",
            "TimeoutStopSec=30",
            "LimitNOFILE=65536",
            "NoNewPrivileges=yes",
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
        return "\n".join(lines) + "\n"

    def next_steps(self, name: str) -> list[str]:
        return [
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now {self._unit(name)}",
            "loginctl enable-linger  # to go on while you are logged out",
            f"journalctl --user -u {self._unit(name)} -f  # what it says",
        ]

    def stop_commands(self, name: str) -> list[list[str]]:
        return [["systemctl", "--user", "disable", "--now", self._unit(name)]]

    def state_command(self, name: str) -> list[str]:
        return ["systemctl", "--user", "is-active", "--quiet", self._unit(name)]

    def _unit(self, name: str) -> str:
        return f"shardcompute-{name}.service"


@dataclass(frozen=True, slots=True)
class Launchd:
    """Agents of the user who is logged in."""

    folder: Path
    user: int

    def path(self, name: str) -> Path:
        return self.folder / f"{self._label(name)}.plist"

    def render(self, service: ServiceDefinition) -> str:
        content = {
            "Label": self._label(service.name),
            "ProgramArguments": service.command,
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 5,
            "ExitTimeOut": 30,
            "SoftResourceLimits": {"NumberOfFiles": 65536},
            "StandardOutPath": str(service.log),
            "StandardErrorPath": str(service.log),
        }
        return plistlib.dumps(content, sort_keys=False).decode()

    def next_steps(self, name: str) -> list[str]:
        return [
            f"launchctl bootstrap gui/{self.user} '{self.path(name)}'",
            f"launchctl print gui/{self.user}/{self._label(name)}  # how it is",
        ]

    def stop_commands(self, name: str) -> list[list[str]]:
        return [["launchctl", "bootout", f"gui/{self.user}/{self._label(name)}"]]

    def state_command(self, name: str) -> list[str]:
        # `print` alone ends well for every agent that is known, running or not.
        return [
            "sh",
            "-c",
            f"launchctl print gui/{self.user}/{self._label(name)} | grep -q 'state = running'",
        ]

    def _label(self, name: str) -> str:
        return f"shardcompute.{name}"


def quote_systemd(text: str) -> str:
    """As a unit file reads it back unchanged: quotes and specifiers mean themselves."""
    if not text.isprintable():
        raise UsageError(f"{text!r} cannot stand in a unit file", hint="use printable characters only")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def describe_service(name: str, settings: Settings, program: Sequence[str] = ()) -> ServiceDefinition:
    """`name` with the settings that this process has from its environment, but for the hub's token and the API key."""
    chosen = {
        "SHARDCOMPUTE_HOME": str(settings.data_dir),
        "SHARDCOMPUTE_HUB_URL": "" if settings.hub_url == DEFAULT_HUB_URL else settings.hub_url,
        "SHARDCOMPUTE_OFFLINE": "1" if settings.offline else "",
        "SHARDCOMPUTE_ALLOWED_HOSTS": ",".join(settings.allowed_hosts),
        "SHARDCOMPUTE_THREADS": "" if settings.threads is None else str(settings.threads),
    }
    environment = {key: value for key, value in chosen.items() if value}
    log = settings.data_dir / "services" / f"{name}.log"
    return ServiceDefinition(name, program or (sys.executable, "-m", "shardcompute"), environment, log)
