from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api import Limits, create_app
from shardcompute.core.errors import BackendError, QueueFullError
from shardcompute.core.generation import Timings

PATH = "/v1/messages"
ASK = {"model": "org/tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}


def prompt_of(service: Any) -> str:
    return bytes(service.requests[-1].prompt).decode()


def usage(computed: int, cached: int, output: int) -> dict[str, int]:
    counts = {"input_tokens": computed, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {**counts, "output_tokens": output}


@pytest.fixture
def post(app: Any, call: Any) -> Any:
    return lambda **fields: call(app, "POST", PATH, json={**ASK, **fields})


def test_a_whole_message(post: Any, service: Any) -> None:
    body = post(temperature=0.5, top_p=0.5, top_k=3, metadata={"user_id": "x"}).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "org/tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage(7, 0, 5),
    }
    request = service.requests[0]
    assert request.max_tokens == 9
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.5, 3)


def test_the_order_of_a_stream(post: Any, fakes: Any) -> None:
    response = post(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = fakes.named_events(response.text)
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    data = [data for _, data in events]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[0]["message"]["usage"] == usage(7, 0, 0)
    assert data[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert data[2] == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Hel"},
    }
    assert data[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[5]["usage"]["output_tokens"] == 5


def test_cached_tokens_are_counted_apart(post: Any, service: Any, fakes: Any) -> None:
    *pieces, last = fakes.say("Hello")
    service.script = [*pieces, replace(last, timings=Timings(cached_tokens=4))]
    assert post().json()["usage"] == usage(3, 4, 5)
    events = dict(fakes.named_events(post(stream=True).text))
    assert events["message_start"]["message"]["usage"] == usage(7, 0, 0)
    assert events["message_delta"]["usage"] == usage(3, 4, 5)


def test_what_ended_it(post: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("Hi", finish="length")
    assert post().json()["stop_reason"] == "max_tokens"
    # The tokens go on to the end of the stop string, the text does not.
    first, last = fakes.say("Hello;;")
    service.script = [replace(first, text="Hello"), last]
    body = post(stop_sequences=[";", ";;"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", ";;")
    ended = fakes.named_events(post(stop_sequences=["#", ";"], stream=True).text)[-2][1]
    assert ended["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ";"}


def test_more_tokens_than_fit_are_no_mistake(post: Any, service: Any) -> None:
    assert post(max_tokens=100_000).status_code == 200
    assert service.requests[0].max_tokens == 64 - 7


def test_blocks_become_messages(post: Any, service: Any) -> None:
    service.served = (replace(service.served[0], context_length=4096),)
    post(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "ask"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "look"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and?"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "sun"}],
                    },
                ],
            },
        ],
    )
    prompt = prompt_of(service)
    assert prompt.startswith("s:Be\nkind;u:ask;a:(hm)look")
    # What a tool found comes before what the user says about it.
    assert 0 < prompt.index("sun") < prompt.index("u:and?;")


def test_tool_calls(post: Any, service: Any, fakes: Any) -> None:
    service.served = (replace(service.served[0], context_length=4096),)
    service.script = fakes.say_call()
    body = post(tools=[TOOL]).json()
    text, call = body["content"]
    assert text["type"] == "text"
    assert "Let me see." in text["text"]
    assert call.pop("id")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert body["stop_reason"] == "tool_use"
    events = [data for _, data in fakes.named_events(post(tools=[TOOL], stream=True).text)]
    opened = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert opened == ["text", "tool_use"]
    pieces = [e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"city": "Rome"}'
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert post(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).status_code == 200
    assert post(tools=[TOOL], tool_choice={"type": "tool"}).status_code == 400


def test_tokens_are_counted(app: Any, call: Any, service: Any) -> None:
    ask = {key: value for key, value in ASK.items() if key != "max_tokens"}
    assert call(app, "POST", f"{PATH}/count_tokens", json=ask).json() == {"input_tokens": 7}
    assert service.opened == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": None},
        {"messages": []},
        {"temperature": 1.5},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"system": [{"type": "image"}]},
    ],
)
def test_what_is_wrong_is_told_in_anthropics_shape(post: Any, wrong: Any) -> None:
    response = post(**wrong)
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("full"), 429, "rate_limit_error"),
        (BackendError("broken"), 500, "api_error"),
        (ZeroDivisionError("bug"), 500, "api_error"),
    ],
)
def test_failures_have_anthropics_types(post: Any, service: Any, error: Any, status: int, kind: str) -> None:
    service.script = [error]
    response = post()
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_models_and_loading(post: Any, service: Any) -> None:
    response = post(model="nope")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    service.ready = False
    response = post()
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


def test_an_error_within_a_stream(post: Any, service: Any, fakes: Any) -> None:
    service.script = [*fakes.say("Hel")[:1], BackendError("a worker died")]
    name, data = fakes.named_events(post(stream=True).text)[-1]
    assert name == "error"
    assert data["error"] == {"type": "api_error", "message": "a worker died"}


def test_a_silent_stream_pings(service: Any, fakes: Any) -> None:
    gate = asyncio.Event()
    service.script = [gate, *fakes.say("x")]
    app = create_app(service, limits=Limits(ping_interval_s=0.01))
    call = fakes.AsgiCall(app, PATH, {**ASK, "stream": True})
    call.on_body = lambda body, call: gate.set() if b"ping" in body else None
    asyncio.run(call.run())
    names = [name for name, _ in fakes.named_events(call.text)]
    assert names[0] == "ping"
    assert names[-1] == "message_stop"


@pytest.mark.parametrize("header", [{"x-api-key": "key"}, {"authorization": "Bearer key"}])
def test_either_header_has_the_key(service: Any, call: Any, header: Any) -> None:
    app = create_app(service, api_keys=["key"])
    assert call(app, "POST", PATH, json=ASK, headers=header).status_code == 200
    assert call(app, "GET", "/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "other"}, {"x-api-key": ""}])
def test_a_wrong_key_is_401(service: Any, call: Any, headers: Any) -> None:
    response = call(create_app(service, api_keys=["key"]), "POST", PATH, json=ASK, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert service.opened == 0
