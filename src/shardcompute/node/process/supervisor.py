"""Supervisor: keeps the worker processes of this machine alive, and takes them along when it goes.

A child ends by itself once its standard input closes, which also happens when this process is killed: no worker
is left behind. What children write to stderr goes to their log files. A child that dies is started again after a
pause that grows; one that keeps dying, was refused or was told to leave is not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardcompute.core.errors import AuthError, UsageError
from shardcompute.node.process.log_files import LineFile

log = logging.getLogger(__name__)
_FINAL_CODES = {
    0: "left the cluster",
    UsageError.exit_code: "cannot start",
    AuthError.exit_code: "was refused",
}


class Child(Protocol):
    """A running process."""

    pid: int

    def lines(self) -> Iterator[str]:
        """What it writes, until it stops writing."""
        ...

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        ...

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to pause before the next start. A child that lived `healthy_after_s` starts with a clean slate."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    most_deaths: int = 8
    healthy_after_s: float = 60.0

    def delay_s(self, deaths: int) -> float | None:
        """After this many deaths in a row; None: give up."""
        if deaths >= self.most_deaths:
            return None
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (deaths - 1))


@dataclass(frozen=True, slots=True)
class Program:
    """What to keep running, and under which name."""

    name: str
    command: tuple[str, ...]


class Supervisor:
    """Starts every program in its own thread. `say` hears, in those threads, what people should know."""

    def __init__(
        self,
        programs: Sequence[Program],
        folder: Path,
        *,
        spawn: Callable[[Program], Child] | None = None,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
        hear: Callable[[Program, str], None] = lambda program, line: None,
    ) -> None:
        """`hear` is told every line that a program writes."""
        self._hear = hear
        self._codes: dict[str, int] = {}
        self._folder = folder
        self._spawn = spawn or spawn_process
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._say = say
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        self._threads = [
            threading.Thread(target=self._keep, args=(program,), name=program.name, daemon=True)
            for program in programs
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs and nothing will be started again."""
        return not any(thread.is_alive() for thread in self._threads)

    def codes(self) -> dict[str, int]:
        """With what the programs ended that will not be started again."""
        with self._lock:
            return dict(self._codes)

    def pids(self) -> dict[str, int]:
        """Of the programs that are running now."""
        with self._lock:
            return {name: child.pid for name, child in self._children.items()}

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing runs and nothing will be started again."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if deadline is None else max(0.0, deadline - self._clock()))

    def stop(self, grace_s: float = 8.0) -> None:
        """Ask all to stop and wait; what is still there after `grace_s` is killed."""
        with self._lock:
            self._stopping.set()
            children = list(self._children.values())
        for child in children:
            child.ask_to_stop()
        self.wait(grace_s)
        with self._lock:
            left = dict(self._children)
        for name, child in left.items():
            log.warning("%s (pid %d) did not stop in time and is killed", name, child.pid)
            child.kill()
        self.wait()

    def _keep(self, program: Program) -> None:
        lines = LineFile(self._folder, program.name)
        try:
            deaths = 0
            while True:
                started_s = self._clock()
                code = self._run_once(program, lines)
                if code is None or self._stopping.is_set():
                    return
                is_healthy = self._clock() - started_s >= self._policy.healthy_after_s
                deaths = 1 if is_healthy else deaths + 1
                delay_s = None if code in _FINAL_CODES else self._policy.delay_s(deaths)
                self._tell(program, lines, code, delay_s)
                if delay_s is None:
                    with self._lock:
                        self._codes[program.name] = code
                    return
                self._pause(delay_s)
        finally:
            lines.close()

    def _run_once(self, program: Program, lines: LineFile) -> int | None:
        """Its exit code; None when it is not to be started any more."""
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                child = self._children[program.name] = self._spawn(program)
            except OSError as error:
                log.warning("%s cannot be started: %s", program.name, error)
                return 1
        log.info("%s started, pid %d", program.name, child.pid)
        try:
            for line in child.lines():
                lines.write(line)
                self._hear(program, line)
            return child.wait()
        finally:
            with self._lock:
                del self._children[program.name]

    def _tell(self, program: Program, lines: LineFile, code: int, delay_s: float | None) -> None:
        if code in _FINAL_CODES:
            text = f"{program.name} {_FINAL_CODES[code]} (exit {code})"
        elif delay_s is None:
            text = f"{program.name} {_ending(code)} again and is not started any more"
        else:
            text = f"{program.name} {_ending(code)}; it is started again in {delay_s:g} s"
        log.warning("%s", text)
        lines.write_now(text)
        self._say(text)

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


if sys.platform == "win32":
    _NEW_GROUP = subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _NEW_GROUP = 0


class _Process:
    """A real child, with our end of its standard input held open."""

    def __init__(self, program: Program) -> None:
        self._process = subprocess.Popen(
            program.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal is for us: we stop the children in our own order.
            start_new_session=True,
            creationflags=_NEW_GROUP,
        )
        self.pid = self._process.pid

    def lines(self) -> Iterator[str]:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            yield line.decode(errors="replace").rstrip("\n")

    def wait(self) -> int:
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code

    def ask_to_stop(self) -> None:
        if os.name == "posix":
            self._process.terminate()
        elif self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()


def spawn_process(program: Program) -> Child:
    return _Process(program)
