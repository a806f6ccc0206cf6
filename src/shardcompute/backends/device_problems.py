"""Device problems: why a GPU that is there cannot be used, and the line that changes that.

Lines are to be copied: those that install torch name an index that has wheels for the GPU and its driver. CUDA 13 needs
a driver of the 580 series and a GPU of compute capability 7.5; wheels of CUDA 12.6, made up to torch 2.14, do with
a driver of the 525 series and know GPUs from compute capability 5.0 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardcompute.backends.device_probes import DeviceReport, ReportedGpu, SeenGpu, TorchBuild

Told = tuple[str, str]
"""A problem and the line that fixes it."""

NO_APPLE = "neither mlx nor torch is installed"
APPLE_FIX = "pip install 'shardcompute[mlx]'"
NO_METAL = "Metal is not available to this process"
RESTART_DRIVER = "restart the machine or the GPU's driver; until then --device cpu computes without it"
_CPU_ONLY = "no torch has code for it: --device cpu computes without it"
_WHEELS = "https://download.pytorch.org/whl"
_CUDA_13_DRIVER = 580
_CUDA_12_DRIVER = 525
_CUDA_13_CAPABILITY = (7, 5)
_CUDA_12_CAPABILITY = (5, 0)
_NO_MEMORY = ("out of memory", "memory allocation")
_NO_CODE = ("no kernel image", "not compatible with the current")
_OLD_DRIVER = ("driver on your system is too old", "driver version is insufficient", "forward compatibility")


def without_use(
    build: TorchBuild | None, seen: Sequence[SeenGpu], platform: str
) -> Callable[[SeenGpu], Told] | None:
    """What to say of GPUs with which this torch, by its files alone, can do nothing; None where it has to be asked."""
    maker = seen[0].maker
    if not seen[0].is_permitted:
        return lambda gpu: (
            "this user may not use /dev/kfd",
            'sudo usermod -aG render,video "$USER", then log in again',
        )
    if build is None:
        return lambda gpu: ("torch is not installed", install_torch(gpu, platform, is_new=True))
    if not build.has_gpu:
        return lambda gpu: (f"torch {build.version} is built for CPUs only", install_torch(gpu, platform))
    if maker == "amd" and not build.hip:
        return lambda gpu: (f"torch {build.version} is built for NVIDIA's GPUs", install_torch(gpu, platform))
    if maker == "nvidia" and not build.cuda:
        return lambda gpu: (f"torch {build.version} is built for AMD's GPUs", install_torch(gpu, platform))
    return None


def without_devices(
    report: DeviceReport, seen: Sequence[SeenGpu], platform: str
) -> Callable[[SeenGpu], Told]:
    """What to say of GPUs that the system shows and torch does not find."""
    if any(words in report.error for words in _OLD_DRIVER):
        return lambda gpu: (_old_driver(gpu, report), _newer_driver(gpu, report, platform))
    said = f": {report.error}" if report.error else ""
    return lambda gpu: (
        f"torch {report.version} finds no device{said}",
        "see whether nvidia-smi answers and CUDA_VISIBLE_DEVICES hides it; a restart helps after a driver's update"
        if gpu.maker == "nvidia"
        else "see whether rocminfo answers and HIP_VISIBLE_DEVICES hides it",
    )


def of_reported(gpu: ReportedGpu, report: DeviceReport, platform: str) -> Told | None:
    """What is wrong with a GPU that torch has found, if anything is."""
    has_code = can_run(gpu, report.arches)
    if not has_code or any(words in gpu.error for words in _NO_CODE):
        about = (
            f"compute capability {_dotted(gpu.capability)}" if gpu.capability and not report.hip else gpu.arch
        )
        seen = SeenGpu(maker="amd" if report.hip else "nvidia", label=gpu.label, capability=gpu.capability)
        return f"torch {report.version} has no code for {about or 'it'}", install_torch(seen, platform)
    if any(words in gpu.error for words in _NO_MEMORY):
        return "no memory is free on it", free_memory(f"cuda:{gpu.index}")
    if gpu.error:
        return f"it does not compute: {gpu.error}", RESTART_DRIVER
    return None


def can_run(gpu: ReportedGpu, arches: Sequence[str]) -> bool:
    """Whether a library with code for `arches` runs there. Code for 8.0 runs on 8.6, not the other way round and not on
    9.0; what is there as `compute` is compiled on the way for everything newer."""
    if not arches or (gpu.capability is None and not gpu.arch):
        return True
    if gpu.arch.startswith("gfx"):
        return gpu.arch in arches
    if gpu.capability is None:
        return True
    for arch in arches:
        kind, _, digits = arch.partition("_")
        number = digits.rstrip("af")
        if not number.isdigit():
            continue
        built = (int(number[:-1] or 0), int(number[-1]))
        if kind == "compute" and built <= gpu.capability:
            return True
        if kind == "sm" and built[0] == gpu.capability[0] and built <= gpu.capability:
            return True
    return False


def install_torch(gpu: SeenGpu, platform: str, *, is_new: bool = False) -> str:
    """The line that installs a torch for this GPU and its driver."""
    if gpu.maker == "amd":
        return f"pip install --force-reinstall torch --index-url {_WHEELS}/rocm6.4"
    if gpu.capability is not None and gpu.capability < _CUDA_12_CAPABILITY:
        return _CPU_ONLY
    driver = _series(gpu)
    if driver is not None and driver < _CUDA_12_DRIVER:
        return (
            f"update its driver ({gpu.driver}) to {_CUDA_13_DRIVER} or newer: https://www.nvidia.com/drivers"
        )
    is_old = (driver is not None and driver < _CUDA_13_DRIVER) or (
        gpu.capability is not None and gpu.capability < _CUDA_13_CAPABILITY
    )
    force = "" if is_new else "--force-reinstall "
    if is_old:
        return f"pip install {force}'torch<2.15' --index-url {_WHEELS}/cu126"
    if is_new and platform == "Linux":
        return "pip install 'shardcompute[torch]'"
    return f"pip install {force}torch --index-url {_WHEELS}/cu130"


def free_memory(device: str) -> str:
    return (
        f"end what uses it (nvidia-smi shows that), then start again; or leave {device} out with --device cpu"
    )


def _old_driver(gpu: SeenGpu, report: DeviceReport) -> str:
    version = f" {gpu.driver}" if gpu.driver else ""
    return f"its driver{version} is too old for torch {report.version} with CUDA {report.cuda}"


def _newer_driver(gpu: SeenGpu, report: DeviceReport, platform: str) -> str:
    line = install_torch(gpu, platform)
    if report.cuda.startswith("13") and line.startswith("pip") and "cu126" in line:
        return line
    return f"update its driver to {_CUDA_13_DRIVER} or newer: https://www.nvidia.com/drivers"


def _series(gpu: SeenGpu) -> int | None:
    head = gpu.driver.partition(".")[0]
    return int(head) if head.isdigit() else None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
