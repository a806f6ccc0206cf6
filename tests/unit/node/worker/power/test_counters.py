"""Energy counters: RAPL as Linux shows it, NVML by a library that answers as it does."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from shardcompute.backends.devices import host_device
from shardcompute.node.worker.power.counters import NvmlCounter, RaplCounter
from shardcompute.node.worker.power.meter import PowerMeter, open_meter
from shardcompute.node.worker.power.terms import PowerTerms


def domain(folder: Path, name: str, called: str, energy_uj: int, most_uj: int = 10**9) -> Path:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    for file, value in (("name", called), ("energy_uj", energy_uj), ("max_energy_range_uj", most_uj)):
        (path / file).write_text(f"{value}\n")
    return path


def test_rapl_counts_packages_and_memory_once(tmp_path: Path) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 4_000_000)
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", 900_000_000)
    counter = RaplCounter(tmp_path)
    assert counter.joules() == 0
    domain(tmp_path, "intel-rapl:0:0", "core", 7_000_000)
    (package / "energy_uj").write_text("8000000")
    (memory / "energy_uj").write_text("100000000")  # it has begun anew
    assert counter.joules() == pytest.approx(3 + 200)
    assert counter.joules() == pytest.approx(203)


def test_without_a_readable_domain_there_is_no_counter(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="RAPL"):
        RaplCounter(tmp_path)
    domain(tmp_path, "intel-rapl:0:0", "core", 1)
    with pytest.raises(OSError, match="RAPL"):
        RaplCounter(tmp_path)


class Card:
    """NVML of one card."""

    def __init__(self, name: bytes = b"NVIDIA H200", code: int = 0) -> None:
        self.millijoules, self.code, self.name = 1000, code, name

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count: object) -> int:  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 1  # type: ignore[arg-type]
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: ctypes.c_uint, card: object) -> int:  # noqa: N802
        return 0 if number.value == 0 else 6

    def nvmlDeviceGetName(self, card: object, name: object, size: object) -> int:  # noqa: N802
        name.value = self.name  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, card: object, used: object) -> int:  # noqa: N802
        ctypes.cast(used, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules  # type: ignore[arg-type]
        return self.code


def test_nvml_counts_the_card_that_is_seen() -> None:
    card = Card()
    counter = NvmlCounter(3, "NVIDIA H200", card)  # type: ignore[arg-type]
    card.millijoules += 2500
    assert counter.joules() == pytest.approx(2.5)


@pytest.mark.parametrize("card", [Card(name=b"another"), Card(code=3), object()])
def test_a_card_that_does_not_count_is_no_counter(card: object) -> None:
    with pytest.raises(OSError, match=r"not|answers|no "):
        NvmlCounter(0, "NVIDIA H200", card)  # type: ignore[arg-type]


class Counted:
    source = "test"

    def __init__(self) -> None:
        self.total = 0.0
        self.is_broken = False

    def joules(self) -> float:
        if self.is_broken:
            raise OSError("gone")
        return self.total


def test_a_meter_tells_work_from_rest() -> None:
    counter = Counted()
    meter = PowerMeter(counter, sharers=2)
    now_s = computed_s = 0.0
    meter.look(now_s, computed_s)
    for watts, busy in ((100.0, 0.0), (60.0, 0.0), (300.0, 0.9), (7.0, 0.3)):
        for _ in range(20):
            now_s, computed_s = now_s + 5, computed_s + 5 * busy
            counter.total += 5 * watts
            meter.look(now_s - 1, computed_s)  # too soon
            meter.look(now_s, computed_s)
    assert meter.busy_watts == pytest.approx(150)
    assert meter.idle_watts == pytest.approx(30, rel=0.02)
    counter.is_broken = True
    meter.look(now_s + 5, computed_s)
    assert meter.busy_watts == pytest.approx(150)


def test_what_nobody_counts_stays_unknown() -> None:
    meter = open_meter(host_device(), 1, find=lambda device: None)
    for second in range(60):
        meter.look(float(second), float(second))
    assert (meter.busy_watts, meter.idle_watts) == (0.0, 0.0)


def test_workers_of_one_machine_share_what_it_draws() -> None:
    each = PowerTerms(watts=90.0, price_per_hour=0.3).shared_by(3)
    assert each == PowerTerms(30.0, pytest.approx(0.1), 3)
    assert each.arguments() == ("--watts", "30.0", "--price-hour", str(0.3 / 3), "--power-sharers", "3")
    assert PowerTerms().arguments() == ()
