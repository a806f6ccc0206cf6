"""Lines from a real terminal: edited, remembered for their owner alone, stopped and left with Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardcompute.cli.chat.terminal import HISTORY_FILE, extend_history, load_history, read_message

TESTS = Path(__file__).parents[3]
UP, CTRL_C, CTRL_D = b"\x1b[A", b"\x03", b"\x04"
_PATIENCE_S = 60.0
_TALKING = ("-m", "support.api.talking_program")
_INTERRUPTED_BEFORE_ITS_SLEEP = """
import ctypes, readline, sys
from pathlib import Path
from shardcompute.cli.chat.terminal import line_editing, read_terminal_line
hook = ctypes.c_void_p.in_dll(ctypes.CDLL(readline.__file__), "rl_pre_input_hook")
with line_editing(Path(sys.argv[1]) / "history", ()):
    hook.value = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p).value
    try:
        read_terminal_line(">>> ")
    except EOFError:
        print("left in order")
"""


class Terminal:
    """The user's side of a conversation."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: bytes) -> None:
        """Until `text` has been shown after all that was waited for before."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"{text!r} was not shown, but {self._seen!r}"
            try:
                shown = os.read(self._master, 4096)
            except OSError:  # how Linux tells that the program has left
                shown = b""
            assert shown, f"{text!r} was not shown, but {self._seen!r}"
            self._seen += shown
        self._seen = self._seen.partition(text)[2]


@contextlib.contextmanager
def _talking(folder: Path, program: Sequence[str] = _TALKING) -> Iterator[Terminal]:
    pty = pytest.importorskip("pty")
    pytest.importorskip("readline")
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(TESTS), "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [sys.executable, *program, str(folder)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        preexec_fn=_own_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
        assert process.wait(_PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _own_terminal() -> None:
    """The terminal's Ctrl-C reaches the program, as it does from a shell."""
    import fcntl
    import signal
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    with _talking(tmp_path) as user:
        user.wait_for(b">>> ")
        user.type(b"hello\r")
        user.wait_for(b"<hello>")
        user.wait_for(b">>> ")
        user.type(b"one \\\r")
        user.wait_for(b"... ")
        user.type(b"two\r")
        user.wait_for(b"<one /two>")
        user.wait_for(b">>> ")
        user.type(b"talk on\r")
        user.wait_for(b"<talk on>...")
        user.type(CTRL_C)
        user.wait_for(b"stopped; Ctrl-C again leaves")
        user.wait_for(b">>> ")
        user.type(b"half a li")
        user.wait_for(b"half a li")
        user.type(CTRL_C)
        user.wait_for(b"Ctrl-C again, or Ctrl-D, leaves")
        user.wait_for(b">>> ")
        user.type(CTRL_C)
        user.wait_for(b"left in order")
    history = tmp_path / HISTORY_FILE
    assert load_history(history) == ["hello", "one \\", "two", "talk on"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with _talking(tmp_path) as user:
        user.wait_for(b">>> ")
        user.type(UP * 4 + b" again\r")
        user.wait_for(b"<hello again>")
        user.wait_for(b">>> ")
        user.type(b"/he\t\r")
        user.wait_for(b"forget the conversation")
        user.wait_for(b">>> ")
        user.type(CTRL_D)
        user.wait_for(b"left in order")
    assert load_history(history)[4:] == ["hello again", "/help "]


def test_an_interrupt_just_before_readline_sleeps_is_seen(tmp_path: Path) -> None:
    """It trips Python's flag and wakes nobody: exactly what a signal does that comes between look and sleep."""
    readline = pytest.importorskip("readline")
    try:
        ctypes.c_void_p.in_dll(ctypes.CDLL(readline.__file__), "rl_pre_input_hook")
    except (ValueError, OSError) as error:
        pytest.skip(f"this readline has no hook before input: {error}")
    with _talking(tmp_path, ("-c", _INTERRUPTED_BEFORE_ITS_SLEEP)) as user:
        user.wait_for(b">>> ")
        user.wait_for(b"left in order")


def test_history_grows_with_that_of_others_and_forgets_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    assert load_history(path) == []
    extend_history(path, [])
    assert not path.exists()
    extend_history(path, ["one", "  ", "two\nthree"])
    extend_history(path, ["four"])
    assert load_history(path) == ["one", "two three", "four"]
    extend_history(path, [str(number) for number in range(2000)])
    assert load_history(path)[0] == "1000"
    assert load_history(path)[-1] == "1999"
    extend_history(path, ["x" * 100_000] * 20)
    assert path.stat().st_size <= 512 << 10
    assert load_history(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b""])
def test_a_damaged_history_stops_nobody(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "history"
    path.write_bytes(content)
    path.chmod(0o600)
    extend_history(path, ["hi"])
    assert load_history(path)[-1] == "hi"


def test_leaving_at_the_first_line_leaves() -> None:
    def leave(prompt: str) -> str:
        raise EOFError

    with pytest.raises(EOFError):
        read_message(leave, ">>> ", "... ")
