"""`python -m shardcompute.models.templates.sandbox_main`: renders one template, in a process that may be ended.

It reads orders from its standard input, a length and JSON each, and answers likewise. The first holds the template, all
others what to render. It ends with its input, and the system ends it where it takes more memory or time than allowed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import signal
import struct
import sys
from datetime import datetime
from typing import IO, Any

import jinja2

from shardcompute.core.errors import UsageError
from shardcompute.models.templates.engine import TemplateEngine, TemplateLimits

LENGTH = struct.Struct("<Q")


def read_message(stream: IO[bytes]) -> Any:
    """None at the end."""
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def write_message(stream: IO[bytes], message: Any) -> None:
    content = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def main() -> None:
    # Ctrl-C is meant for the server, which may have answers under way; this ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(orders)
    if first is None:
        return
    _limit_resources(first["memory_bytes"])
    try:
        engine = TemplateEngine(first["source"], strict=False)
    except Exception as error:  # foreign code: besides syntax errors, nesting too deep for the compiler
        write_message(answers, {"broken": str(error)})
        return
    write_message(answers, {"ready": True})
    while (order := read_message(orders)) is not None:
        _limit_time(order["cpu_s"])
        write_message(answers, _render(engine, order))


def _render(engine: TemplateEngine, order: Any) -> dict[str, Any]:
    limits = TemplateLimits(order["steps"], order["characters"])
    try:
        return {"text": engine.render(order["variables"], limits, datetime.fromisoformat(order["now"]))}
    except MemoryError:
        return {"exhausted": True}
    except UsageError as error:
        return {"message": error.message, "hint": error.hint}
    except jinja2.TemplateError as error:
        return {"refused": error.message or type(error).__name__}
    except Exception as error:  # foreign code can fail in any way
        return {"failed": f"{type(error).__name__}: {error}"}


def _limit_resources(memory_bytes: int) -> None:
    # On Windows whoever started us watches our memory and our time.
    if sys.platform != "win32":
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = [
            (resource.RLIMIT_AS, _address_space() + memory_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 64 if files < 0 else min(files, 64)),
        ]
        for which, limit in limits:
            # Not every system knows or allows each of them.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(which, (limit, limit))


def _limit_time(cpu_s: float) -> None:
    """The system counts from the beginning of the process, and ends it where it is over."""
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime + cpu_s) + 1
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _address_space() -> int:
    """What the interpreter has reserved by now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 1 << 30


if __name__ == "__main__":
    main()
