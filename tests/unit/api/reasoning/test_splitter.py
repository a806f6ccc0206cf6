"""Thinking is told from the answer, however the stream is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.api.reasoning import ThinkingMarks, ThinkingSplitter, detect_marks
from shardcompute.api.reasoning.marks import MARKS, THINK
from shardcompute.api.tools import AnswerText, CallArguments, CallStarted, Event, ReasoningText
from shardcompute.api.tools.events import merged
from shardcompute.api.tools.hermes import MarkedReader

T, A = ReasoningText, AnswerText
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "</think>"}}\n</tool_call>'
CALLED: list[Event] = [CallStarted("weather"), CallArguments('{"city": "</think>"}')]
CASES: list[tuple[bool, str, list[Event]]] = [
    (False, "<think>\nHm.\n</think>\n\nYes.", [T("Hm."), A("Yes.")]),
    (True, "Hm.\n</think>\n\nYes.", [T("Hm."), A("Yes.")]),
    (True, "\nHm. </thin </ k> so\n\n</think>Yes. </think>", [T("Hm. </thin </ k> so"), A("Yes. </think>")]),
    (False, "\n<think></think>\n\nYes.", [A("Yes.")]),
    (False, "Yes. <think>no</think>", [A("Yes. <think>no</think>")]),
    (False, " <thin air", [A(" <thin air")]),
    (False, "<think>Hm.", [T("Hm.")]),
    (True, "Hm. </thi", [T("Hm. </thi")]),
    (False, "<think><think>a</think>b</think>", [T("<think>a"), A("b</think>")]),
    (True, f"Hm.</think>\n\n{CALL}", [T("Hm."), *CALLED]),
    (True, "<tool_call> in thought</think>So <tool", [T("<tool_call> in thought"), A("So <tool")]),
    (False, "", []),
]


def split(
    pieces: list[str], *, is_open: bool, marks: ThinkingMarks = THINK, is_cut: bool = False
) -> list[Event]:
    reader = ThinkingSplitter(marks, is_open=is_open, calls=MarkedReader())
    events = [event for piece in pieces for event in reader.push(piece)]
    return merged([*events, *reader.finish(is_cut=is_cut)])


@pytest.mark.parametrize(("is_open", "text", "events"), CASES)
def test_whole_and_letter_by_letter(is_open: bool, text: str, events: list[Event]) -> None:
    assert split([text], is_open=is_open) == events
    assert split(list(text), is_open=is_open) == events


@pytest.mark.parametrize(("is_open", "text", "events"), CASES)
def test_cut_at_every_letter(is_open: bool, text: str, events: list[Event]) -> None:
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]], is_open=is_open) == events
        begun = split([text[:at]], is_open=is_open, is_cut=True)
        assert begun == split(list(text[:at]), is_open=is_open, is_cut=True)
        assert (
            not any("</think" in event.text for event in begun if isinstance(event, T)) or "</thin " in text
        )


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.open)
def test_every_familys_marks(marks: ThinkingMarks) -> None:
    text = f"{marks.open}Hm, {marks.close[:-1]}.\n{marks.close}\n\nYes."
    expected = [T(f"Hm, {marks.close[:-1]}."), A("Yes.")]
    assert (
        split([text], is_open=False, marks=marks) == split(list(text), is_open=False, marks=marks) == expected
    )
    assert detect_marks("{{ messages }} " + marks.close) == marks


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a", CALL, " " * 70]))


@settings(max_examples=300, deadline=None)
@given(PARTS, st.lists(st.integers(0, 60)), st.booleans(), st.booleans())
def test_any_splitting_gives_the_same_events(
    parts: list[str], cuts: list[int], is_open: bool, is_cut: bool
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert split(pieces, is_open=is_open, is_cut=is_cut) == split(list(text), is_open=is_open, is_cut=is_cut)


def test_little_is_held_back_whatever_comes() -> None:
    reader = ThinkingSplitter(THINK, is_open=True)
    for piece in ["</think", " " * 1000, "</", "\n" * 1000, "</think"] * 20:
        reader.push(piece)
        assert len(reader._held) <= 80


def test_thinking_is_counted_with_its_marks() -> None:
    reader = ThinkingSplitter(THINK, is_open=False)
    for letter in "<think>Hm.</think>\n\nYes.":
        reader.push(letter)
    reader.finish()
    assert reader.thought_chars == len("<think>Hm.</think>\n\n")


@pytest.mark.parametrize(
    "template", [None, "", "{{ messages }}", "<|channel|>analysis<|message|></think>", "<start_of_turn>model"]
)
def test_templates_without_marks(template: str | None) -> None:
    assert detect_marks(template) is None
