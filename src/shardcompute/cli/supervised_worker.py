"""A worker that another command of ours starts and keeps alive, with no more in its process than serving takes.

python -m shardcompute.cli.supervised_worker --data-dir FOLDER --found JSON …

It is told all by its parent (`node.process.local_workers`), so that it needs neither the options of `worker` nor what
parses them for people.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from shardcompute.cli.console import open_screen
from shardcompute.cli.failures import explain, show_error
from shardcompute.cli.serve.worker_process import WorkerServing, run_worker, tell_parent
from shardcompute.core.phases import note_imports
from shardcompute.node.worker.conditions.policy import WorkConditions
from shardcompute.node.worker.power.terms import PowerTerms


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; a worker that has served ends the process itself."""
    os.umask(os.umask(0o077) | 0o002)
    given = _parser().parse_args(arguments)
    try:
        _serve(given)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        shown = explain(error)
        if shown is not error:
            traceback.print_exc()
        show_error(open_screen(), shown)
        return shown.exit_code


def _serve(given: argparse.Namespace) -> NoReturn:
    from shardcompute.node.enrolment.stored import open_enrolled
    from shardcompute.node.process.local_workers import decode_found

    note_imports()
    serving = WorkerServing(
        host=given.host,
        port=given.port,
        advertise=given.advertise,
        name=given.name,
        max_memory=given.max_memory,
        max_download=given.max_download,
        max_upload=given.max_upload,
        conditions=WorkConditions(given.only_when_idle, given.only_on_mains, given.not_metered),
        no_seed=given.no_seed,
        power=PowerTerms(given.watts, given.price_hour, given.power_sharers),
        threads=given.threads,
        shape=given.shape,
    )
    tell: Callable[[str], None] | None = tell_parent if given.told else None
    member = open_enrolled(given.data_dir)
    chosen = decode_found(given.found)
    run_worker(given.data_dir, serving, chosen, member, open_screen(), is_supervised=True, tell=tell)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--found", required=True)
    parser.add_argument("--name")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-memory", type=int)
    parser.add_argument("--host")
    parser.add_argument("--advertise")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--shape")
    parser.add_argument("--max-download", type=int)
    parser.add_argument("--max-upload", type=int)
    parser.add_argument("--watts", type=float)
    parser.add_argument("--price-hour", type=float)
    parser.add_argument("--power-sharers", type=int, default=1)
    for name in ("--only-when-idle", "--only-on-mains", "--not-metered", "--no-seed"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--told", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
