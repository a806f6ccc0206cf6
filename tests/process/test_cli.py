"""The program as users start it: real processes, the embedded model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcompute.client import Client
from shardcompute.core.errors import UsageError

COMMAND = [sys.executable, "-m", "shardcompute"]
QUESTION = "What is the capital of France?"
pytestmark = pytest.mark.timeout(120)
ENGINE = ("--threads", "1", "--kv-memory", "256M")


def _start(*arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], preexec_fn=_hear_interrupts, **(streams | options)
    )


def _hear_interrupts() -> None:
    """A test run in the background ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, check=False)


def _ask(*arguments: str | Path, stdin: bytes = b"") -> dict[str, Any]:
    done = _run("run", *arguments, *ENGINE, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def test_answer_is_the_same_from_an_argument_from_stdin_and_from_stages(smollm2_gguf: Path) -> None:
    reply = _ask(smollm2_gguf, QUESTION, "--max-tokens", "12")
    assert len(reply["token_ids"]) > 1
    assert reply["finish"] in ("stop", "length")
    assert all(value >= 0 for value in reply["timings"].values())
    piped = _ask(smollm2_gguf, "--max-tokens", "12", "--stages", "3", stdin=QUESTION.encode() + b"\n")
    assert piped["prompt_tokens"] == reply["prompt_tokens"]
    assert (piped["text"], piped["token_ids"]) == (reply["text"], reply["token_ids"])


def test_seed_makes_a_drawn_answer_repeatable(smollm2_gguf: Path) -> None:
    drawn = (smollm2_gguf, "Tell me a story.", "--max-tokens", "8", "--temperature", "1.5")
    first, again, other = (_ask(*drawn, "--seed", seed)["token_ids"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_prompt_beyond_the_context_is_refused_with_the_numbers(smollm2_gguf: Path) -> None:
    done = _run("run", smollm2_gguf, "--context", "64", *ENGINE, stdin=b"word " * 200)
    assert done.returncode == 2
    assert re.search(rb"the prompt has \d+ tokens and the context holds 64", done.stderr)
    assert done.stdout == b""


def test_interrupt_stops_the_answer(smollm2_gguf: Path) -> None:
    with _start(
        "run", smollm2_gguf, "--raw", "1 2 3 4 5 6 7 8", "--max-tokens", "100000", *ENGINE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"interrupted\n"


def test_reader_who_leaves_ends_it_quietly(smollm2_gguf: Path) -> None:
    with _start(
        "run", smollm2_gguf, "--raw", "1 2 3 4 5 6 7 8", "--max-tokens", "100000", *ENGINE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_show_describes_the_embedded_model(smollm2_gguf: Path) -> None:
    done = _run("show", smollm2_gguf, "--json")
    shown = json.loads(done.stdout)
    assert shown["problem"] is None
    assert (shown["shape"]["layers"], shown["shape"]["heads"], shown["shape"]["kv_heads"]) == (30, 9, 3)
    assert shown["shape"]["parameters"] == 134_515_008
    assert shown["has_chat_template"] is True


@contextlib.contextmanager
def _up(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], str, list[str]]]:
    """A server that says it is ready, its address, and the lines it said until then."""
    with _start("up", "--local", *arguments, "--port", "0", *ENGINE, stdout=subprocess.DEVNULL) as process:
        lines: list[str] = []
        address = ""
        assert process.stderr is not None
        try:
            for raw in process.stderr:
                lines.append(raw.decode())
                if found := re.search(r"is ready at (http://\S+)", lines[-1]):
                    address = found[1]
                if "Ctrl-C" in lines[-1]:
                    break
            assert address, lines
            yield process, address, lines
        finally:
            if process.poll() is None:
                process.kill()


def test_up_serves_until_interrupted(smollm2_gguf: Path) -> None:
    with _up(smollm2_gguf) as (process, address, lines):
        with Client(address) as client:
            assert client.models() == [smollm2_gguf.stem]
            assert client.chat(QUESTION, max_tokens=4).completion_tokens > 0
        port = address.rpartition(":")[2]
        second = _run("up", "--local", smollm2_gguf, "--port", port)
        assert second.returncode == 2
        assert f"Port {port} is already in use by ".encode() in second.stderr
        assert f"(pid {process.pid})".encode() in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == b"stopped\n"
    assert lines[0].startswith("opening ")


def test_up_for_other_machines_asks_for_the_key_that_it_printed(smollm2_gguf: Path) -> None:
    with _up(smollm2_gguf, "--host", "0.0.0.0") as (process, address, lines):
        local = f"http://127.0.0.1:{address.rpartition(':')[2]}"
        [key] = [line.split()[-1] for line in lines if line.startswith("API key for clients")]
        with Client(local) as stranger, pytest.raises(UsageError, match="API key"):
            stranger.models()
        with Client(local, api_key=key) as client:
            assert client.models() == [smollm2_gguf.stem]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


class Terminal:
    """The program on a terminal of its own, as its user sees and types it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = b""

    def read_until(self, text: str) -> str:
        """What is shown next, up to and with `text`."""
        wanted = text.encode()
        while wanted not in self._unread:
            self._unread += os.read(self._descriptor, 4096)
        shown, found, self._unread = self._unread.partition(wanted)
        return (shown + found).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts the program on a terminal."""
    pty = pytest.importorskip("pty")
    with contextlib.ExitStack() as stack:

        def start(*arguments: str | Path) -> Terminal:
            ours, theirs = pty.openpty()
            stack.callback(os.close, ours)
            environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
            process = _start(
                *arguments,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=environment,
                start_new_session=True,
            )
            os.close(theirs)
            stack.callback(_end, process)
            return Terminal(process, ours)

        yield start


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def test_conversation_on_a_terminal(smollm2_gguf: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("run", smollm2_gguf, "--max-tokens", "8", "-v", *ENGINE)
    chat.read_until(">>> ")
    chat.type("/help\n")
    assert "forget the conversation" in chat.read_until(">>> ")
    lengths = []
    for question in (QUESTION, "And of Spain?"):
        chat.type(f"{question}\n")
        found = re.search(r"prompt (\d+) tokens", chat.read_until(">>> "))
        assert found
        lengths.append(int(found[1]))
    assert lengths[1] > lengths[0]
    chat.type("\x04")
    assert chat.process.wait() == 0


def test_interrupts_in_a_conversation(smollm2_gguf: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("run", smollm2_gguf, "--raw", "--max-tokens", "100000", *ENGINE)
    chat.read_until(">>> ")
    chat.type("1 2 3 4 5 6 7 8\n")
    chat.read_until("\n")
    chat.read_until(" ")
    chat.process.send_signal(signal.SIGINT)
    chat.read_until("stopped; Ctrl-C again leaves")
    chat.read_until(">>> ")
    assert _interrupt(chat.process) == 0


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Sent again if need be: readline overlooks a signal that comes just before it begins to wait for a key."""
    while True:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=10)
