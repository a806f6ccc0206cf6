"""Console output: answers, listings and JSON to stdout, everything said to people to stderr.

On a terminal there are tables, colours and bars; anywhere else plain lines. NO_COLOR makes a terminal's
output plain too. Text that comes from models and files cannot steer the terminal: control characters are
taken out before they reach it.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console

Record = TypeVar("Record", bound="DataclassInstance")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    """Both outputs of this process. What draws on terminals is imported where there is one."""

    def __init__(
        self,
        out: Console | None = None,
        err: Console | None = None,
        *,
        is_plain: bool = False,
        is_forced: bool = False,
    ) -> None:
        """Without consoles those of this process: `is_plain` has no colours, `is_forced` is a terminal anyway."""
        self._out = out
        self._err = err
        self._is_plain = is_plain
        self._is_forced = is_forced

    @property
    def out(self) -> Console:
        if self._out is None:
            self._out = self._open_console(is_err=False)
        return self._out

    @property
    def err(self) -> Console:
        if self._err is None:
            self._err = self._open_console(is_err=True)
        return self._err

    @property
    def is_live(self) -> bool:
        """Whether stderr can show bars and spinners."""
        return self._draws(self._err, sys.stderr) and self.err.is_terminal and not self.err.is_dumb_terminal

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is one."""
        return self._draws(self._out, sys.stdout) and self.out.is_terminal

    def _draws(self, console: Console | None, stream: TextIO | None) -> bool:
        """Whether a console is needed to write there."""
        return console is not None or self._is_forced or _is_terminal(stream)

    def _open_console(self, *, is_err: bool) -> Console:
        from rich.console import Console

        colours: Any = None if self._is_plain else "auto"
        return Console(
            stderr=is_err, color_system=colours, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def say(self, text: str, style: str = "") -> None:
        """A line for people."""
        self._say(without_controls(text), style)

    def _say(self, text: str, style: str = "", end: str = "\n") -> None:
        if self._draws(self._err, sys.stderr):
            from rich.text import Text

            self.err.print(Text(text, style), end=end)
        elif standard_error := sys.stderr:
            standard_error.write(f"{text}{end}")
            standard_error.flush()

    def confirm(self, question: str) -> bool:
        """Ask a person who sits there; anything but yes is no."""
        return self.ask(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def ask(self, question: str) -> str:
        """What a person who sits there types; "" for nothing."""
        self._say(without_controls(question), end="")
        try:
            return input()
        except EOFError:
            return ""

    def write(self, text: str) -> None:
        """Part of an answer, at once."""
        sys.stdout.write(without_controls(text) if self.is_terminal else text)
        sys.stdout.flush()

    def write_json(self, value: Any) -> None:
        """On one line, so that lines can be collected; spread out on a terminal."""
        self.write(json.dumps(value, indent=2 if self.is_terminal else None, ensure_ascii=False) + "\n")

    def write_records(
        self,
        records: Sequence[Record],
        headings: Sequence[str],
        row: Callable[[Record], Sequence[str]],
        *,
        is_json: bool,
        nothing: str,
    ) -> None:
        """Dataclasses, as JSON or under headings, or what to say of none."""
        if is_json:
            self.write_json([asdict(record) for record in records])
        elif records:
            self.write_table(headings, [row(record) for record in records])
        else:
            self.say(nothing)

    def write_table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows under headings; without headings, names and values."""
        plain = [[without_controls(cell) for cell in row] for row in rows]
        if not self.is_terminal:
            self.write(aligned([headings, *plain] if headings else plain))
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Column, Table
        from rich.text import Text

        # Nothing is cut: what does not fit goes on in the next line, but for names, which people copy.
        names, *others = headings or [""] * len(plain[0])
        columns = (Column(names, no_wrap=True), *(Column(each, overflow="fold") for each in others))
        table = Table(*columns, box=SIMPLE_HEAD if headings else None, show_header=bool(headings))
        for row in plain:
            table.add_row(*map(Text, row))
        # Rendered first and written as one text, so that a reader who leaves early is noticed in one place.
        with self.out.capture() as captured:
            self.out.print(table, soft_wrap=False)
        sys.stdout.write(captured.get())
        sys.stdout.flush()


def open_screen() -> Screen:
    try:
        settings = load_settings()
    except UsageError:
        return Screen()  # another setting is wrong, which the command itself will say
    return Screen(is_plain=settings.no_color, is_forced=settings.forces_terminal)


def without_controls(text: str) -> str:
    """`text` without what a terminal would obey; line ends and tabs stay."""
    return _CONTROL.sub("", text)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def cut(text: str, width: int) -> str:
    """`text`, or as much of it as fits, with a mark where it was cut."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """`text` as lines of at most `width`, indented; none for no text."""
    return textwrap.wrap(text, max(width, 20), initial_indent=indent, subsequent_indent=indent)


def standard_input() -> TextIO | None:
    """None where the process was started without one."""
    return sys.stdin


def has_terminal_input(stream: TextIO | None) -> bool:
    return _is_terminal(stream)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
