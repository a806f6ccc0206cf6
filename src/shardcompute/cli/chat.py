"""The conversation that `run` holds on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcompute.cli.answer import AnswerOptions, describe_timings, make_request, take_answer
from shardcompute.cli.console import Screen
from shardcompute.cli.exits import show_error
from shardcompute.core.errors import ShardComputeError

if TYPE_CHECKING:
    from shardcompute.node.local_service import LocalService

ReadLine = Callable[[str], str]

_PROMPT = ">>> "
_HELP = """\
/reset   forget the conversation
/exit    leave (also Ctrl-D, or Ctrl-C twice)
/help    this
Ctrl-C stops an answer. Anything else is sent to the model."""


class Chat:
    """A conversation with one model. Without a chat template (`--raw`) every line stands for itself."""

    def __init__(
        self, service: LocalService, options: AnswerOptions, screen: Screen, *, is_verbose: bool
    ) -> None:
        self._service = service
        self._options = options
        self._screen = screen
        self._is_verbose = is_verbose
        self._messages: list[dict[str, str]] = []
        self._interrupts = 0
        self._reset()

    def hold(self, read_line: ReadLine) -> None:
        """Until the user leaves."""
        self._screen.say(f"{self._service.name}; /help shows what can be done here", "dim")
        while (line := self._next_line(read_line)) is not None:
            command = line.strip()
            if command == "/exit":
                return
            if command == "/reset":
                self._reset()
                self._screen.say("the conversation starts anew", "dim")
            elif command == "/help":
                self._screen.say(_HELP)
            elif command[:1] == "/" and command[1:].isalpha():
                self._screen.say(f"there is no command {command}; /help lists them", "yellow")
            elif command:
                self._answer(line)

    def _next_line(self, read_line: ReadLine) -> str | None:
        """None when the user leaves."""
        while True:
            try:
                line = read_line(_PROMPT)
            except EOFError:
                self._screen.say("")
                return None
            except KeyboardInterrupt:
                self._interrupts += 1
                self._screen.say("")
                if self._interrupts > 1:
                    return None
                self._screen.say("Ctrl-C again, or Ctrl-D, leaves", "dim")
            else:
                self._interrupts = 0
                return line

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            request = make_request(self._service, self._options, self._messages)
            reply = take_answer(self._service, request, self._screen.write)
        except ShardComputeError as error:
            # The conversation goes on without the message that failed.
            self._messages.pop()
            show_error(self._screen, error)
            if len(self._messages) > 1:
                self._screen.say("/reset forgets the conversation so far", "dim")
            return
        self._screen.write("\n")
        self._messages.append({"role": "assistant", "content": reply.text})
        if reply.finish == "cancelled":
            self._interrupts = 1
            self._screen.say("stopped; Ctrl-C again leaves", "dim")
        elif self._is_verbose:
            self._screen.say(describe_timings(reply), "dim")

    def _reset(self) -> None:
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]


def read_terminal_line(prompt: str) -> str:
    """A line typed by the user, with editing and history where the system has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what gives `input` its line editing
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()
