"""A call that was cut short by the length limit is not text, and has no input that nobody wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
USER = {"role": "user", "content": "hi"}
FORMATS = {
    "<tool_call>": (WRITTEN, "<tool_call>"),
    "[TOOL_CALLS]": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', "[TOOL_CALLS]"),
    "[TOOL_CALLS][ARGS]": ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "[TOOL_CALLS]"),
    "<TOOLCALL>": ('<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>', "<TOOLCALL>"),
    "<tool_call><function=><parameter=>": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>",
    ),
}


@pytest.fixture
def post(app: Any, call: Any, service: Any, fakes: Any) -> Any:
    service.served = (replace(service.served[0], context_length=4096),)

    def send(path: str, said: str, finish: str = "length", **fields: Any) -> Any:
        service.script = fakes.say(said, finish=finish)
        return call(app, "POST", path, json={"model": "org/tiny", **fields})

    return send


def chat(post: Any, said: str, finish: str = "length") -> Any:
    tools = [{"type": "function", "function": TOOL}]
    reply = post("/v1/chat/completions", said, finish, messages=[USER], tools=tools)
    return reply.json()["choices"][0]


@pytest.mark.parametrize("template", FORMATS)
def test_no_beginning_of_a_call_is_text(
    post: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(
        fakes.ByteCodec, "chat_template_source", lambda self, *, has_tools=False: f"{{{{ tools }}}}{template}"
    )
    written, _ = FORMATS[template]
    for length in range(2, len(written)):
        choice = chat(post, f"Hm. {written[:length]}")
        message = choice["message"]
        assert choice["finish_reason"] == "length"
        assert (message["content"] or "").strip() == "Hm.", written[:length]
        [*calls] = message.get("tool_calls") or []
        for each in calls:
            assert each["function"]["name"] == "weather"
            assert '{"city": "Rome"}'.startswith(each["function"]["arguments"]), (
                "nothing that was not written"
            )


def test_the_llama_format_too(post: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fakes.ByteCodec, "chat_template_source", lambda self, *, has_tools=False: "{{ tools }}<|python_tag|>"
    )
    written = '{"name": "weather", "parameters": {"city": "Rome"}}'
    for length in range(len('{"name"'), len(written)):
        message = chat(post, written[:length])["message"]
        assert not message["content"], written[:length]


def test_what_only_looked_like_a_mark_is_text(post: Any) -> None:
    assert chat(post, "1 <")["message"]["content"] == "1 <"
    assert chat(post, "see <b> and <tool")["message"]["content"] == "see <b> and"
    assert chat(post, "a <tool", finish="stop")["message"]["content"] == "a <tool"


def test_a_stop_string_within_a_call_leaves_no_whole_call(post: Any) -> None:
    assert chat(post, WRITTEN[:50], finish="stop")["finish_reason"] == "stop"
    assert chat(post, WRITTEN, finish="stop")["finish_reason"] == "tool_calls"
    assert chat(post, WRITTEN.removesuffix("\n</tool_call>"), finish="stop")["finish_reason"] == "tool_calls"


CUT = WRITTEN[: WRITTEN.index("Rome") + 2]


def test_anthropics_messages_invent_no_input(post: Any, fakes: Any) -> None:
    tools = [{"name": "weather", "input_schema": TOOL["parameters"]}]
    body = post("/v1/messages", f"Hm. {CUT}", messages=[USER], tools=tools, max_tokens=99).json()
    assert body["content"] == [{"type": "text", "text": "Hm."}]
    assert body["stop_reason"] == "max_tokens"
    told = post("/v1/messages", CUT, messages=[USER], tools=tools, max_tokens=99, stream=True).text
    pieces = [
        data["delta"].get("partial_json", "") for _, data in fakes.named_events(told) if "delta" in data
    ]
    assert "".join(pieces) == '{"city": "Ro'


def test_ollamas_calls_invent_no_input(post: Any) -> None:
    tools = [{"type": "function", "function": TOOL}]
    fields = {"messages": [USER], "tools": tools}
    body = post("/api/chat", f"Hm. {CUT}", **fields, stream=False).json()
    assert body["message"] == {"role": "assistant", "content": "Hm."}
    assert body["done_reason"] == "length"
    lines = [json.loads(line) for line in post("/api/chat", CUT, **fields).text.splitlines()]
    assert not any("tool_calls" in line["message"] for line in lines)
    whole = post("/api/chat", WRITTEN, **fields, stream=False).json()
    assert whole["message"]["tool_calls"] == [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    ]


def test_a_response_says_which_item_is_incomplete(post: Any, fakes: Any) -> None:
    fields = {"input": "hi", "tools": [{"type": "function", **TOOL}]}
    body = post("/v1/responses", f"{WRITTEN}\n{CUT}", **fields).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]
    assert body["output"][1]["arguments"] == '{"city": "Ro'
    events = fakes.named_events(post("/v1/responses", CUT, **fields, stream=True).text)
    names = [name for name, _ in events]
    assert "response.function_call_arguments.done" not in names
    assert names[-2:] == ["response.output_item.done", "response.incomplete"]
    assert events[-2][1]["item"]["status"] == "incomplete"


def test_arguments_that_are_no_object_become_text_where_only_objects_can_be_told(post: Any) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": 5}\n</tool_call>'
    tools = [{"name": "weather", "input_schema": TOOL["parameters"]}]
    body = post("/v1/messages", said, "stop", messages=[USER], tools=tools, max_tokens=99).json()
    assert body["content"] == [{"type": "text", "text": "5"}]
    assert body["stop_reason"] == "end_turn"
