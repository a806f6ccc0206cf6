"""`make test`: the test suite in two parts, what lives in its own process and what starts others.

A failure in one part does not hide the other; what failed is named at the end. `--ci` adds the long suites in a small
form, and runs once more what failed for a cause that tests/known_flaky.txt lists; whatever else fails has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN_FLAKY = ROOT / "tests" / "known_flaky.txt"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
IN_PROCESS = (
    "tests/cluster",
    "tests/parity",
    "tests/hostile",
    "tests/property",
    "tests/compat",
    "tests/unit",
)
"""Files of few long tests first: a job that gets one of them last keeps the others waiting for it."""
STARTING_OTHERS = ("tests/docs", "tests/process", "tests/ui")
MOST_JOBS = 4
MOST_FLAKY = 3
"""More than these at once are no accident."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
PASSED, FAILED = 0, 1


def main() -> int:
    options = _read_options()
    causes = read_causes(KNOWN_FLAKY.read_text())
    LAST_FAILED.unlink(missing_ok=True)
    wanted = [] if options.long else ["-m", "not long" if options.ci else "not long and not ci"]
    cores = os.cpu_count() or 2
    statuses = [
        # One more than there are cores: some always wait for a clock or a socket.
        run([*IN_PROCESS, *wanted, *side_by_side(min(MOST_JOBS, cores + 1))], ONE_THREAD),
        run([*STARTING_OTHERS, *wanted, *side_by_side(2)]),
    ]
    if not any(statuses):
        return PASSED
    failed = read_failed()
    known = [cause_of(test, causes) for test in failed]
    tell("failed", [f"{test}  (known: {cause})" for test, cause in zip(failed, known, strict=True)])
    if not options.ci or set(statuses) - {PASSED, FAILED} or None in known or len(failed) > MOST_FLAKY:
        return FAILED
    print("For causes that are known. Once more, by themselves:", flush=True)
    status = run(failed)
    tell("failed once", failed)
    tell("failed again", read_failed() if status else [])
    return PASSED if status == PASSED else FAILED


def side_by_side(jobs: int) -> list[str]:
    """By file: tests of a file share what it costs to open a model or to start a cluster."""
    return ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]


def run(arguments: Sequence[str], surroundings: dict[str, str] | None = None) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(surroundings or {})}, check=False
    ).returncode


def read_failed() -> list[str]:
    """The tests that failed since the beginning, or when they ran last."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []


def read_causes(text: str) -> dict[str, str]:
    """Causes by pattern of tests. Raises ValueError for a line without a cause and for a pattern of no test file."""
    causes = {}
    for line in text.splitlines():
        pattern, _, cause = line.partition("  ")
        if not pattern or pattern.startswith("#"):
            continue
        if not cause.strip():
            raise ValueError(f"{KNOWN_FLAKY.name}: {pattern} has no cause")
        if not any(ROOT.glob(pattern.partition("::")[0])):
            raise ValueError(f"{KNOWN_FLAKY.name}: there is no {pattern} any more")
        causes[pattern] = cause.strip()
    return causes


def cause_of(test: str, causes: Mapping[str, str]) -> str | None:
    return next((cause for pattern, cause in causes.items() if fnmatch(test, f"{pattern}*")), None)


def tell(what: str, tests: Sequence[str]) -> None:
    if tests:
        print(f"{what}:", *tests, sep="\n  ", flush=True)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ci", action="store_true", help="as .ci/run does")
    parser.add_argument("--long", action="store_true", help="the long suites too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
