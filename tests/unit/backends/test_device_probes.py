"""Probes of devices: what nvidia-smi, drivers' files and torch's own files say, and programs that never answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shardcompute.backends import device_probes
from shardcompute.backends.device_probes import (
    ProbeError,
    ReportedGpu,
    TorchBuild,
    amd_gpus,
    nvidia_files,
    read_smi,
    remembering,
    report_by,
    torch_build,
)
from shardcompute.backends.device_problems import can_run
from shardcompute.backends.devices import find_devices
from support.fake_devices import H200, cuda_machine, second

_SMI = """\
GPU-1c2d, NVIDIA H200, 143771, 143156, 580.65.06, 9.0
GPU-77aa, NVIDIA GeForce GTX 970, 4096, [N/A], 550.120, 5.2
rubbish
"""


def test_nvidia_smi() -> None:
    h200, old = read_smi(_SMI)
    assert (h200.uuid, h200.label, h200.driver, h200.capability) == (
        "1c2d",
        "NVIDIA H200",
        "580.65.06",
        (9, 0),
    )
    assert h200.total_bytes == 143771 << 20
    assert (old.free_bytes, old.capability) == (0, (5, 2))


def test_a_driver_without_tools(tmp_path: Path) -> None:
    folder = tmp_path / "driver" / "gpus" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t NVIDIA RTX A4000\nIRQ: 5\n")
    [gpu] = nvidia_files(tmp_path / "driver", tmp_path)
    assert (gpu.maker, gpu.label) == ("nvidia", "NVIDIA RTX A4000")


def test_a_container_that_shows_devices_alone(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert len(nvidia_files(tmp_path / "none", tmp_path)) == 2


def test_amd_cards_and_not_the_cpu_or_what_has_no_memory_of_its_own(tmp_path: Path) -> None:
    for number, (simds, heap, size) in enumerate([(0, 0, 64 << 30), (96, 1, 24 << 30), (4, 1, 512 << 20)]):
        bank = tmp_path / str(number) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (tmp_path / str(number) / "properties").write_text(
            f"simd_count {simds}\ngfx_target_version 110000\nunique_id 18446744073709551615\n"
        )
        (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\n")
    [gpu] = amd_gpus(tmp_path)
    assert (gpu.maker, gpu.label, gpu.total_bytes) == ("amd", "AMD GPU gfx1100", 24 << 30)


@pytest.mark.parametrize(
    ("text", "cuda", "hip"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "", ""),
        (
            "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            "13.0",
            "",
        ),
        ("__version__ = '2.9.0+rocm6.4'\ncuda = None\nhip = '6.4.4'\n", "", "6.4.4"),
    ],
)
def test_torch_by_its_files(
    text: str, cuda: str, hip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('nobody may import this')\n")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    build = torch_build()
    assert build is not None
    assert (build.cuda, build.hip, build.has_gpu) == (cuda, hip, bool(cuda or hip))
    assert build.version in text


def _pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Let `python` be a program of ours."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.skipif(sys.platform == "win32", reason="starts a shell script")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("exec sleep 600", "did not say within 0 s"),
        ("kill -SEGV $$", "it ended with -11"),
        ("echo 'ImportError: libcudart' >&2; exit 1", "ImportError: libcudart"),
        ('echo \'{"gpus": [{"total_bytes": "much"}]}\'', "it ended with 0"),
        ("echo nonsense", "it ended with 0"),
    ],
)
def test_a_library_that_hangs_dies_or_talks_nonsense(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, tmp_path, program)
    monkeypatch.setattr(device_probes, "_REPORT_S", 0.4 if "sleep" in program else 30.0)
    with pytest.raises(ProbeError, match=said) as caught:
        report_by("torch")
    assert caught.value.fix


@pytest.mark.skipif(sys.platform == "win32", reason="starts a shell script")
def test_a_report_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, tmp_path, 'echo \'{"version": "2", "gpus": [{"index": 1, "label": "X"}]}\'')
    assert report_by("torch").gpus == (ReportedGpu(index=1, label="X"),)


@pytest.mark.parametrize(
    ("capability", "arches", "runs"),
    [
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "sm_86"), False),
        ((9, 0), ("sm_80", "compute_80"), True),
        ((9, 0), ("sm_90a",), True),
        ((12, 0), ("sm_90", "sm_120"), True),
        ((6, 1), ("sm_75", "compute_120"), False),
        ((6, 1), (), True),
    ],
)
def test_for_which_gpus_there_is_code(
    capability: tuple[int, int], arches: tuple[str, ...], runs: bool
) -> None:
    assert can_run(ReportedGpu(capability=capability), arches) is runs


def test_code_for_amd_is_for_the_very_same() -> None:
    assert can_run(ReportedGpu(arch="gfx1100"), ("gfx1100",))
    assert not can_run(ReportedGpu(arch="gfx1103"), ("gfx1100",))


class _Remembered:
    """A machine whose probes remember, in a file."""

    def __init__(self, path: Path) -> None:
        self.machine = cuda_machine(H200, second())
        self.environment = ""
        self.now_s = 1e9
        self._path = path

    def find(self) -> list[int]:
        """The free memory of its GPUs."""
        probes = remembering(self.machine.probes(), self._path, self.environment, lambda: self.now_s)
        return [device.free_bytes for device in find_devices(probes=probes) if device.is_gpu]

    @property
    def asked(self) -> int:
        return len(self.machine.asked)


@pytest.fixture
def remembered(tmp_path: Path) -> _Remembered:
    return _Remembered(tmp_path / "folder" / "reports.json")


def test_a_report_serves_again_with_the_memory_that_is_free_now(remembered: _Remembered) -> None:
    assert remembered.find() == [H200.free_bytes, second().free_bytes]
    seen = remembered.machine.seen
    remembered.machine.seen = (replace(seen[0], free_bytes=7 << 30), replace(seen[1], free_bytes=5 << 30))
    assert remembered.find() == [7 << 30, 5 << 30]
    assert remembered.asked == 1


@pytest.mark.parametrize("change", ["driver", "card", "library", "environment", "age", "clock", "silence"])
def test_torch_is_asked_again_where_something_is_not_as_it_was(remembered: _Remembered, change: str) -> None:
    remembered.find()
    machine = remembered.machine
    if change == "driver":
        machine.seen = tuple(replace(gpu, driver="999.1") for gpu in machine.seen)
    elif change == "card":
        machine.seen = machine.seen[:1]
    elif change == "library":
        machine.build = TorchBuild("2.14.0+cu130", cuda="13.0")
    elif change == "environment":
        remembered.environment = "CUDA_VISIBLE_DEVICES=1"
    elif change == "age":
        remembered.now_s += 8 * 86_400
    elif change == "clock":
        remembered.now_s -= 60
    elif change == "silence":
        # The system does not say what is free.
        machine.seen = tuple(replace(gpu, free_bytes=0) for gpu in machine.seen)
    remembered.find()
    assert remembered.asked == 2


def test_a_report_with_complaints_is_not_kept(remembered: _Remembered) -> None:
    broken = msgspec.structs.replace(second(), error="no kernel image is available")
    remembered.machine.report = msgspec.structs.replace(
        cuda_machine(H200, second()).probes().report("torch"), gpus=(H200, broken)
    )
    remembered.find()
    remembered.find()
    assert remembered.asked == 2


def test_a_file_of_reports_that_cannot_be_read_is_as_good_as_none(
    remembered: _Remembered, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "reports.json").write_text("[{", encoding="utf-8")
    remembered.find()
    remembered.find()
    assert remembered.asked == 1
