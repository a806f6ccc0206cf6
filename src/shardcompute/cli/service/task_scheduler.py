"""Windows' Task Scheduler as a manager of background programs: a task of this user, from log-on on.

A task can have no environment of its own, so what is in ours travels in the command (`service exec --with`).
"""

from __future__ import annotations

import ntpath
import subprocess
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from shardcompute.cli.service.service_files import ServiceDefinition

_SPACE = "http://schemas.microsoft.com/windows/2004/02/mit/task"
_SETTINGS = {
    "MultipleInstancesPolicy": "IgnoreNew",
    "DisallowStartIfOnBatteries": "false",
    "StopIfGoingOnBatteries": "false",
    "StartWhenAvailable": "true",
    "ExecutionTimeLimit": "PT0S",
}
"""Without these a task ends after three days, and when a laptop is unplugged."""


@dataclass(frozen=True, slots=True)
class TaskScheduler:
    """See `ServiceSystem`. No rights of an administrator are needed. `folder` has the files that tasks are made of."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.task.xml"

    def render(self, service: ServiceDefinition) -> str:
        task = ElementTree.Element("Task", {"version": "1.2", "xmlns": _SPACE})
        trigger = ElementTree.SubElement(ElementTree.SubElement(task, "Triggers"), "LogonTrigger")
        ElementTree.SubElement(trigger, "Enabled").text = "true"
        principal = ElementTree.SubElement(ElementTree.SubElement(task, "Principals"), "Principal")
        ElementTree.SubElement(principal, "LogonType").text = "InteractiveToken"
        ElementTree.SubElement(principal, "RunLevel").text = "LeastPrivilege"
        settings = ElementTree.SubElement(task, "Settings")
        for key, value in _SETTINGS.items():
            ElementTree.SubElement(settings, key).text = value
        restart = ElementTree.SubElement(settings, "RestartOnFailure")
        ElementTree.SubElement(restart, "Interval").text = "PT1M"
        ElementTree.SubElement(restart, "Count").text = "999"
        program, *arguments = service.command
        arguments += [
            part for key, value in service.environment.items() for part in ("--with", f"{key}={value}")
        ]
        action = ElementTree.SubElement(ElementTree.SubElement(task, "Actions"), "Exec")
        ElementTree.SubElement(action, "Command").text = program
        ElementTree.SubElement(action, "Arguments").text = subprocess.list2cmdline(arguments)
        ElementTree.SubElement(action, "WorkingDirectory").text = ntpath.dirname(str(service.log))
        ElementTree.indent(task)
        # Characters beyond ASCII are written as references: no encoding can be mistaken for another then.
        written: str = ElementTree.tostring(task, encoding="us-ascii", xml_declaration=False).decode("ascii")
        return f"{written}\n"

    def next_steps(self, name: str) -> list[str]:
        return [
            f'schtasks /Create /TN {self._task(name)} /XML "{self.path(name)}"',
            f"schtasks /Run /TN {self._task(name)}  # now; later it starts when you log on",
            "shardcompute logs  # what it says",
        ]

    def stop_commands(self, name: str) -> list[list[str]]:
        return [
            ["schtasks", "/End", "/TN", self._task(name)],
            ["schtasks", "/Delete", "/F", "/TN", self._task(name)],
        ]

    def state_command(self, name: str) -> list[str]:
        asked = f"exit [int]((Get-ScheduledTask -TaskName '{self._task(name)}').State -ne 'Running')"
        return ["powershell", "-NoProfile", "-NonInteractive", "-Command", asked]

    def _task(self, name: str) -> str:
        return f"ShardCompute-{name}"
