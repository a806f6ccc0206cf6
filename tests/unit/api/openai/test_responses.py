from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardcompute.core.errors import BackendError
from shardcompute.core.generation import Delta, Timings

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
def post(app: Any, call: Any) -> Any:
    return lambda **fields: call(app, "POST", PATH, json={"model": "org/tiny", "input": "hi", **fields})


def prompt_of(service: Any) -> str:
    return bytes(service.requests[-1].prompt).decode()


def test_a_whole_response(post: Any, service: Any) -> None:
    body = post(max_output_tokens=9, temperature=0.5, top_p=0.25, metadata={"a": "b"}).json()
    assert body.pop("id").startswith("resp_")
    assert body.pop("created_at") > 0
    (message,) = body.pop("output")
    assert message.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert body == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 9,
        "model": "org/tiny",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 0.25,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 12,
        },
        "metadata": {"a": "b"},
    }
    assert service.requests[0].max_tokens == 9
    assert service.requests[0].sampling.temperature == 0.5


def test_a_response_cut_short(post: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("Hel", finish="length")
    body = post().json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    name, data = fakes.named_events(post(stream=True).text)[-1]
    assert name == "response.incomplete"
    assert data["response"]["status"] == "incomplete"


def test_the_order_of_a_stream(post: Any, fakes: Any) -> None:
    response = post(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = fakes.named_events(response.text)
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    data = [data for _, data in events]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert all(name == each["type"] for (name, _), each in zip(events, data, strict=True))
    assert data[0]["response"]["status"] == "in_progress"
    assert data[0]["response"]["usage"] is None
    item = data[2]["item"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    assert {each["item_id"] for each in data[3:8]} == {item["id"]}
    assert [each["delta"] for each in data[4:6]] == ["Hel", "lo"]
    assert data[6]["text"] == "Hello"
    assert data[8]["item"]["status"] == "completed"
    assert data[9]["response"]["output"] == [data[8]["item"]]
    assert data[9]["response"]["usage"]["total_tokens"] == 12


def test_cached_tokens_are_told(post: Any, service: Any, fakes: Any) -> None:
    *pieces, last = fakes.say("Hello")
    service.script = [*pieces, replace(last, timings=Timings(cached_tokens=4))]
    _, ended = fakes.named_events(post(stream=True).text)[-1]
    for usage in (post().json()["usage"], ended["response"]["usage"]):
        assert (usage["input_tokens"], usage["input_tokens_details"]) == (7, {"cached_tokens": 4})


def test_an_empty_answer_is_a_message_too(post: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say()
    assert post().json()["output"][0]["content"][0]["text"] == ""
    final = fakes.named_events(post(stream=True).text)[-1][1]["response"]
    assert final["output"][0]["content"][0]["text"] == ""


def test_items_become_messages(post: Any, service: Any) -> None:
    service.served = (replace(service.served[0], context_length=4096),)
    post(
        instructions="Be kind",
        input=[
            {"role": "developer", "content": "Briefly"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ask"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "look", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ],
    )
    prompt = prompt_of(service)
    assert prompt.startswith("s:Be kind;s:Briefly;u:ask;a:look")
    assert "sun" in prompt


def test_tool_calls(post: Any, service: Any, fakes: Any) -> None:
    service.served = (replace(service.served[0], context_length=4096),)
    service.script = fakes.say_call()
    body = post(tools=[TOOL]).json()
    message, call = body["output"]
    assert message["type"] == "message"
    assert call["call_id"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert call["arguments"] == '{"city": "Rome"}'
    assert body["tools"] == [TOOL]
    events = [data for _, data in fakes.named_events(post(tools=[TOOL], stream=True).text)]
    added = [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"]
    assert added == ["message", "function_call"]
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == '{"city": "Rome"}'
    done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
    assert (done["arguments"], done["output_index"]) == ('{"city": "Rome"}', 1)
    assert [item["type"] for item in events[-1]["response"]["output"]] == added
    chosen = {"type": "function", "name": "weather"}
    assert post(tools=[TOOL], tool_choice=chosen).json()["tool_choice"] == chosen


def test_a_schema_reaches_the_engine(post: Any, service: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wish = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    body = post(text=wish).json()
    assert body["text"] == wish
    assert service.requests[0].sampling.grammar is not None
    post(text={"format": {"type": "text"}})
    assert service.requests[1].sampling.grammar is None


def test_logprobs(post: Any, service: Any, fakes: Any) -> None:
    service.script = [Delta(text="", tokens=(fakes.choice(ord("a")),)), *fakes.say("b")]
    wish = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    content = post(**wish).json()["output"][0]["content"][0]
    assert [each["token"] for each in content["logprobs"]] == ["a", "b"]
    events = [data for _, data in fakes.named_events(post(**wish, stream=True).text)]
    told = [each for e in events if e["type"] == "response.output_text.delta" for each in e["logprobs"]]
    assert [each["token"] for each in told] == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_refused(post: Any, service: Any, wrong: Any, param: str) -> None:
    response = post(**wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert service.opened == 0


def test_an_error_within_a_stream(post: Any, service: Any, fakes: Any) -> None:
    service.script = [*fakes.say("Hel")[:1], BackendError("a worker died")]
    *_, last, (name, data) = fakes.named_events(post(stream=True).text)
    assert name == "error"
    assert data["message"] == "a worker died"
    assert data["sequence_number"] == last[1]["sequence_number"] + 1
