"""Device probes: what the system shows of its GPUs, which torch is installed, and a report by torch or MLX.

To have torch say what it can compute on takes seconds: a report without complaints is kept for some days, and serves
as long as the system shows the same GPUs and the same library is installed. How much memory is free is the system's
word then.

Nothing here raises but `ProbeError`, and nothing waits for longer than its deadline: drivers hang, and tools that come
with them fail in many ways. Tests put their own functions into `DeviceProbes`.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from shardcompute.core.settings import load_settings, visible_gpus

Maker = Literal["nvidia", "amd", "apple"]
_SMI_S = 20.0
_REPORT_S = 90.0
_KILL_S = 2.0
_MOST_CHARACTERS = 1 << 20
_MIB = 1 << 20
_LEAST_VRAM_BYTES = 1 << 30
_QUERY = "uuid,name,memory.total,memory.free,driver_version,compute_cap"
_DRIVER = Path("/proc/driver/nvidia")
_DEV = Path("/dev")
_REPORTS_FILE = "device-reports.json"
_REPORT_LASTS_S = 7 * 86_400.0
_MOST_REPORTS = 8
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class ProbeError(Exception):
    """A device could not be asked; `fix` is what to do about it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """A GPU as the system shows it. 0 and "": it does not say."""

    maker: Maker
    label: str
    total_bytes: int = 0
    free_bytes: int = 0
    uuid: str = ""
    driver: str = ""
    capability: tuple[int, int] | None = None
    is_permitted: bool = True
    """Whether this user may talk to it at all."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch by its files: for which kind of GPU it was built, if any."""

    version: str
    cuda: str = ""
    hip: str = ""

    @property
    def has_gpu(self) -> bool:
        return bool(self.cuda or self.hip)


@dataclass(frozen=True, slots=True)
class HostMemory:
    label: str
    total_bytes: int
    free_bytes: int


class ReportedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as torch or MLX sees it; `error`: why it could not compute."""

    index: int = 0
    label: str = ""
    uuid: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    capability: tuple[int, int] | None = None
    arch: str = ""
    error: str = ""


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `device_report` printed. `arches`: for which GPUs the library has code, as sm_90, compute_90 or gfx1100."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    arches: tuple[str, ...] = ()
    gpus: tuple[ReportedGpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbes:
    """Where everything that `devices` knows comes from."""

    gpus: Callable[[], Sequence[SeenGpu]]
    torch: Callable[[], TorchBuild | None]
    has_mlx: Callable[[], bool]
    report: Callable[[str], DeviceReport]
    """By torch or mlx; ProbeError where it fails or takes too long."""
    host: Callable[[], HostMemory]
    platform: str = "Linux"


def system_probes(*, asks_anew: bool = False) -> DeviceProbes:
    """Those of this machine. `asks_anew`: no report that was kept serves."""
    probes = DeviceProbes(
        gpus=seen_gpus,
        torch=torch_build,
        has_mlx=lambda: importlib.util.find_spec("mlx") is not None,
        report=report_by,
        host=host_memory,
        platform=platform.system(),
    )
    if asks_anew:
        return probes
    return remembering(probes, load_settings().data_dir / _REPORTS_FILE, visible_gpus())


class KeptReport(msgspec.Struct, frozen=True):
    """What a library reported, and of what."""

    library: str
    about: str
    reported_at_s: float
    report: DeviceReport


def remembering(
    probes: DeviceProbes, path: Path, environment: str, clock: Callable[[], float] = time.time
) -> DeviceProbes:
    """The same probes; reports are kept in a file and serve again. `environment`: what else they depend on."""
    shown: list[SeenGpu] = []

    def gpus() -> Sequence[SeenGpu]:
        shown[:] = probes.gpus()
        return tuple(shown)

    def report(library: str) -> DeviceReport:
        kept, now_s = _read_reports(path), clock()
        # What is free changes all the time, and is told by the system.
        lasting = [replace(gpu, free_bytes=0) for gpu in shown]
        about = repr((environment, sys.prefix, probes.torch(), lasting))
        for each in kept:
            if (each.library, each.about) == (
                library,
                about,
            ) and 0 <= now_s - each.reported_at_s < _REPORT_LASTS_S:
                found = _with_free(each.report, shown)
                if found is not None:
                    return found
        made = probes.report(library)
        if made.gpus and not made.error and not any(gpu.error for gpu in made.gpus):
            others = [each for each in kept if (each.library, each.about) != (library, about)]
            _write_reports(path, [*others, KeptReport(library, about, now_s, made)][-_MOST_REPORTS:])
        return made

    return replace(probes, gpus=gpus, report=report)


def _with_free(report: DeviceReport, shown: Sequence[SeenGpu]) -> DeviceReport | None:
    """A kept report with the memory that the system says is free; None where it does not say that of every GPU."""
    free = {gpu.uuid: gpu.free_bytes for gpu in shown if gpu.uuid and gpu.free_bytes}
    if any(gpu.uuid not in free for gpu in report.gpus):
        return None
    gpus = tuple(msgspec.structs.replace(gpu, free_bytes=free[gpu.uuid]) for gpu in report.gpus)
    return msgspec.structs.replace(report, gpus=gpus)


def _read_reports(path: Path) -> list[KeptReport]:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_CHARACTERS), type=list[KeptReport])
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return []


def _write_reports(path: Path, reports: Sequence[KeptReport]) -> None:
    """Whole or not at all; without them the next start only takes longer."""
    written = path.with_name(f"{path.name}.{os.getpid()}.new")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written.write_bytes(msgspec.json.encode(reports))
        written.replace(path)


def host_memory() -> HostMemory:
    memory = psutil.virtual_memory()
    return HostMemory(_cpu_label(), int(memory.total), int(memory.available))


def seen_gpus() -> list[SeenGpu]:
    if platform.system() == "Darwin":
        return [SeenGpu(maker="apple", label=_cpu_label())] if platform.machine() == "arm64" else []
    return _nvidia_gpus() or amd_gpus(_KFD_NODES)


def torch_build() -> TorchBuild | None:
    """None where torch is not installed. Not by importing it: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        # As one that may do anything: it will be asked.
        return TorchBuild("of unknown version", cuda="unknown")
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return TorchBuild(
        found.get("__version__", "of unknown version"), found.get("cuda", ""), found.get("hip", "")
    )


