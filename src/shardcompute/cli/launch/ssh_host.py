"""One machine over ssh: a worker is started there, or ended, by the system's ssh client, which may ask nothing.

What runs there is a short script for any POSIX shell. It says which release it finds before it is given the token,
which comes over its standard input: it is in no list of processes and in no file.
"""

from __future__ import annotations

import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.cli.launch.hosts import LaunchHost
from shardcompute.cli.launch.invitation import READY, LaunchOutcome
from shardcompute.core.fields import shorten
from shardcompute.version import VERSION

SAID = "launch: "
_CONNECT_S = 10
_KILL_S = 5.0
_UNREACHABLE = 255
_NO_PROGRAM = 127
_BEGIN = """
umask 077
program={program}
folder={folder}
case "$folder" in /*) ;; *) folder="$HOME/$folder" ;; esac
command -v "$program" >/dev/null 2>&1 || {{ echo "{said}missing"; exit 127; }}
"""
_START = """
version=$("$program" --version 2>/dev/null | tail -n 1)
echo "{said}version ${{version##* }}"
IFS= read -r token || exit 3
mkdir -p "$folder" || {{ echo "{said}failed the folder $folder cannot be made"; exit 4; }}
log="$folder/launch.log"
: > "$log"
printf '%s\\n' "$token" | nohup "$program" worker --token - --data-dir "$folder" {options} > "$log" 2>&1 &
pid=$!
token=
left={wait_s}
while [ "$left" -gt 0 ]; do
  if grep -qE '{ready}' "$log"; then echo "{said}started $pid"; exit 0; fi
  kill -0 "$pid" 2>/dev/null || {{ echo "{said}failed $(tail -n 3 "$log" | tr '\\n' ' ')"; exit 5; }}
  sleep 1
  left=$((left - 1))
done
echo "{said}failed it did not serve within {wait_s} s; its log is $log"
exit 6
"""
_STOP = """
"$program" down --data-dir "$folder" 2>&1 | tail -n 1 | {{ read -r line; echo "{said}stopped $line"; }}
"""


@dataclass(frozen=True, slots=True)
class SshLauncher:
    """How hosts are reached, and what is started there."""

    program: str = "shardcompute"
    folder: str = ".local/share/shardcompute/launched"
    """On those machines; below the home folder unless it begins with a slash."""
    options: tuple[str, ...] = ()
    config: Path | None = None
    """Of ssh, in the place of the user's own."""
    timeout_s: float = 120.0
    client: str = "ssh"

    def start(self, host: LaunchHost, token: str) -> LaunchOutcome:
        wait_s = max(1, int(self.timeout_s) - _CONNECT_S)
        options = shlex.join([*self.options, *host.options])
        script = self._script(_START, options=options, wait_s=wait_s, ready=READY)
        with _Talk(self._command(host, script), self.timeout_s) as talk:
            for line in talk.lines():
                word, _, rest = line.partition(" ")
                if word == "version" and rest != VERSION:
                    return LaunchOutcome(
                        host.title,
                        error=f"has release {rest or 'unknown'}, and this machine {VERSION}: install the same on both",
                    )
                if word == "version":
                    talk.tell(token)
                elif word == "started":
                    return LaunchOutcome(host.title, text=f"a worker runs, pid {rest}")
                elif word == "failed":
                    return LaunchOutcome(host.title, error=f"the worker does not run: {rest}")
            return LaunchOutcome(host.title, error=self._reason(talk))

    def stop(self, host: LaunchHost) -> LaunchOutcome:
        with _Talk(self._command(host, self._script(_STOP)), self.timeout_s) as talk:
            for line in talk.lines():
                word, _, rest = line.partition(" ")
                if word == "stopped":
                    return LaunchOutcome(host.title, text=rest or "stopped")
            return LaunchOutcome(host.title, error=self._reason(talk))

    def _script(self, script: str, **values: object) -> str:
        program, folder = shlex.quote(self.program), shlex.quote(self.folder)
        return (_BEGIN + script).format(program=program, folder=folder, said=SAID, **values)

    def _command(self, host: LaunchHost, script: str) -> list[str]:
        return [
            self.client,
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={_CONNECT_S}"),
            *("-o", "ServerAliveInterval=15"),
            "-T",
            *(() if self.config is None else ("-F", str(self.config))),
            *(() if host.port is None else ("-p", str(host.port))),
            host.address.replace("[", "").replace("]", ""),
            # Whatever the login shell is, this is for a plain one.
            f"exec /bin/sh -c {shlex.quote(script)}",
        ]

    def _reason(self, talk: _Talk) -> str:
        """Why nothing was started, in words that say what to do."""
        if talk.is_late:
            return f"did not answer within {self.timeout_s:g} s"
        said = shorten(talk.complaint(), 300)
        if talk.code == _UNREACHABLE:
            return f"cannot be reached by ssh: {said or 'no reason was given'}"
        if talk.code == _NO_PROGRAM:
            return f"has no {self.program}: install it there, or say where it is with --program"
        return f"ssh ended with code {talk.code}" + (f": {said}" if said else "")


class _Talk:
    """A run of ssh, within a deadline; it is ended with the block."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._hear, self._hear_errors)
        ]
        self.is_late = False

    def __enter__(self) -> _Talk:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_KILL_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    @property
    def code(self) -> int:
        return self._process.wait()

    def complaint(self) -> str:
        self._threads[1].join(_KILL_S)
        return " ".join(self._errors[-3:])

    def lines(self) -> Iterator[str]:
        """What our script says, until it ends or the time is up."""
        while True:
            try:
                line = self._heard.get(timeout=max(0.0, self._deadline_s - time.monotonic()))
            except queue.Empty:
                self.is_late = True
                return
            if line is None:
                return
            if line.startswith(SAID):
                yield line.removeprefix(SAID)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the end of its output says why

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(line.rstrip("\n"))
        self._heard.put(None)

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.strip()]
