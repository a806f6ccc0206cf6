"""Template sandbox: renders a stranger's template in a process of its own, ended where it takes too long or too much.

The process is started when it is first needed, stays for the next rendering and is replaced after it had to be ended.
A template that had to be ended is left alone for a while, longer each time, and what it was ended over is remembered,
so that asking again and again costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil

from shardcompute.core.errors import BackendError, CapacityError, UnsupportedModelError
from shardcompute.models.templates.engine import TemplateLimits
from shardcompute.models.templates.sandbox_main import read_message, write_message

# Nothing that lies in the folder we were started in.
_COMMAND = (sys.executable, "-P", "-m", "shardcompute.models.templates.sandbox_main")
_LOOK_S = 0.05
_REMEMBERED = 64
RAW_PROMPT = "send a raw prompt (/v1/completions) instead"


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a process may take."""

    start_s: float = 30.0
    wall_s: float = 4.0
    cpu_s: float = 2.0
    memory_bytes: int = 512 << 20
    cool_down_s: float = 1.0
    """After the first time that it had to be ended; twice as long each time after."""
    longest_cool_down_s: float = 60.0


class TemplateSandbox:
    """One template. Rendering takes turns; may be called from any thread."""

    def __init__(
        self,
        source: str,
        limits: SandboxLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._limits = limits or SandboxLimits()
        self._clock = clock
        self._turn = threading.Lock()
        self._process: _RenderingProcess | None = None
        self._end_process: weakref.finalize[Any, Any] | None = None
        self._ended_over: OrderedDict[str, None] = OrderedDict()
        self._kills = 0
        self._rests_until_s = 0.0

    def open(self) -> None:
        """Starts the process; UnsupportedModelError where the template does not compile."""
        with self._taking_turns():
            self._started()

    def render(self, variables: Mapping[str, Any], limits: TemplateLimits, now: datetime) -> dict[str, Any]:
        """What the process answers (see `sandbox_main`). UnsupportedModelError where it had to be ended,
        CapacityError while it is left alone."""
        order = {
            "variables": variables,
            "steps": limits.steps,
            "characters": limits.characters,
            "cpu_s": self._limits.cpu_s,
        }
        digest = hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()
        with self._taking_turns():
            if digest in self._ended_over:
                raise _used_too_much()
            rests_s = self._rests_until_s - self._clock()
            if rests_s > 0:
                raise CapacityError(
                    "the model's chat template used too much time or memory a moment ago and is not tried yet",
                    hint=f"try again in {rests_s:.0f} s, or {RAW_PROMPT}",
                )
            answer = self._started().ask({**order, "now": now.isoformat()}, self._limits.wall_s)
            if answer is None or "exhausted" in answer:
                self._end(digest)
                raise _used_too_much()
            self._kills = 0
            return answer

    @contextlib.contextmanager
    def _taking_turns(self) -> Any:
        if not self._turn.acquire(timeout=self._limits.wall_s):
            raise CapacityError(
                "the model's chat template is busy with other requests", hint="try again in a moment"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _started(self) -> _RenderingProcess:
        if self._process is None or not self._process.is_alive:
            process = _RenderingProcess(self._limits)
            opening = {"source": self._source, "memory_bytes": self._limits.memory_bytes}
            answer = process.ask(opening, self._limits.start_s)
            if answer is None or "ready" not in answer:
                process.end()
                why = (
                    "is too much to compile"
                    if answer is None
                    else f"does not compile: {answer.get('broken')}"
                )
                raise UnsupportedModelError(f"the model's chat template {why}", hint=RAW_PROMPT)
            self._process = process
            self._end_process = weakref.finalize(self, process.end)
        return self._process

    def _end(self, digest: str) -> None:
        if self._end_process is not None:
            self._end_process()
        self._process = None
        self._ended_over[digest] = None
        while len(self._ended_over) > _REMEMBERED:
            self._ended_over.popitem(last=False)
        rest_s = min(self._limits.cool_down_s * 2**self._kills, self._limits.longest_cool_down_s)
        self._rests_until_s = self._clock() + rest_s
        self._kills = min(self._kills + 1, 32)


class _RenderingProcess:
    """The process behind a sandbox, and a thread that reads what it answers."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        try:
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise BackendError(
                f"the process that renders the model's chat template cannot be started: {error}",
                hint=RAW_PROMPT,
            ) from error
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for work in (self._write, self._read):
            threading.Thread(target=work, name="template sandbox", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, order: Any, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None where none came in time, or within the memory that there is for it."""
        deadline_s = time.monotonic() + timeout_s
        self._told.put(order)
        while time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                answer: dict[str, Any] | None = self._said.get(timeout=_LOOK_S)
                return answer
            if self._is_too_large():
                return None
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._told.put(None)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (order := self._told.get()) is not None:
                write_message(self._process.stdin, order)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while (message := read_message(self._process.stdout)) is not None:
                self._said.put(message)
        self._said.put(None)

    def _is_too_large(self) -> bool:
        """Where the system does not hold it to its memory, we do."""
        try:
            return bool(psutil.Process(self._process.pid).memory_info().rss > 2 * self._limits.memory_bytes)
        except psutil.Error:
            return False


def _used_too_much() -> UnsupportedModelError:
    return UnsupportedModelError(
        "the model's chat template used too much time or memory for these messages and was ended",
        hint=RAW_PROMPT,
    )
