"""The conversation that `run` and `chat` hold on a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardcompute.cli.chat.answer import (
    AnswerOptions,
    AnswerSummary,
    describe_interruption,
    describe_timings,
    make_request,
    take_answer,
    timing_rows,
)
from shardcompute.cli.chat.images import read_image, with_images
from shardcompute.cli.chat.settings import change_setting, setting_rows
from shardcompute.cli.chat.terminal import HISTORY_FILE, ReadLine, line_editing, read_message
from shardcompute.cli.console import Screen, aligned, cut
from shardcompute.cli.failures import show_error
from shardcompute.core.errors import ShardComputeError, UsageError
from shardcompute.core.units import count_of

if TYPE_CHECKING:
    from shardcompute.node.local.service import LocalService

_PROMPT = ">>> "
_CONTINUATION = "... "
_COMMAND = re.compile(r"(?P<name>/[a-z]+)(?:\s+(?P<rest>.*))?", re.IGNORECASE)
_KEYS = """\
Anything else is sent to the model. A line that ends with \\ goes on in the next,
and so does everything between \"\"\" and \"\"\". Ctrl-C stops an answer; at an
empty prompt it leaves, as Ctrl-D does."""


@dataclass(frozen=True, slots=True)
class _Command:
    """`rest` names what may follow the command's name; empty: nothing may."""

    rest: str
    meaning: str
    do: Callable[[Conversation, str], None]


