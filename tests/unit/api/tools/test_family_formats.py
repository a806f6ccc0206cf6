"""Calls as DeepSeek, GLM, Kimi, Gemma and gpt-oss write them: read in any pieces, enforced, and told from templates."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.api.tools import (
    AnswerText,
    CallArguments,
    CallStarted,
    Event,
    ReasoningText,
    Tool,
    detect_format,
    encode_with_tools,
    plan_tools,
)
from shardcompute.api.tools.call_format import CallFormat
from shardcompute.api.tools.events import merged
from shardcompute.api.tools.gemma import FUNCTION_GEMMA, GEMMA_4
from shardcompute.api.tools.glm import GlmFormat
from shardcompute.api.tools.harmony import HarmonyFormat
from shardcompute.api.tools.sectioned import DEEPSEEK_V3, DEEPSEEK_V31, KIMI
from shardcompute.decoding import compiler_of
from shardcompute.models.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [Tool("weather", "", SCHEMA), Tool("time")]
GLM, GLM_SHORT, HARMONY = GlmFormat(), GlmFormat(has_lines=False), HarmonyFormat()
ARGUMENTS = '{"city": "<｜tool▁call▁end｜> } <|end|> <|tool_call_end|>", "days": 2}'
CALL: list[Event] = [CallStarted("weather"), CallArguments(ARGUMENTS)]
OTHER: list[Event] = [CallStarted("time"), CallArguments("{}")]
T, A = ReasoningText, AnswerText


def deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls[0]}{''.join(calls[1:])}<｜tool▁calls▁end｜>"


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
K2 = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm. a < b<|end|><|start|>assistant"
WRITTEN = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CITY = '<arg_key>city</arg_key>\n<arg_value>Oslo, </b>\n"x"</arg_value>\n'
DAYS = "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
GLM_CALL = f"<tool_call>weather\n{CITY}{DAYS}</tool_call>"
GLM_EVENTS: list[Event] = [
    CallStarted("weather"),
    CallArguments('{"city": "Oslo, </b>\\n\\"x\\"", "days": 2}'),
]
CASES: list[tuple[CallFormat, str, list[Event]]] = [
    (DEEPSEEK_V3, deepseek(V3.format("weather", ARGUMENTS)), CALL),
    (
        DEEPSEEK_V3,
        "Let me see.\n\n" + deepseek(V3.format("weather", ARGUMENTS), "\n" + V3.format("time", "{}")),
        [A("Let me see."), *CALL, *OTHER],
    ),
    (DEEPSEEK_V31, deepseek(V31.format("weather", ARGUMENTS), V31.format("time", "{}")), [*CALL, *OTHER]),
    (DEEPSEEK_V31, V31.format("time", "{}"), OTHER),
    (DEEPSEEK_V31, "a <｜tool", [A("a <｜tool")]),
    (DEEPSEEK_V31, deepseek(V31.format("function", "{}")), [CallStarted("function"), CallArguments("{}")]),
    (DEEPSEEK_V31, "<｜tool▁call▁begin｜>no call", [A("<｜tool▁call▁begin｜>no call")]),
    (KIMI, f"{SECTION}{K2.format('weather', 0, ARGUMENTS)}{END_SECTION}", CALL),
    (
        KIMI,
        f"So. {SECTION}\n{K2.format('weather', 0, ARGUMENTS)}\n{K2.format('time', 1, '{}')}\n{END_SECTION}",
        [A("So."), *CALL, *OTHER],
    ),
    (KIMI, f"{SECTION}<|tool_call_begin|>time:12<|tool_call_argument_begin|>{{}}", OTHER),
    (GLM, GLM_CALL, GLM_EVENTS),
    (GLM, f"Let me see.\n{GLM_CALL}\n<tool_call>time\n</tool_call>", [A("Let me see."), *GLM_EVENTS, *OTHER]),
    (GLM_SHORT, GLM_CALL.replace(">\n<", "><").replace("weather\n", "weather"), GLM_EVENTS),
    (GLM, "<tool_call>no such call</tool_call>", [A("<tool_call>no such call</tool_call>")]),
    (GLM, "a <tool_ca", [A("a <tool_ca")]),
    (HARMONY, f"{ANALYSIS}<|channel|>final<|message|>Yes. <|", [T("Hm. a < b"), A("Yes. <|")]),
    (HARMONY, f"{ANALYSIS}{WRITTEN}{ARGUMENTS}<|call|>", [T("Hm. a < b"), *CALL]),
    (
        HARMONY,
        f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{WRITTEN}{ARGUMENTS}",
        [A("Let me see."), *CALL],
    ),
    (HARMONY, " to=functions.time<|channel|>commentary<|constrain|>json<|message|>{}", OTHER),
    (HARMONY, "Yes, without channels.", [A("Yes, without channels.")]),
    (HARMONY, "<|channel|>analysis<|message|>Hm.", [T("Hm.")]),
    (HARMONY, "", []),
    (
        FUNCTION_GEMMA,
        "So.\n<start_function_call>call:weather{city:<escape>a, <end_function_call>}<escape>,days:2}"
        "<end_function_call>",
        [A("So."), CallStarted("weather"), CallArguments('{"city": "a, <end_function_call>}", "days": 2}')],
    ),
    (
        GEMMA_4,
        '<|tool_call>call:weather{at:{x:[1,true,<|"|>b<|"|>]},y:null}<tool_call|><|tool_call>call:time{}<tool_call|>',
        [CallStarted("weather"), CallArguments('{"at": {"x": [1, true, "b"]}, "y": null}'), *OTHER],
    ),
    (GEMMA_4, "<|tool_call>no call<tool_call|> a", [A("<|tool_call>no call<tool_call|> a")]),
    (GEMMA_4, "<|tool_call>call:a{" + "[" * 50, [A("<|tool_call>call:a{" + "[" * 50)]),
]


def read(call_format: CallFormat, pieces: list[str], *, is_cut: bool = False) -> list[Event]:
    reader = call_format.reader(TOOLS)
    events = [event for piece in pieces for event in reader.push(piece)]
    return merged([*events, *reader.finish(is_cut=is_cut)])


@pytest.mark.parametrize(("call_format", "text", "events"), CASES)
def test_whole_and_split_at_every_letter(call_format: CallFormat, text: str, events: list[Event]) -> None:
    assert read(call_format, [text]) == events
    assert read(call_format, list(text)) == events
    for at in range(len(text)):
        assert read(call_format, [text[:at], text[at:]]) == events


@pytest.mark.parametrize(("call_format", "text", "events"), CASES)
def test_cut_short_anywhere(call_format: CallFormat, text: str, events: list[Event]) -> None:
    """What was read by then is a beginning of all that there is, and no mark is shown."""
    texts, calls = (
        "".join(event.text for event in events if isinstance(event, A)),
        [event for event in events if isinstance(event, CallStarted)],
    )
    for at in range(len(text)):
        begun = read(call_format, [text[:at]], is_cut=True)
        assert begun == read(call_format, list(text[:at]), is_cut=True)
        said = "".join(event.text for event in begun if isinstance(event, A))
        assert texts.startswith(said.rstrip("< \n"))
        started = [event for event in begun if isinstance(event, CallStarted)]
        assert started == calls[: len(started)]


PARTS = [
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *(SECTION, "<|tool_call_begin|>", "functions.a:0", "<|tool_call_argument_begin|>", END_SECTION),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "```json\n"),
    *("<|channel|>", "analysis", "final", " to=functions.a ", "<|message|>", "<|end|>", "<|start|>assistant"),
    *("<|tool_call>", "<tool_call|>", "call:a{", '<|"|>', "b:"),
    *("{", "}", '"', "a", " ", "\n", "<", "{}", " " * 200),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([DEEPSEEK_V3, DEEPSEEK_V31, KIMI, GLM, HARMONY, GEMMA_4]),
    st.lists(st.sampled_from(PARTS), max_size=14),
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
)
def test_any_splitting_reads_the_same(
    call_format: CallFormat, parts: list[str], cuts: list[int], is_cut: bool
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert read(call_format, pieces, is_cut=is_cut) == read(call_format, list(text), is_cut=is_cut)


def right_calls() -> list[tuple[str, str, str]]:
    whole, cut = '{"city": "a", "days": 2}', '{"city": "a"}'
    kimi = f"{SECTION}{{}}{END_SECTION}"
    v3 = V3.format("weather", whole)
    return [
        ("<｜tool▁calls▁begin｜>```json", deepseek(v3, "\n" + v3), deepseek(V3.format("weather", cut))),
        (
            "<｜tool▁calls▁begin｜>",
            deepseek(V31.format("weather", whole)),
            deepseek(V31.format("weather", cut)),
        ),
        (SECTION, kimi.format(K2.format("weather", 0, whole)), kimi.format(K2.format("weather", 0, cut))),
        ("<tool_call><arg_key>", GLM_CALL, GLM_CALL.replace(DAYS, "")),
        ("<tool_call><arg_key>", f"{GLM_CALL}\n{GLM_CALL}", GLM_CALL.replace(">2<", ">two<")),
        ("<|channel|><|message|>", WRITTEN + whole, WRITTEN + cut),
        (
            "<start_function_call><end_function_call>",
            "<start_function_call>call:weather{city:<escape>a<escape>,days:2}<end_function_call>",
            "<start_function_call>call:weather{city:<escape>a<escape>,days:two}<end_function_call>",
        ),
    ]


@pytest.mark.parametrize(("template", "right", "wrong"), right_calls())
def test_a_required_call_is_held_to_the_familys_format(
    fakes: Any, template: str, right: str, wrong: str
) -> None:
    codec = fakes.ByteCodec(template=f"{{{{ tools }}}}{template}")
    plan = plan_tools(codec, TOOLS[:1], choice="required")
    grammar = plan.enforce(codec).grammar
    assert grammar is not None
    for text, is_right in ((right, True), (wrong, False)):
        state = compiler_of(codec.vocabulary()).start(grammar)
        state.extend(list(text.encode()))
        assert state.is_complete == is_right
    for event in read(plan.format, [right]):
        if isinstance(event, CallArguments):
            assert json.loads(event.text).keys() == {"city", "days"}


@pytest.mark.parametrize("call_format", [DEEPSEEK_V3, DEEPSEEK_V31, KIMI, HARMONY, FUNCTION_GEMMA, GEMMA_4])
def test_marks_that_are_tokens_let_free_text_come_first(fakes: Any, call_format: CallFormat) -> None:
    known = fakes.VOCABULARY
    marks = {mark: len(known.tokens) + index for index, mark in enumerate(call_format.marks)}
    special = known.special_ids | frozenset(marks.values())
    tokens = Vocabulary((*known.tokens, *(mark.encode() for mark in marks)), special, known.eos_ids)
    templates = "".join(call_format.marks) + ("```json" if call_format is DEEPSEEK_V3 else "")
    codec = fakes.ByteCodec(template=f"{{{{ tools }}}}{templates}", tokens=tokens)
    plan = plan_tools(codec, TOOLS)
    grammar = plan.enforce(codec).grammar
    assert grammar is not None
    assert plan.marks.shown_ids == frozenset(marks.values())
    free = [marks["<|channel|>"], *b"final", marks["<|message|>"]] if call_format is HARMONY else []
    state = compiler_of(tokens).start(grammar)
    state.extend([*free, *b"Free text."])
    assert state.is_complete


def test_kimis_calls_have_the_names_that_its_template_takes(fakes: Any) -> None:
    seen: list[Any] = []

    class Codec(fakes.ByteCodec):  # type: ignore[misc]
        def encode_chat(self, messages: Any, **options: Any) -> list[int]:
            seen.extend(messages)
            return [1]

    call = {"id": "call_x", "type": "function", "function": {"name": "time", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "call_x"},
    ]
    encode_with_tools(Codec(template=f"{{{{ tools }}}}{SECTION}"), messages, TOOLS)
    assert seen[1]["tool_calls"][0]["id"] == seen[2]["tool_call_id"] == "functions.time:0"


def test_lines_of_glm_are_told_from_the_template() -> None:
    with_lines = detect_format("{{ tools }}<tool_call><arg_key>k</arg_key>\n<arg_value>")
    without = detect_format("{{ tools }}<tool_call><arg_key>k</arg_key><arg_value>")
    assert isinstance(with_lines, GlmFormat)
    assert isinstance(without, GlmFormat)
    assert with_lines.wording != without.wording