def report_by(library: str) -> DeviceReport:
    """What torch or mlx finds, in a process of its own: neither its memory nor its faults stay with us."""
    command = [sys.executable, "-m", "shardcompute.backends.device_report", library]
    code, output, complaint = _run(command, _REPORT_S)
    if code is None:
        raise ProbeError(
            f"{library} did not say within {_REPORT_S:.0f} s what it can compute on",
            "restart the machine or the GPU's driver, or compute on the CPU with --device cpu",
        )
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(output, type=DeviceReport)
    last = (complaint.strip().splitlines() or [f"it ended with {code}"])[-1][:300]
    raise ProbeError(
        f"{library} fails when it is asked for devices: {last}",
        f"install it again: pip install --force-reinstall {library}",
    )


def _nvidia_gpus() -> list[SeenGpu]:
    program = shutil.which("nvidia-smi")
    if program is not None:
        code, output, _ = _run([program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], _SMI_S)
        found = read_smi(output) if code == 0 else []
        if found:
            return found
    return nvidia_files(_DRIVER, _DEV)


def read_smi(output: str) -> list[SeenGpu]:
    """The lines of `nvidia-smi --query-gpu`; what cannot be read of one is not known."""
    found = []
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        if len(row) != len(_QUERY.split(",")):
            continue
        uuid, name, total, free, driver, capability = (part.strip() for part in row)
        found.append(
            SeenGpu(
                maker="nvidia",
                label=name,
                total_bytes=_number(total) * _MIB,
                free_bytes=_number(free) * _MIB,
                uuid=uuid.removeprefix("GPU-"),
                driver=driver,
                capability=read_capability(capability),
            )
        )
    return found


def nvidia_files(driver: Path, dev: Path) -> list[SeenGpu]:
    """Of a driver without its tools, as in containers; or of one that does not answer."""
    labels = []
    with contextlib.suppress(OSError):
        for path in sorted((driver / "gpus").glob("*/information")):
            model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
            labels.append(model.group(1) if model else "NVIDIA GPU")
    if not labels:
        with contextlib.suppress(OSError):
            labels = ["NVIDIA GPU" for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return [SeenGpu(maker="nvidia", label=label) for label in labels]


def amd_gpus(nodes: Path) -> list[SeenGpu]:
    """Cards that AMD's driver lets programs compute on; not those that have next to no memory of their own."""
    found = []
    with contextlib.suppress(OSError):
        for node in sorted(nodes.iterdir()):
            gpu = _amd_gpu(node)
            if gpu is not None:
                found.append(gpu)
    return found


def _amd_gpu(node: Path) -> SeenGpu | None:
    try:
        about = _properties(node / "properties")
        if not about.get("simd_count"):
            return None
        banks = [_properties(bank / "properties") for bank in (node / "mem_banks").iterdir()]
    except OSError:
        return None
    # Heaps 1 and 2 are the card's own memory.
    own = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2))
    if own < _LEAST_VRAM_BYTES:
        return None
    is_permitted = True
    try:
        with Path("/dev/kfd").open("r+b"):
            pass
    except PermissionError:
        is_permitted = False
    except OSError:
        pass
    return SeenGpu(maker="amd", label=_amd_label(about), total_bytes=own, is_permitted=is_permitted)


def _amd_label(about: dict[str, int]) -> str:
    version = about.get("gfx_target_version", 0)
    gfx = f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}" if version else ""
    return f"AMD GPU {gfx}".strip()


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text(errors="replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _run(command: list[str], timeout_s: float) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a program; None for the code of one that did not end in time. It is then left
    alone if it cannot be killed: a process that waits for a driver may be beyond that."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return 1, "", str(error)
    try:
        output, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_S)
        return None, "", ""
    return process.returncode, output[:_MOST_CHARACTERS], complaint[:_MOST_CHARACTERS]


def read_capability(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d{1,2})\.(\d{1,2})", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def _number(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 16 else 0


def _cpu_label() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return re.sub(r"\s+", " ", found.group(1))
    if platform.system() == "Darwin":
        code, output, _ = _run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], _KILL_S)
        if code == 0 and output.strip():
            return output.strip()
    return platform.processor() or platform.machine() or "CPU"