class Conversation:
    """A conversation with one model. Without a chat template (`--raw`) every message stands for itself."""

    def __init__(
        self,
        service: LocalService,
        options: AnswerOptions,
        screen: Screen,
        folder: Path,
        images: Sequence[str] = (),
        *,
        is_verbose: bool,
    ) -> None:
        """`images` belong to the first message."""
        self._service = service
        self._options = options
        self._screen = screen
        self._folder = folder
        self._is_verbose = is_verbose
        self._messages: list[dict[str, Any]] = []
        self._images = list(images)
        self._last: AnswerSummary | None = None
        self._has_left = False

    def hold(self, read_line: ReadLine) -> None:
        """Until the user leaves."""
        heat = self._options.sampling.temperature
        self._screen.say(
            f"{self._service.name}, temperature {heat:g}; /help shows what can be done here", "dim"
        )
        with line_editing(self._folder / HISTORY_FILE, tuple(_COMMANDS)):
            while not self._has_left and (message := self._next_message(read_line)) is not None:
                if not self._obey(message) and message.strip():
                    self._answer(message)

    def _next_message(self, read_line: ReadLine) -> str | None:
        """None when the user leaves."""
        while True:
            try:
                return read_message(read_line, _PROMPT, _CONTINUATION)
            except EOFError:
                self._screen.say("")
                return None
            except KeyboardInterrupt:
                self._screen.say("")
                self._screen.say("Ctrl-C again, or Ctrl-D, leaves", "dim")

    def _obey(self, message: str) -> bool:
        """Whether the message was a command."""
        match = _COMMAND.fullmatch(message.strip())
        if match is None:
            return False
        name, rest = match["name"].lower(), (match["rest"] or "").strip()
        command = _COMMANDS.get(name)
        if command is None:
            self._screen.say(f"there is no command {name}; /help lists them", "yellow")
        elif rest and not command.rest:
            self._screen.say(f"{name} takes nothing behind it", "yellow")
        else:
            try:
                command.do(self, rest)
            except ShardComputeError as error:
                show_error(self._screen, error)
        return True

    def _answer(self, message: str) -> None:
        self._messages.append({"role": "user", "content": with_images(message, self._images)})
        messages = [*self._system(), *self._messages]
        try:
            request = make_request(self._service, self._options, messages)
            reply = take_answer(self._service, request, self._screen.write, messages)
        except ShardComputeError as error:
            # The conversation goes on without the message that failed.
            self._messages.pop()
            show_error(self._screen, error)
            if self._images:
                self._images.clear()
                self._screen.say("the images are left out from now on; /image shows others", "dim")
            if self._messages:
                self._screen.say("/clear forgets the conversation so far", "dim")
            return
        self._images.clear()
        self._screen.write("\n")
        self._messages.append({"role": "assistant", "content": reply.text})
        self._last = reply
        for told in reply.interruptions:
            self._screen.say(describe_interruption(told), "dim")
        if reply.finish == "cancelled":
            self._screen.say("stopped; Ctrl-C again leaves", "dim")
        elif self._is_verbose:
            self._screen.say(describe_timings(reply), "dim")

    def _system(self) -> list[dict[str, str]]:
        system = self._options.system
        return [] if system is None else [{"role": "system", "content": system}]

    # What the commands do

    def show_image(self, rest: str) -> None:
        if not rest:
            raise UsageError("/image needs a file", hint="write for example: /image photo.jpg")
        if self._options.is_raw:
            raise UsageError("images need the chat template, which --raw leaves out")
        self._images.append(read_image(Path(rest)))
        self._screen.say(f"{count_of(len(self._images), 'image')} for your next message", "dim")

    def set_parameter(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if not name:
            self._say_rows([(f"/set {row[0]}", *row[1:]) for row in setting_rows(self._options)])
            return
        if not text.strip():
            raise UsageError(f"/set {name} needs a value", hint="/set alone shows all values")
        self._options = change_setting(self._options, name, text)
        self._screen.say(f"{name} is now {text.strip()}", "dim")

    def set_system(self, rest: str) -> None:
        if not rest:
            self._screen.say(
                self._options.system or "there is no system message; /system TEXT sets one", "dim"
            )
            return
        self._options = replace(self._options, system=None if rest.lower() == "off" else rest)

    def show_stats(self, rest: str) -> None:
        if self._last is None:
            self._screen.say("nothing has been answered yet", "dim")
        elif self._last.timings is None:
            self._screen.say("the last answer was stopped, so that its timings are unknown", "dim")
        else:
            self._say_rows(timing_rows(self._last))

    def save(self, rest: str) -> None:
        from shardcompute.cli.chat.transcripts import FOLDER, save_transcript, transcript_path

        if not self._messages:
            raise UsageError("there is nothing to save yet", hint="say something first")
        path = transcript_path(self._folder / FOLDER, rest)
        save_transcript(path, self._service.name, [*self._system(), *self._messages])
        self._screen.say(f"saved to {path}", "dim")

    def load(self, rest: str) -> None:
        from shardcompute.cli.chat.transcripts import (
            FOLDER,
            list_transcripts,
            load_transcript,
            transcript_path,
        )

        folder = self._folder / FOLDER
        if not rest:
            names = list_transcripts(folder)
            self._screen.say(f"saved: {', '.join(names)}" if names else "nothing has been saved yet", "dim")
            return
        messages = load_transcript(transcript_path(folder, rest)).messages
        told = next((message.content for message in messages if message.role == "system"), None)
        system = told if isinstance(told, str) else None
        self._options = replace(self._options, system=system)
        self._messages = [msgspec.to_builtins(message) for message in messages if message.role != "system"]
        self._screen.say(f"the conversation goes on after {len(self._messages)} messages", "dim")

    def clear(self, rest: str) -> None:
        self._messages = []
        self._images.clear()
        self._screen.say("the conversation starts anew", "dim")

    def toggle_verbose(self, rest: str) -> None:
        self._is_verbose = not self._is_verbose
        self._screen.say(f"timings are {'shown' if self._is_verbose else 'not shown'} after answers", "dim")

    def show_help(self, rest: str) -> None:
        self._say_rows([(f"{name} {each.rest}".strip(), each.meaning) for name, each in _COMMANDS.items()])
        self._screen.say(_KEYS)

    def leave(self, rest: str) -> None:
        self._has_left = True

    def _say_rows(self, rows: Sequence[tuple[str, ...]]) -> None:
        width = self._screen.err.width
        self._screen.say("\n".join(cut(line, width) for line in aligned(rows).splitlines()))


_COMMANDS: Mapping[str, _Command] = {
    "/set": _Command(
        "[NAME VALUE]", "change how answers are drawn; alone, show it", Conversation.set_parameter
    ),
    "/image": _Command("FILE", "show an image with the next message", Conversation.show_image),
    "/system": _Command("[TEXT|off]", "set, show or take away the system message", Conversation.set_system),
    "/stats": _Command("", "how the last answer came to be", Conversation.show_stats),
    "/verbose": _Command("", "timings after every answer, or no longer", Conversation.toggle_verbose),
    "/save": _Command("NAME", "keep the conversation", Conversation.save),
    "/load": _Command("[NAME]", "go on with a saved conversation; alone, list them", Conversation.load),
    "/clear": _Command("", "forget the conversation", Conversation.clear),
    "/reset": _Command("", "the same", Conversation.clear),
    "/exit": _Command("", "leave", Conversation.leave),
    "/help": _Command("", "this", Conversation.show_help),
}
