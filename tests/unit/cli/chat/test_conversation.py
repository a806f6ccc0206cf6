"""A conversation remembers, resets, and can be stopped and left."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from shardcompute.cli.chat.answer import AnswerOptions
from shardcompute.cli.chat.conversation import Conversation
from shardcompute.cli.console import open_screen
from shardcompute.core.errors import PromptTooLongError
from shardcompute.core.generation import Delta, Interruption, Sampling, Speculation, Timings, Traversal

from ..conftest import FakeService


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


class Hold(Protocol):
    def __call__(
        self, service: FakeService, *lines: str | type[BaseException], options: AnswerOptions | None = None
    ) -> None: ...


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """Has these lines typed in a conversation that keeps its files in `tmp_path`."""

    def hold(
        service: FakeService, *lines: str | type[BaseException], options: AnswerOptions | None = None
    ) -> None:
        chat = Conversation(service, options or _options(), open_screen(), tmp_path, is_verbose=False)  # type: ignore[arg-type]
        chat.hold(_typing(*lines))

    return hold


def test_history_is_sent_along(hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    hold(service, "hi", "", "more", "/exit", options=_options("Be brief."))
    assert service.prompts == [
        "system:Be brief.|user:hi|",
        "system:Be brief.|user:hi|assistant:Paris|user:more|",
    ]
    assert capsys.readouterr().out == "Paris\nParis\n"


def test_reset_forgets_all_but_the_system_message(hold: Hold) -> None:
    service = FakeService()
    hold(service, "hi", "/reset", "again", EOFError, options=_options("Be brief."))
    assert service.prompts[1] == "system:Be brief.|user:again|"


def test_raw_lines_stand_for_themselves(hold: Hold) -> None:
    service = FakeService()
    hold(service, "Once", "upon", "/exit", options=_options(is_raw=True))
    assert service.prompts == ["Once", "upon"]


def test_commands_are_not_sent(hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    hold(service, "/help", "/nonsense", "/etc/hosts is what?", "/exit")
    assert service.prompts == ["user:/etc/hosts is what?|"]
    said = capsys.readouterr().err
    assert "/clear              forget the conversation" in said
    assert "there is no command /nonsense" in said


def test_interrupt_stops_the_answer_and_keeps_what_came(hold: Hold) -> None:
    service = FakeService(["Pa", KeyboardInterrupt()])
    hold(service, "hi", "go on", "/exit")
    assert service.prompts[1] == "user:hi|assistant:Pa|user:go on|"
    assert service.cancelled == 2


def test_a_line_thrown_away_is_not_sent_and_does_not_leave(hold: Hold) -> None:
    service = FakeService()
    hold(service, KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, EOFError)
    assert service.prompts == ["user:hi|"]


def test_message_that_fails_is_forgotten(hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    service.script = [PromptTooLongError("the prompt has 99 tokens", hint="shorten it")]
    chat_lines = ("much too long", "/exit")
    hold(service, *chat_lines)
    said = capsys.readouterr().err
    assert "error: the prompt has 99 tokens\nhint: shorten it\n" in said
    service.script = ["ok"]
    hold(service, "hi", "/exit")
    assert service.prompts[-1] == "user:hi|"


def test_failed_message_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    service = FakeService()

    def read_line(prompt: str, lines: list[str] = ["hi", "too long", "fine", "/exit"]) -> str:  # noqa: B006
        line = lines.pop(0)
        service.script = [PromptTooLongError("too long")] if line == "too long" else ["Paris"]
        return line

    Conversation(service, _options(), open_screen(), tmp_path, is_verbose=False).hold(read_line)  # type: ignore[arg-type]
    assert service.prompts[-1] == "user:hi|assistant:Paris|user:fine|"


def test_messages_of_several_lines(hold: Hold) -> None:
    service = FakeService()
    hold(service, "one \\", "two\\", "three", '"""', "a", "", "b", '"""', '"""x', 'y"""', '"""z"""', "/exit")
    sent = [prompt.removesuffix("|").rpartition("user:")[2] for prompt in service.prompts]
    assert sent == ["one \ntwo\nthree", "a\n\nb", "x\ny", "z"]


def test_backslashes_that_stand_for_themselves_end_a_line(hold: Hold) -> None:
    service = FakeService()
    hold(service, "C:\\\\", "/exit")
    assert service.prompts == ["user:C:\\\\|"]


@pytest.mark.parametrize("key", [KeyboardInterrupt, EOFError])
def test_a_message_of_several_lines_is_thrown_away_whole(hold: Hold, key: type[BaseException]) -> None:
    service = FakeService()
    hold(service, '"""one', key, "two \\", key, "hi", "/exit")
    assert service.prompts == ["user:hi|"]


