"""`requirements.lock`: the exact releases that `make up` installs, with the hashes of their files, for every platform.

Without options it is written anew, by uv, which must be on the path; `--check` says offline whether it fits
`pyproject.toml`: every requirement met, every release with hashes, nothing by URL. pip checks the hashes themselves.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
HEADER = "# Exact releases and their hashes, for `make up`. Written by `make lock`; do not edit.\n"
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
EDITABLE = "editables"
"""What the build back end wants besides for an editable install."""


@dataclass(frozen=True, slots=True)
class LockedRelease:
    requirement: Requirement
    hashes: int


def main() -> int:
    parser = argparse.ArgumentParser(description="The lock file of what serving needs.")
    parser.add_argument(
        "--check", action="store_true", help="say whether it fits pyproject.toml, and change nothing"
    )
    wanted = wanted_requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    if not parser.parse_args().check:
        return _write(wanted)
    findings = list(unfit(wanted, LOCK.read_text()))
    for each in findings:
        print(f"requirements.lock: {each}; run `make lock`")
    return 1 if findings else 0


def wanted_requirements(project: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """What serving needs, and what installs this package without asking for anything unlocked."""
    return [*project["project"]["dependencies"], *project["build-system"]["requires"], EDITABLE]


def unfit(wanted: Sequence[str], lock: str) -> Iterator[str]:
    """Why a lock file cannot be used, in words."""
    try:
        releases = list(read_lock(lock))
    except InvalidRequirement as error:
        yield f"a line cannot be read ({error})"
        return
    locked: dict[str, list[Requirement]] = {}
    for release in releases:
        pins = list(release.requirement.specifier)
        name = canonicalize_name(release.requirement.name)
        if release.requirement.url or len(pins) != 1 or pins[0].operator != "==":
            yield f"{name} is not one exact release"
        elif not release.hashes:
            yield f"{name} has no hashes"
        locked.setdefault(name, []).append(release.requirement)
    for line in wanted:
        requirement = Requirement(line)
        found = locked.get(canonicalize_name(requirement.name), [])
        versions = [pin.version for each in found for pin in each.specifier]
        if not versions:
            yield f"{requirement.name} is missing"
        elif not all(requirement.specifier.contains(version, prereleases=True) for version in versions):
            yield f"{requirement.name} is locked to {', '.join(versions)}, pyproject.toml wants {requirement.specifier}"


def read_lock(text: str) -> Iterator[LockedRelease]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield LockedRelease(Requirement(line.split("--hash=")[0].strip()), len(HASH.findall(line)))


def _write(wanted: Sequence[str]) -> int:
    uv = shutil.which("uv")
    if uv is None:
        print("writing the lock file needs uv: pip install uv", file=sys.stderr)
        return 1
    with tempfile.NamedTemporaryFile("w", suffix=".in") as source:
        source.write("\n".join(wanted) + "\n")
        source.flush()
        # Universal: one file for every platform and Python that we support.
        command = [uv, "pip", "compile", source.name, "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.strip(), file=sys.stderr)
        return 1
    LOCK.write_text(HEADER + done.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
