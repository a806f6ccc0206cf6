"""What this system says of power, people and links. Every reading may be None: it does not say.

| | mains | people | metered |
| --- | --- | --- | --- |
| Linux | `/sys/class/power_supply` | logind's idle hint, last input on terminals | NetworkManager, over `busctl` |
| macOS | psutil | `ioreg` (HIDIdleTime) | it does not say |
| Windows | psutil | GetLastInputInfo | WinRT's connection cost, over PowerShell |

The processor's load of other programs comes from psutil everywhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_COMMAND_S = 5.0
_PROGRAM = "shardcompute"
_SUPPLIES = Path("/sys/class/power_supply")
_DEVICES = Path("/dev")
_LOGIND = ("loginctl", "show", "--property=IdleHint", "--property=IdleSinceHint")
_NETWORK_MANAGER = (
    "busctl",
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)
_METERED = {"1": True, "3": True, "2": False, "4": False}
"""NetworkManager's NMMetered: yes, guessed yes, no, guessed no; 0: unknown."""
_IOREG = ("ioreg", "-c", "IOHIDSystem", "-d", "4")
_HID_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')
_CONNECTION_COST = (
    "powershell",
    "-NoProfile",
    "-Command",
    "[void][Windows.Networking.Connectivity.NetworkInformation,Windows,ContentType=WindowsRuntime];"
    "[Windows.Networking.Connectivity.NetworkInformation]::GetInternetConnectionProfile()"
    ".GetConnectionCost().NetworkCostType",
)
_COSTS = {"Unrestricted": False, "Fixed": True, "Variable": True}
Run = Callable[[Sequence[str]], str | None]
"""What a command writes; None where there is none or it fails."""


def run_command(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def is_on_mains(supplies: Path = _SUPPLIES, platform: str = sys.platform) -> bool | None:
    """Whether this machine is not running on a battery; one without a battery is on mains."""
    if platform.startswith("linux"):
        return _linux_mains(supplies)
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    plugged: bool | None = True if battery is None else battery.power_plugged
    return plugged


def _linux_mains(supplies: Path) -> bool | None:
    try:
        found = [each for each in supplies.iterdir() if _line(each / "scope") != "Device"]
    except OSError:
        return None  # as in a container that does not see them
    kinds = {each: _line(each / "type") for each in found}
    if any(_line(each / "online") == "1" for each, kind in kinds.items() if kind not in ("Battery", "")):
        return True
    batteries = [_line(each / "status") for each, kind in kinds.items() if kind == "Battery"]
    return not batteries or "Discharging" not in batteries


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def idle_s(
    run: Run = run_command,
    devices: Path = _DEVICES,
    platform: str = sys.platform,
    now_s: Callable[[], float] = time.time,
) -> float | None:
    """Seconds since a person last did something here."""
    if platform == "darwin":
        found = _HID_IDLE.search(run(_IOREG) or "")
        return None if found is None else int(found[1]) / 1e9
    if platform == "win32":
        return _windows_idle_s()
    said = [
        each
        for each in (_logind_idle_s(run, now_s()), _terminal_idle_s(devices, now_s()))
        if each is not None
    ]
    return min(said, default=None)


def _logind_idle_s(run: Run, now_s: float) -> float | None:
    """What the desktop told logind; None where no desktop tells it anything."""
    values = dict(line.split("=", 1) for line in (run(_LOGIND) or "").splitlines() if "=" in line)
    since = values.get("IdleSinceHint", "")
    if not since.isdigit() or since == "0":
        return None
    return max(0.0, now_s - int(since) / 1e6) if values.get("IdleHint") == "yes" else 0.0


def _terminal_idle_s(devices: Path, now_s: float) -> float | None:
    """Since the last input on any terminal, as `w` tells it."""
    latest_s: float | None = None
    for pattern in ("pts/[0-9]*", "tty[1-9]*"):
        for path in devices.glob(pattern):
            try:
                status = path.stat()
            except OSError:
                continue
            # Consoles that nobody uses were touched when the machine started.
            if pattern.startswith("pts") or status.st_uid != 0:
                latest_s = max(latest_s or 0.0, status.st_atime)
    return None if latest_s is None else max(0.0, now_s - latest_s)


def _windows_idle_s() -> float | None:
    if sys.platform == "win32":
        import ctypes

        class LastInput(ctypes.Structure):
            _fields_ = (("size", ctypes.c_uint), ("time_ms", ctypes.c_uint))

        last = LastInput(ctypes.sizeof(LastInput), 0)
        if ctypes.windll.user32.GetLastInputInfo(ctypes.byref(last)):
            now_ms = int(ctypes.windll.kernel32.GetTickCount())
            return float((now_ms - int(last.time_ms)) & 0xFFFFFFFF) / 1000
    return None


def is_metered(run: Run = run_command, platform: str = sys.platform) -> bool | None:
    """Whether bytes over the link in use cost their owner something."""
    if platform == "win32":
        return _COSTS.get((run(_CONNECTION_COST) or "").strip())
    if platform == "darwin":
        return None
    kind, _, number = (run(_NETWORK_MANAGER) or "").strip().partition(" ")
    return _METERED.get(number) if kind == "u" else None


@dataclass(slots=True)
class OthersLoad:
    """The part of this machine's processors that other programs use, between one look and the next."""

    busy_s: Callable[[], tuple[float, float]] = lambda: _busy_and_own_s()
    clock: Callable[[], float] = time.monotonic
    count: int = psutil.cpu_count() or 1
    _last: tuple[float, float, float] | None = None

    def look(self) -> float | None:
        """None at the first look."""
        now_s, (busy_s, own_s) = self.clock(), self.busy_s()
        last, self._last = self._last, (now_s, busy_s, own_s)
        if last is None or now_s <= last[0]:
            return None
        others_s = (busy_s - last[1]) - (own_s - last[2])
        return min(1.0, max(0.0, others_s / (now_s - last[0]) / self.count))


def _busy_and_own_s() -> tuple[float, float]:
    """Processor seconds of all programs, and of this one."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # A guest's time is in `user` already.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total_s - idle_s, sum(map(_processor_s, _own_processes()))


def _own_processes() -> list[psutil.Process]:
    """This process and, of several workers of one machine, its siblings."""
    own = psutil.Process()
    try:
        parent = own.parent()
        siblings = [] if parent is None else parent.children()
        return [own, *(each for each in siblings if each != own and _PROGRAM in " ".join(each.cmdline()))]
    except psutil.Error:
        return [own]


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
