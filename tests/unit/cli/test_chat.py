"""A conversation remembers, resets, and can be stopped and left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardcompute.cli.answer import AnswerOptions
from shardcompute.cli.chat import Chat
from shardcompute.cli.console import open_screen
from shardcompute.core.errors import PromptTooLongError
from shardcompute.core.generation import Sampling

from .conftest import FakeService


def _options(system: str | None = None, *, is_raw: bool = False) -> AnswerOptions:
    return AnswerOptions(16, Sampling(), None, (), system, is_raw)


def _typing(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """A user who types these lines, or presses keys, and then must have left."""
    remaining = list(lines)

    def read_line(prompt: str) -> str:
        line = remaining.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def _hold(
    service: FakeService, *lines: str | type[BaseException], options: AnswerOptions | None = None
) -> None:
    Chat(service, options or _options(), open_screen(), is_verbose=False).hold(_typing(*lines))  # type: ignore[arg-type]


def test_history_is_sent_along(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    _hold(service, "hi", "", "more", "/exit", options=_options("Be brief."))
    assert service.prompts == [
        "system:Be brief.|user:hi|",
        "system:Be brief.|user:hi|assistant:Paris|user:more|",
    ]
    assert capsys.readouterr().out == "Paris\nParis\n"


def test_reset_forgets_all_but_the_system_message() -> None:
    service = FakeService()
    _hold(service, "hi", "/reset", "again", EOFError, options=_options("Be brief."))
    assert service.prompts[1] == "system:Be brief.|user:again|"


def test_raw_lines_stand_for_themselves() -> None:
    service = FakeService()
    _hold(service, "Once", "upon", "/exit", options=_options(is_raw=True))
    assert service.prompts == ["Once", "upon"]


def test_commands_are_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    _hold(service, "/help", "/nonsense", "/etc/hosts is what?", "/exit")
    assert service.prompts == ["user:/etc/hosts is what?|"]
    said = capsys.readouterr().err
    assert "/reset   forget the conversation" in said
    assert "there is no command /nonsense" in said


def test_interrupt_stops_the_answer_and_keeps_what_came() -> None:
    service = FakeService(["Pa", KeyboardInterrupt()])
    _hold(service, "hi", "go on", "/exit")
    assert service.prompts[1] == "user:hi|assistant:Pa|user:go on|"
    assert service.cancelled == 2


def test_interrupt_twice_leaves() -> None:
    _hold(FakeService(), KeyboardInterrupt, KeyboardInterrupt)
    service = FakeService(["Pa", KeyboardInterrupt()])
    _hold(service, "hi", KeyboardInterrupt)
    assert len(service.requests) == 1


def test_interrupts_count_only_in_a_row() -> None:
    service = FakeService()
    _hold(service, KeyboardInterrupt, "hi", KeyboardInterrupt, EOFError)
    assert len(service.requests) == 1


def test_message_that_fails_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    service.script = [PromptTooLongError("the prompt has 99 tokens", hint="shorten it")]
    chat_lines = ("much too long", "/exit")
    _hold(service, *chat_lines)
    said = capsys.readouterr().err
    assert "error: the prompt has 99 tokens\nhint: shorten it\n" in said
    service.script = ["ok"]
    _hold(service, "hi", "/exit")
    assert service.prompts[-1] == "user:hi|"


def test_failed_message_leaves_the_conversation_as_it_was() -> None:
    service = FakeService()

    def read_line(prompt: str, lines: list[str] = ["hi", "too long", "fine", "/exit"]) -> str:  # noqa: B006
        line = lines.pop(0)
        service.script = [PromptTooLongError("too long")] if line == "too long" else ["Paris"]
        return line

    Chat(service, _options(), open_screen(), is_verbose=False).hold(read_line)  # type: ignore[arg-type]
    assert service.prompts[-1] == "user:hi|assistant:Paris|user:fine|"
