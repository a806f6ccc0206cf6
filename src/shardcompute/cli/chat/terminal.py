"""Lines typed by a user: edited, remembered over sessions where the system has readline, and put together to messages.

A reader of lines raises EOFError when the user leaves (Ctrl-D, or Ctrl-C where nothing was typed) and
KeyboardInterrupt when a line that was begun is thrown away.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from shardcompute.core.errors import SourceError

ReadLine = Callable[[str], str]

HISTORY_FILE = "chat-history"
_HISTORY_LINES = 1000
_HISTORY_BYTES = 512 << 10
_QUOTES = '"""'
_NUDGES, _NUDGE_S = 5, 0.05
_CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*\\$")


def read_terminal_line(prompt: str) -> str:
    """The next line; with editing and history inside `line_editing`."""
    if sys.stdout.isatty():
        shown = prompt
    else:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        shown = ""
    try:
        return input(shown)
    except KeyboardInterrupt:
        if _typed_so_far().strip():
            raise
        raise EOFError from None


def read_message(read_line: ReadLine, prompt: str, continuation: str) -> str:
    """One message: a line, lines that each end with a backslash, or lines between triple quotes.

    Raises KeyboardInterrupt when a message of several lines is thrown away, whichever key did it.
    """
    line = read_line(prompt)
    opening = line.lstrip()
    is_block = opening.startswith(_QUOTES)
    if not is_block and not _CONTINUED.search(line):
        return line
    try:
        if is_block:
            return _read_block(opening.removeprefix(_QUOTES), read_line, continuation)
        lines = [line]
        while _CONTINUED.search(lines[-1]):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(continuation))
    except EOFError:
        raise KeyboardInterrupt from None
    return "\n".join(lines)


def _read_block(opening: str, read_line: ReadLine, continuation: str) -> str:
    lines = [opening]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(read_line(continuation))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    # Quotes may stand on lines of their own.
    if len(lines) > 1 and not lines[0].strip():
        del lines[0]
    if len(lines) > 1 and not lines[-1].strip():
        del lines[-1]
    return "\n".join(lines)


@contextlib.contextmanager
def line_editing(history: Path, words: Sequence[str]) -> Iterator[None]:
    """Arrow keys, a history that is kept in the private file `history`, and `words` that Tab completes.

    Without a terminal or without readline, lines are read as they come.
    """
    readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
    if readline is None:
        yield
        return
    readline.clear_history()
    for line in load_history(history):
        readline.add_history(line)
    known = readline.get_current_history_length()
    readline.set_completer_delims(" \t\n")
    readline.set_completer(_completer(words, readline))
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    try:
        with _interrupts_seen():
            yield
    finally:
        readline.set_completer(None)
        typed = range(known + 1, readline.get_current_history_length() + 1)
        new = [line for number in typed if (line := readline.get_history_item(number))]
        with contextlib.suppress(SourceError):
            # A conversation that went well does not fail because nobody will remember its lines.
            extend_history(history, new)


@contextlib.contextmanager
def _interrupts_seen() -> Iterator[None]:
    """Python's readline looks for signals, then sleeps until a key comes: a Ctrl-C between the two would wait for the
    next key. Each is followed by signals that mean nothing and only end that sleep."""
    if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
        with _nudges_after_interrupts():
            yield
    else:
        yield


if sys.platform != "win32":

    @contextlib.contextmanager
    def _nudges_after_interrupts() -> Iterator[None]:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        ended, main = threading.Event(), threading.main_thread()

        def nudge() -> None:
            while came := os.read(reading, 64):
                for _ in range(_NUDGES if signal.SIGINT in came else 0):
                    if ended.wait(_NUDGE_S) or main.ident is None:
                        break
                    signal.pthread_kill(main.ident, signal.SIGURG)

        earlier = signal.signal(signal.SIGURG, lambda *_: None)
        earlier_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread = threading.Thread(target=nudge, name="interrupts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            signal.set_wakeup_fd(earlier_fd)
            os.close(writing)
            thread.join()
            os.close(reading)
            signal.signal(signal.SIGURG, earlier)


def load_history(path: Path) -> list[str]:
    """Oldest first; nothing where there is none or it cannot be read."""
    from shardcompute.security.private_files import read_private

    try:
        text = read_private(path).decode("utf-8", "replace")
    except (OSError, SourceError):
        return []
    return [line for line in text.split("\n") if line]


def extend_history(path: Path, lines: Sequence[str]) -> None:
    """Add lines to what may have grown meanwhile, and forget the oldest beyond a thousand."""
    from shardcompute.security.private_files import replace_private

    # A pasted line may have line ends in it; a history has a line for each entry.
    new = [" ".join(line.splitlines()) for line in lines if line.strip()]
    if not new:
        return
    kept = [*load_history(path), *new][-_HISTORY_LINES:]
    while sum(len(line.encode("utf-8", "replace")) + 1 for line in kept) > _HISTORY_BYTES:
        del kept[: max(1, len(kept) // 10)]
    replace_private(path, "".join(f"{line}\n" for line in kept).encode("utf-8", "replace"))


def _completer(words: Sequence[str], readline: ModuleType) -> Callable[[str, int], str | None]:
    def complete(text: str, state: int) -> str | None:
        if readline.get_begidx() != 0 or not text.startswith("/"):
            return None
        matches = [f"{word} " for word in words if word.startswith(text)]
        return matches[state] if state < len(matches) else None

    return complete


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline


def _typed_so_far() -> str:
    readline = _readline()
    return "" if readline is None else str(readline.get_line_buffer())