def test_parameters_are_set_and_shown(hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    hold(
        service,
        "/set temperature 0.7",
        "/set top-k=5",
        "/set max_tokens 9",
        "/set seed 3",
        "/set stop END",
        "/set speculate ngram",
        "hi",
        "/set seed off",
        "/set stop off",
        "/set speculate default",
        "/set temperature 0",
        "again",
        "/set",
        "/exit",
    )
    first, second = service.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (0.7, 5, 3)
    assert (first.max_tokens, first.stop, first.speculation) == (9, ("END",), Speculation("ngram"))
    assert (second.sampling.temperature, second.stop, second.speculation) == (0.0, (), None)
    assert "/set top_k           5 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set heat 1", "there is no parameter 'heat'"),
        ("/set temperature", "needs a value"),
        ("/set temperature warm", "not a number"),
        ("/set temperature 2.5", "use 0 to 2"),
        ("/set temperature nan", "use 0 to 2"),
        ("/set top_k 1.5", "not a whole number"),
        ("/set max_tokens 0", "use 1 or more"),
        ("/set speculate magic", "use default, auto"),
        ("/clear all", "takes nothing behind it"),
        ("/save", "a conversation needs a name"),
        ("/load nothing", "there is no conversation"),
    ],
)
def test_commands_that_are_wrong_change_nothing(
    hold: Hold, line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service = FakeService()
    hold(service, "one", line, "two", "/exit")
    assert complaint in capsys.readouterr().err
    assert service.prompts[-1] == "user:one|assistant:Paris|user:two|"
    assert service.requests[1].sampling == service.requests[0].sampling


def test_system_message_is_set_shown_and_taken_away(hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    hold(service, "/system", "/system Be kind.", "/system", "hi", "/system off", "more", "/exit")
    assert service.prompts == ["system:Be kind.|user:hi|", "user:hi|assistant:Paris|user:more|"]
    said = capsys.readouterr().err
    assert "there is no system message" in said
    assert "Be kind." in said


def test_stats_tell_how_the_last_answer_came_to_be(hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    service.timings = Timings(
        0.1, 0.5, 2.0, 8, 5, 6, 2, 3, 2, Traversal(wire_s=0.010, compute_s=0.005, codec_s=0.001)
    )
    hold(service, "/stats", "hi", "/stats", "/exit")
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().err.splitlines() if "  " in line)
    told = {name: value.strip() for name, value in rows.items()}
    assert told["prompt"] == "8 tokens, 6 of them still known"
    assert told["traversals"] == "2, 2.00 tokens each"
    assert told["drafts"] == "3 tokens, 2 accepted"
    assert told["a traversal"] == "16.0 ms: compute 5.0, wire 10.0, queues 0.0, codecs 1.0"


@pytest.mark.parametrize(
    ("lost", "by", "after", "words"),
    [
        (
            ("b",),
            ("c",),
            3,
            "b was lost after 3 tokens; c took over. The answer paused for 5.45 s; no token was lost.",
        ),
        (("b",), ("b",), 1, "b was lost after 1 token; it is back."),
        (("b", "c"), ("d", "e", "f"), 0, "b and c were lost before the first token; d, e and f took over."),
        ((), ("c",), 3, "layers moved to c after 3 tokens."),
        ((), (), 3, "a link was replaced after 3 tokens."),
    ],
)
def test_a_rescue_is_told(
    hold: Hold,
    capsys: pytest.CaptureFixture[str],
    lost: tuple[str, ...],
    by: tuple[str, ...],
    after: int,
    words: str,
) -> None:
    told = Interruption(lost=lost, taken_over_by=by, pause_s=5.45, after_tokens=after)
    hold(FakeService(script=["Pa", Delta(interruption=told), "ris"]), "hi", "/exit")
    printed = capsys.readouterr()
    assert "Paris" in printed.out
    assert words in " ".join(printed.err.split())


def test_conversations_are_saved_for_their_owner_and_go_on(hold: Hold, tmp_path: Path) -> None:
    service = FakeService()
    hold(service, "/system Be kind.", "hi", "/save first", "more", "/save first", "/exit")
    path = tmp_path / "chats" / "first.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [message["role"] for message in json.loads(path.read_text())["messages"]] == [
        "system",
        *("user", "assistant") * 2,
    ]
    other = FakeService()
    hold(other, "forgotten", "/load first", "again", "/exit")
    assert other.prompts[-1] == (
        "system:Be kind.|user:hi|assistant:Paris|user:more|assistant:Paris|user:again|"
    )


def test_only_conversations_are_written_over_or_read(
    hold: Hold, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text('{"messages": []}')
    hold(FakeService(), "hi", f"/save {notes}", f"/load {notes}", "/save", "/load", "/exit")
    assert notes.read_text() == '{"messages": []}'
    said = capsys.readouterr().err
    assert "holds something else than a conversation" in said
    assert "holds no conversation" in said
    assert "nothing has been saved yet" in said
