"""Results of benchmarks: labelled numbers, and where they were measured, in a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from shardcompute.core.errors import SourceError

Say = Callable[[str], None]
"""Told what is being measured now."""
_PACKAGES = ("shardcompute", "numpy", "onnxruntime", "torch", "transformers", "xllamacpp")


@dataclass(frozen=True, slots=True)
class Result:
    """One number: what was measured, in which unit, under which labels."""

    metric: str
    value: float
    unit: str
    labels: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "unit": self.unit, **self.labels}


def describe_environment() -> dict[str, Any]:
    """The machine and the versions, as far as they bear on speed."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """What a benchmark found, under where it ran."""
    text = json.dumps({"environment": describe_environment(), **content}, indent=1, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SourceError(
            f"cannot write {path}: {error.strerror}", hint="choose another --json file"
        ) from error


def listed(results: Iterable[Result]) -> list[dict[str, Any]]:
    return [result.as_json() for result in results]


def median_ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The median over rounds of value / baseline, each pair measured right after another."""
    return statistics.median(value / base for value, base in zip(values, baseline, strict=True))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
