"""A machine of known size and speed, so that what is said to fit does not depend on where tests run."""

from __future__ import annotations

import pytest

from shardcompute.backends.devices import ComputeDevice
from shardcompute.cli.models import fit
from shardcompute.node.worker.speed_probe import BackendSpeed


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """8 GiB are free on its CPU, which reads ten gigabytes in a second; the list has what was probed."""
    probed: list[str] = []
    host = ComputeDevice(
        name="cpu",
        backend="onnx",
        label="Plain CPU",
        total_bytes=16 << 30,
        free_bytes=8 << 30,
        is_host_memory=True,
    )

    def probe(backend: str, device: str, threads: int) -> BackendSpeed:
        probed.append(device)
        return BackendSpeed(1e-10, 1e-11, 0.0)

    monkeypatch.setattr(fit, "find_devices", lambda: (host,))
    monkeypatch.setattr(fit, "probe_backend", probe)
    return probed
