"""Reading calls: every format, however the text is cut into pieces; what is no call stays text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.api.tools import (
    AnswerText,
    CallArguments,
    CallStarted,
    Event,
    Tool,
    detect_format,
    encode_with_tools,
    plan_tools,
)
from shardcompute.api.tools.call_format import CallFormat
from shardcompute.api.tools.events import merged
from shardcompute.api.tools.generic import GenericFormat, explain
from shardcompute.api.tools.glm import GlmFormat
from shardcompute.api.tools.harmony import HarmonyFormat
from shardcompute.api.tools.hermes import HermesFormat
from shardcompute.api.tools.listed import GRANITE, NEMOTRON, ListedFormat
from shardcompute.api.tools.llama import LlamaFormat
from shardcompute.api.tools.mistral import MistralFormat
from shardcompute.api.tools.qwen_coder import QwenCoderFormat, in_json
from shardcompute.api.tools.sectioned import SectionedFormat
from shardcompute.core.errors import UsageError
from shardcompute.decoding import compiler_of
from shardcompute.models.vocabulary import Vocabulary

HERMES, LLAMA, MISTRAL, CODER = HermesFormat(), LlamaFormat(), MistralFormat(), QwenCoderFormat()
FORMATS: list[CallFormat] = [HERMES, LLAMA, MISTRAL, CODER, GRANITE, NEMOTRON]
TOOLS = [Tool("weather"), Tool("time")]
ARGUMENTS = '{"city": "M\\u00fcn\\"chen", "days": [1, {"a": "}"}]}'
CALL = [CallStarted("weather"), CallArguments(ARGUMENTS)]
OTHER = [CallStarted("time"), CallArguments("{}")]
CASES: list[tuple[CallFormat, str, list[Event]]] = [
    (HERMES, "Just text.", [AnswerText("Just text.")]),
    (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>', [*CALL]),
    (
        HERMES,
        f'Let me see.\n\n<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>\n<tool_call>\n'
        '{"name": "time"}\n</tool_call>\n',
        [AnswerText("Let me see."), *CALL, *OTHER],
    ),
    (
        HERMES,
        f'<tool_call>{{"name":"weather","arguments":{json.dumps(ARGUMENTS)}}}</tool_call> and so',
        [*CALL, AnswerText("and so")],
    ),
    (HERMES, "a < b <tool", [AnswerText("a < b <tool")]),
    (HERMES, "<tool_call>no JSON</tool_call>", [AnswerText("<tool_call>no JSON</tool_call>")]),
    (HERMES, '<tool_call>{"name": 5}', [AnswerText('<tool_call>{"name": 5}')]),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"ci',
        [CallStarted("weather"), CallArguments('{"ci')],
    ),
    (LLAMA, f'{{"name": "weather", "parameters": {ARGUMENTS}}}', [*CALL]),
    (
        LLAMA,
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}; '
        '{"name": "time", "parameters": {}}',
        [*CALL, *OTHER],
    ),
    (LLAMA, '{"answer": {"name": "weather"}} is it', [AnswerText('{"answer": {"name": "weather"}} is it')]),
    (LLAMA, '{"name": "Bob", "parameters": 3}', [AnswerText('{"name": "Bob", "parameters": 3}')]),
    (LLAMA, " <|python", [AnswerText(" <|python")]),
    (LLAMA, "Hello {you}", [AnswerText("Hello {you}")]),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time", "arguments": {{}}}}]',
        [*CALL, *OTHER],
    ),
    (
        MISTRAL,
        f"Well. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[CALL_ID]a1b2[ARGS]{{}}",
        [AnswerText("Well."), *CALL, *OTHER],
    ),
    (MISTRAL, "[TOOL", [AnswerText("[TOOL")]),
    # What models make of the formats that they were taught.
    (
        HERMES,
        f'I think.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n\n ',
        [AnswerText("I think.\n</think>"), *CALL],
    ),
    (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n{{"name": "time", "arguments": null}}\n'
        "</tool_call>\nThere.",
        [*CALL, *OTHER, AnswerText("There.")],
    ),
    (
        HERMES,
        f'<tool_call>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time"}}]</tool_call>',
        [*CALL, *OTHER],
    ),
    (
        HERMES,
        f'<tool_call>{{"type": "function", "function": {{"name": "weather", "arguments": {ARGUMENTS}}}}}</tool_call>',
        [*CALL],
    ),
    (HERMES, '<tool_call>[{"nam', [AnswerText('<tool_call>[{"nam')]),
    (HERMES, "<tool_call> </tool_call> a", [AnswerText("<tool_call> </tool_call> a")]),
    (
        LLAMA,
        f'Let me see: {{"name": "weather", "parameters": {ARGUMENTS}}} Shall I go on?',
        [AnswerText("Let me see:"), *CALL, AnswerText("Shall I go on?")],
    ),
    (
        LLAMA,
        f'{{"name": "weather", "parameters": {ARGUMENTS}}} ;\n{{"name": "time", "arguments": {{}}}}',
        [*CALL, *OTHER],
    ),
    (
        LLAMA,
        f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "time", "parameters": {{}}}}]\n',
        [*CALL, *OTHER],
    ),
    (
        LLAMA,
        f'{{"type": "function", "function": "weather", "parameters": {ARGUMENTS}}}',
        [*CALL],
    ),
    (LLAMA, f'{{"function": {{"name": "weather", "parameters": {ARGUMENTS}}}}}', [*CALL]),
    (
        LLAMA,
        '{"answer": [{"name": "time", "parameters": {}}]} {"name": "time", "parameters": {}}',
        [AnswerText('{"answer": [{"name": "time", "parameters": {}}]}'), *OTHER],
    ),
    (LLAMA, 'if (a) { b["c"] }; [', [AnswerText('if (a) { b["c"] }; [')]),
    (
        MISTRAL,
        f'[TOOL_CALLS]  [ {{"name":"weather" , "arguments" : {ARGUMENTS}, "id": "a1b2c3d4e" }} ] So.',
        [*CALL, AnswerText("So.")],
    ),
    (MISTRAL, f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]time{{}}", [*CALL, *OTHER]),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}, time[ARGS]{{}}", [*CALL, *OTHER]),
    (MISTRAL, f'[TOOL_CALLS]{{"name": "weather", "arguments": {ARGUMENTS}}}', [*CALL]),
    (MISTRAL, "[TOOL_CALLS] none of them", [AnswerText("[TOOL_CALLS] none of them")]),
    (
        GRANITE,
        f'Wait.\n<|tool_call|> [\n  {{"name": "weather", "arguments": {ARGUMENTS}}},\n  {{"name": "time", '
        '"arguments": {}}\n]',
        [AnswerText("Wait."), *CALL, *OTHER],
    ),
    (GRANITE, f'<|tool_call|>[{{"name":"weather","arguments":{ARGUMENTS}}}]<|/tool_call|>', [*CALL]),
    (
        NEMOTRON,
        f'<TOOLCALL>[{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}, {{"name": "time", '
        '"arguments": "{}"}]</TOOLCALL>',
        [*CALL, *OTHER],
    ),
    (CODER, "a < b <tool_call> <func", [AnswerText("a < b <tool_call> <func")]),
    (CODER, "<tool_call>no call</tool_call>", [AnswerText("<tool_call>no call</tool_call>")]),
    (
        CODER,
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=text>\n\n"
        'two\n  "lines" </b>\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n'
        "</tool_call>",
        [
            AnswerText("Sure."),
            CallStarted("weather"),
            CallArguments(json.dumps({"city": "Oslo", "text": '\ntwo\n  "lines" </b>'})),
            *OTHER,
        ],
    ),
    (
        CODER,
        "<function=weather><parameter=city>Oslo</parameter></function> Done.",
        [CallStarted("weather"), CallArguments('{"city": "Oslo"}'), AnswerText("Done.")],
    ),
    (
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n1",
        [CallStarted("weather"), CallArguments('{"city": "Oslo"')],
    ),
]


def read(call_format: CallFormat, pieces: list[str]) -> list[Event]:
    return read_with(call_format, TOOLS, pieces)


def read_with(call_format: CallFormat, tools: list[Tool], pieces: list[str]) -> list[Event]:
    reader = call_format.reader(tools)
    events = [event for piece in pieces for event in reader.push(piece)]
    return merged([*events, *reader.finish()])


@pytest.mark.parametrize(("call_format", "text", "events"), CASES)
def test_calls_are_read_whole_or_letter_by_letter(
    call_format: CallFormat, text: str, events: list[Event]
) -> None:
    assert read(call_format, [text]) == events
    assert read(call_format, list(text)) == events


@settings(deadline=None)
@given(st.data())
def test_any_text_in_any_pieces_reads_the_same_and_is_never_lost(data: st.DataObject) -> None:
    call_format = data.draw(st.sampled_from(FORMATS))
    parts = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|tool_call|>",
        "<|python_tag|>",
        "<function=time>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "[",
        "]",
        "{",
        "}",
        '"name"',
        '"time"',
        ":",
        ",",
        "x",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*parts, " ", "\n", '{"name": "time"}']), max_size=14)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = read(call_format, pieces)
    assert events == read(call_format, [text])
    if not any(mark in text for mark in ("tool_call", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "{")):
        assert "".join(e.text for e in events if isinstance(e, AnswerText)) == text


def test_arguments_are_passed_on_while_they_come() -> None:
    reader = HERMES.reader(())
    assert reader.push('<tool_call>\n{"name": "f", "arguments": {"a"') == [
        CallStarted("f"),
        CallArguments('{"a"'),
    ]
    assert reader.push(": 1") == [CallArguments(": 1")]


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (None, GenericFormat),
        ("{{ messages }}", GenericFormat),
        ("{% if tools %}<tool_call>{% endif %}", HermesFormat),
        ("{% if tools %}<tool_call><function=x>{% endif %}", GenericFormat),
        ("{% if tools %}<tool_call><function=x><parameter=y>{% endif %}", QwenCoderFormat),
        ("{% if tools %}<tool_call>x<arg_key>y</arg_key>{% endif %}", GlmFormat),
        ("{% if tools %}<|tool_calls_section_begin|>{% endif %}", SectionedFormat),
        ("{% if tools %}<｜tool▁calls▁begin｜>{% endif %}", SectionedFormat),
        ("{% if tools %}<|channel|><|message|>{% endif %}", HarmonyFormat),
        ("{% if tools %}<|tool_call|>{% endif %}", ListedFormat),
        ("{% if tools %}<TOOLCALL>[]</TOOLCALL>{% endif %}", ListedFormat),
        ("{% if tools %}<|python_tag|>{% endif %}", LlamaFormat),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MistralFormat),
        ("{% if tools %}<|channel|>{% endif %}", GenericFormat),
    ],
)
def test_formats_are_told_from_templates(template: str | None, kind: type[Any]) -> None:
    assert type(detect_format(template)) is kind


WEATHER = Tool("weather", "d", {"type": "object", "properties": {"city": {"type": "string"}}})
ODD = Tool("odd", "", {"type": "object", "properties": {"x": {"not": {"type": "string"}}}})


class Codec:
    """A fake codec whose template is of a format."""

    def __init__(self, fakes: Any, template: str) -> None:
        self._fakes = fakes
        self._template = template

    def vocabulary(self) -> Any:
        return self._fakes.VOCABULARY

    def chat_template_source(self, *, has_tools: bool = False) -> str:
        return self._template


@pytest.mark.parametrize(
    "mark",
    [
        "<tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][ARGS]",
        "<|tool_call|>",
        "<TOOLCALL>",
        "<tool_call><function=><parameter=>",
        "<tool_call><arg_key>",
        "<tool_call></arg_key><arg_value>",
        "<|tool_calls_section_begin|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>```json",
        "<|channel|><|message|>",
        "none",
    ],
)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_every_format_can_require_a_call(fakes: Any, mark: str, is_parallel: bool) -> None:
    codec: Any = Codec(fakes, f"{{{{ tools }}}}{mark}")
    plan = plan_tools(codec, [WEATHER, ODD], choice="required", is_parallel=is_parallel)
    grammar = plan.enforce(codec).grammar
    assert grammar is not None
    assert plan_tools(codec, [WEATHER], named="weather").enforce(codec).grammar is not None


FORECAST = Tool(
    "forecast",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "days": {"type": "integer"},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
)


def _call(**given: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items())
    return f"<tool_call>\n<function=forecast>\n{parameters}</function>\n</tool_call>"


AS_JSON = '{"name": "forecast", "arguments": {"city": "a", "days": 2}}'
NO_DAYS = '{"name": "forecast", "arguments": {"city": "a"}}'
CODER_TEMPLATE = "<tool_call><function=><parameter=>"


@pytest.mark.parametrize(
    ("template", "right", "wrong"),
    [
        ("<tool_call>", f"<tool_call>\n{AS_JSON}\n</tool_call>", f"<tool_call>\n{NO_DAYS}\n</tool_call>"),
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{AS_JSON}, {AS_JSON}]", f"[TOOL_CALLS][{NO_DAYS}]"),
        ("<|tool_call|>", f"<|tool_call|>[{AS_JSON}, {AS_JSON}]", f"<|tool_call|>[{NO_DAYS}]"),
        ("<TOOLCALL>", f"<TOOLCALL>[{AS_JSON}]</TOOLCALL>", f"<TOOLCALL>[{AS_JSON}]"),
        (CODER_TEMPLATE, _call(city="a\n</b>", days="2"), _call(city="a")),
        (CODER_TEMPLATE, _call(city="a", unit="kelvin", days="2"), _call(city="a", unit="K", days="2")),
        (
            CODER_TEMPLATE,
            _call(city="", days="-2", where='{"x": 1}'),
            _call(city="", days="-2", where="here"),
        ),
        (
            CODER_TEMPLATE,
            _call(city="a", days="2") + "\n" + _call(city="b", days="3"),
            _call(city="a", days="x"),
        ),
    ],
)
def test_a_required_call_is_held_to_the_format_of_the_model(
    fakes: Any, template: str, right: str, wrong: str
) -> None:
    codec: Any = Codec(fakes, f"{{{{ tools }}}}{template}")
    plan = plan_tools(codec, [FORECAST], choice="required")
    grammar = plan.enforce(codec).grammar
    assert grammar is not None
    for text, is_right in ((right, True), (wrong, False)):
        state = compiler_of(codec.vocabulary()).start(grammar)
        state.extend(list(text.encode()))
        assert state.is_complete == is_right
    events = read_with(plan.format, [FORECAST], [right])
    assert all(isinstance(event, CallStarted | CallArguments) for event in events)
    for event in events:
        if isinstance(event, CallArguments):
            assert {"city", "days"} <= json.loads(event.text).keys()


def test_words_before_a_call_of_the_coder_are_free(fakes: Any) -> None:
    codec: Any = Codec(fakes, f"{{{{ tools }}}}{CODER_TEMPLATE}")
    grammar = plan_tools(codec, [FORECAST]).enforce(codec).grammar
    assert grammar is not None
    for text, is_right in (
        ("Hm. <tool", True),
        ("Hm. " + _call(city="a", days="2"), True),
        ("<tool_call>x", False),
    ):
        state = compiler_of(codec.vocabulary()).start(grammar)
        state.extend(list(text.encode()))
        assert state.is_complete == is_right, text


def test_a_strict_text_that_the_coder_cannot_be_held_to_is_refused(fakes: Any) -> None:
    codec: Any = Codec(fakes, f"{{{{ tools }}}}{CODER_TEMPLATE}")
    short = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    assert plan_tools(codec, [Tool("f", "", short)], choice="required").enforce(codec).grammar is not None
    with pytest.raises(UsageError, match="cannot enforce"):
        plan_tools(codec, [Tool("f", "", short, is_strict=True)], choice="required").enforce(codec)


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": 1', {"type": "object"}, '{"a": 1'),
        ('["a"]', None, ["a"]),
        ("[" * 100_000, None, "[" * 100_000),
    ],
)
def test_values_of_the_coder_become_json_by_their_schema(value: str, schema: Any, expected: Any) -> None:
    assert json.loads(in_json(value, schema)) == expected


def test_limits_that_cannot_be_enforced_are_refused_only_where_they_are_strict(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    odd = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=a)b$"}}}
    lax, strict = Tool("t", "", odd), Tool("t", "", odd, is_strict=True)
    for choice in ("required", "auto"):
        held = plan_tools(codec, [WEATHER, lax], choice=choice).enforce(codec)
        assert held.unenforced == ("t",), "the other tool keeps all of its schema"
        assert held.grammar is not None
        with pytest.raises(UsageError, match=r"tool 't'.*look-around"):
            plan_tools(codec, [WEATHER, strict], choice=choice).enforce(codec)


def test_a_schema_that_means_nothing_is_refused_by_the_name_of_its_tool(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    broken = Tool("t", "", {"type": "object", "properties": {"x": {"type": "foo"}}})
    for choice in ("required", "auto"):
        with pytest.raises(UsageError, match=r"tool 't'.*foo"):
            plan_tools(codec, [WEATHER, broken], choice=choice).enforce(codec)


def test_tools_that_are_too_much_together_are_refused(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    wide = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(400)}}
    tools = [Tool(f"t{index}", "", wide) for index in range(40)]
    with pytest.raises(UsageError, match="these 40 tools together"):
        plan_tools(codec, tools).enforce(codec)


def test_words_of_a_schema_that_no_grammar_follows_are_said_to_be_unenforced(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    assert plan_tools(codec, [WEATHER, ODD]).enforce(codec).unenforced == ("odd",)
    assert plan_tools(codec, [WEATHER]).enforce(codec).unenforced == ()
    freely: Any = Codec(fakes, "{{ tools }}<|python_tag|>")
    assert plan_tools(freely, [WEATHER]).enforce(freely).unenforced == ("weather",), "calls have no mark"
    coder: Any = Codec(fakes, f"{{{{ tools }}}}{CODER_TEMPLATE}")
    short = Tool("f", "", {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}})
    assert plan_tools(coder, [WEATHER, short]).enforce(coder).unenforced == ("f",)


@pytest.mark.parametrize("parameters", [{"type": "object"}, {"type": "object", "properties": {}}, {}])
def test_a_function_without_parameters_gets_an_empty_object(fakes: Any, parameters: dict[str, Any]) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    grammar = plan_tools(codec, [Tool("f", "", parameters)], choice="required").enforce(codec).grammar
    assert grammar is not None
    for arguments, is_right in (("{}", True), ('{"type": "object"}', False), ("null", False)):
        state = compiler_of(codec.vocabulary()).start(grammar)
        state.extend(list(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'.encode()))
        assert state.is_complete == is_right, arguments


def test_arguments_have_no_undeclared_keys_and_are_objects(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    untyped = Tool("f", "", {"properties": {"city": {"type": "string"}}})
    grammar = plan_tools(codec, [untyped], choice="required").enforce(codec).grammar
    assert grammar is not None
    for arguments, is_right in (('{"city": "x"}', True), ('{"city": "x", "type": 1}', False), ("5", False)):
        state = compiler_of(codec.vocabulary()).start(grammar)
        state.extend(list(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'.encode()))
        assert state.is_complete == is_right, arguments


def test_tools_are_explained_where_templates_know_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "x"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    told = explain(messages, [WEATHER])
    assert [m["role"] for m in told] == ["system", "user", "assistant", "user"]
    assert '"name": "weather"' in told[0]["content"]
    assert read(HERMES, [told[2]["content"]]) == [CallStarted("weather"), CallArguments('{"city": "x"}')]
    assert "sunny" in told[3]["content"]
    merged_in = explain([{"role": "system", "content": "Be brief."}, *messages], [WEATHER])
    assert merged_in[0]["content"].startswith("Be brief.")
    assert explain(messages, [WEATHER], has_system_role=False)[0]["role"] == "user"
    assert explain(messages[:1], []) == messages[:1]


def _after(fakes: Any, codec: Any, tokens: list[int]) -> set[int]:
    """What may follow these tokens where the model decides whether to call."""
    grammar = plan_tools(codec, [WEATHER]).enforce(codec).grammar
    assert grammar is not None
    state = compiler_of(codec.vocabulary()).start(grammar)
    state.extend(tokens)
    logits = np.zeros(len(codec.vocabulary().tokens), dtype=np.float32)
    return set(np.flatnonzero(state.mask(logits) == 0).tolist())


def test_free_text_is_free_until_a_call_begins(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}<tool_call>")
    free = _after(fakes, codec, list(b"1 < 2, <tool"))
    assert {fakes.EOS, ord("x"), ord("_"), 0xC3} <= free
    assert _after(fakes, codec, list(b"Hm. <tool_call>")) == {ord("\n")}
    whole = b'<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert _after(fakes, codec, list(whole[:14])) == {ord("n")}
    assert _after(fakes, codec, list(whole)) == {ord("\n"), fakes.EOS}
    taught: Any = Codec(fakes, "{{ messages }}")
    assert _after(fakes, taught, list(whole)) == {fakes.EOS}


def test_a_mark_that_is_a_special_token_is_used_and_shown(fakes: Any) -> None:
    codec: Any = Codec(fakes, "{{ tools }}[TOOL_CALLS]")
    mark = len(fakes.VOCABULARY.tokens)
    tokens = (*fakes.VOCABULARY.tokens, b"[TOOL_CALLS]")
    vocabulary = Vocabulary(tokens, fakes.VOCABULARY.special_ids | {mark}, fakes.VOCABULARY.eos_ids)
    codec.vocabulary = lambda: vocabulary
    assert plan_tools(codec, [WEATHER]).marks.shown_ids == {mark}
    assert {mark, ord("x"), fakes.EOS} <= _after(fakes, codec, list(b"Hm"))
    assert _after(fakes, codec, [ord("a"), mark]) == {ord("[")}
    required = plan_tools(codec, [WEATHER], choice="required").enforce(codec).grammar
    assert required is not None
    assert f"<[{mark}]>" in required.text


class NoSystem(Codec):
    """Its template has neither tools nor system messages."""

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        assert "tools" not in options
        if messages[0]["role"] == "system":
            raise UsageError("no system messages")
        return list("".join(message["content"] for message in messages).encode())


def test_a_template_without_system_messages_gets_the_tools_in_the_first_one(fakes: Any) -> None:
    codec: Any = NoSystem(fakes, "{{ messages }}")
    prompt = bytes(encode_with_tools(codec, [{"role": "user", "content": "hi"}], [WEATHER])).decode()
    assert '"name": "weather"' in prompt
    assert prompt.endswith("hi")
    with pytest.raises(UsageError, match="no system"):
        encode_with_tools(codec, [{"role": "system", "content": "x"}], [WEATHER])


class Picky(Codec):
    """Writes down the names of calls and insists, as Mistral's templates do, on nine letters or digits."""

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
        ids += [message["tool_call_id"] for message in messages if "tool_call_id" in message]
        assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
        return [len(set(ids)), len(ids)]


def test_names_of_calls_fit_the_template(fakes: Any) -> None:
    call = {"id": "call_of_another_server", "type": "function", "function": {"name": "f", "arguments": {}}}
    history = [
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "abcdefgh9"}]},
        {"role": "tool", "content": "x", "tool_call_id": "call_of_another_server"},
        {"role": "tool", "content": "y", "tool_call_id": "abcdefgh9"},
    ]
    codec: Any = Picky(fakes, "{{ tools }}[TOOL_CALLS]")
    assert encode_with_tools(codec, history, []) == [2, 4]
    assert len(MISTRAL.new_id()) == 9
