from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api import Limits, create_app
from shardcompute.core.errors import BackendError

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def lines(response: Any) -> list[Any]:
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture
def chat(app: Any, call: Any) -> Any:
    return lambda **fields: call(
        app, "POST", "/api/chat", json={"model": "org/tiny", "messages": MESSAGES, **fields}
    )


@pytest.fixture
def generate(app: Any, call: Any) -> Any:
    return lambda **fields: call(
        app, "POST", "/api/generate", json={"model": "org/tiny", "prompt": "hi", **fields}
    )


def test_a_chat_streams_lines_by_default(chat: Any) -> None:
    response = chat()
    assert response.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(response)
    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    assert all(piece["done"] is False and "done_reason" not in piece for piece in pieces)
    assert last["done"] is True
    assert last["message"] == {"role": "assistant", "content": ""}
    assert {key: last[key] for key in last if key not in ("created_at", "message", "done")} == {
        "model": "org/tiny",
        "done_reason": "stop",
        "total_duration": 3_500_000_000,
        "load_duration": 0,
        "prompt_eval_count": 4,
        "prompt_eval_duration": 2_000_000_000,
        "eval_count": 5,
        "eval_duration": 1_000_000_000,
    }


@pytest.mark.parametrize(
    ("path", "body", "part", "nothing"),
    [
        ("/api/chat", {"messages": MESSAGES}, "message", {"role": "assistant", "content": ""}),
        ("/api/generate", {"prompt": "hi"}, "response", ""),
    ],
)
def test_empty_pieces_show_that_a_silent_stream_lives(
    service: Any, fakes: Any, path: str, body: dict[str, Any], part: str, nothing: Any
) -> None:
    async def run() -> str:
        prefill = asyncio.Event()
        service.script = [prefill, *fakes.say("Hello")]
        app = create_app(service, limits=Limits(ping_interval_s=0.001))
        call = fakes.AsgiCall(app, path, {"model": "org/tiny", **body}, lambda *_: prefill.set())
        await call.run()
        return str(call.text)

    first, *_, last = [json.loads(line) for line in asyncio.run(run()).splitlines()]
    assert (first["done"], first[part]) == (False, nothing)
    assert last["done"] is True


def test_a_whole_chat(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("Hi", finish="length")
    response = chat(stream=False)
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["message"] == {"role": "assistant", "content": "Hi"}
    assert (body["done"], body["done_reason"], body["eval_count"]) == (True, "length", 2)


def test_options(chat: Any, service: Any) -> None:
    chat(
        options={
            "num_predict": 7,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.1,
            "seed": 5,
            "stop": ["x"],
            "repeat_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "num_ctx": 8192,
            "mirostat": 0,
        }
    )
    request = service.requests[0]
    sampling = request.sampling
    assert (request.max_tokens, request.stop) == (7, ("x",))
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert sampling.frequency_penalty == 0.25
    chat(options={"num_predict": -1})
    default = service.requests[1]
    assert default.max_tokens == 64 - 7
    assert (default.sampling.temperature, default.sampling.top_k, default.sampling.top_p) == (0.8, 40, 0.9)


def test_a_prompt_is_a_conversation_unless_it_is_raw(generate: Any, service: Any) -> None:
    body = generate(system="Be kind", stream=False).json()
    assert body["response"] == "Hello"
    assert bytes(service.requests[0].prompt) == b"s:Be kind;u:hi;a:"
    assert "".join(line["response"] for line in lines(generate(raw=True))) == "Hello"
    assert service.requests[1].prompt == (257, *b"hi")


def test_an_empty_question_loads_the_model(chat: Any, generate: Any, service: Any) -> None:
    for response in (chat(messages=[]), generate(prompt=""), generate(prompt="", model="org/tiny:latest")):
        assert response.json()["done_reason"] == "load"
    assert service.opened == 0
    assert chat(messages=[], model="nope").status_code == 404


def test_tool_calls_come_whole(chat: Any, service: Any, fakes: Any) -> None:
    service.served = (replace(service.served[0], context_length=4096),)
    service.script = fakes.say_call()
    called = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    assert chat(tools=[TOOL], stream=False).json()["message"]["tool_calls"] == called
    *_, told, last = lines(chat(tools=[TOOL]))
    assert told["message"]["tool_calls"] == called
    assert last["done_reason"] == "stop"
    chat(
        tools=[TOOL],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "tool_name": "weather", "content": "sun"},
        ],
    )
    assert b"sun" in bytes(service.requests[-1].prompt)


def test_a_format_reaches_the_engine(chat: Any, service: Any) -> None:
    for wish in ("json", {"type": "object", "properties": {}}):
        assert chat(format=wish).status_code == 200
        assert service.requests[-1].sampling.grammar is not None
    chat(format="")
    assert service.requests[-1].sampling.grammar is None


def test_models(app: Any, call: Any) -> None:
    (model,) = call(app, "GET", "/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("org/tiny", "org/tiny")
    assert model["modified_at"] == "2023-11-14T22:13:20.000000Z"
    (running,) = call(app, "GET", "/api/ps").json()["models"]
    assert running["context_length"] == 64
    shown = call(app, "POST", "/api/show", json={"model": "org/tiny:latest"}).json()
    assert shown["model_info"]["shardcompute.context_length"] == 64
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert call(app, "POST", "/api/show", json={"name": "nope"}).status_code == 404
    assert set(call(app, "GET", "/api/version").json()) == {"version"}


def test_models_are_not_changed_from_here(app: Any, call: Any) -> None:
    assert call(app, "POST", "/api/pull", json={"model": "org/tiny"}).json() == {"status": "success"}
    assert call(app, "POST", "/api/pull", json={"model": "other"}).status_code == 404
    for method, name in (("POST", "create"), ("POST", "copy"), ("POST", "push"), ("DELETE", "delete")):
        response = call(app, method, f"/api/{name}", json={"model": "org/tiny"})
        assert response.status_code == 400
        assert "shardcompute load" in response.json()["error"]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"model": "nope"}, 404),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400),
        ({"options": {"mirostat": 2}}, 400),
        ({"options": {"temperature": "hot"}}, 400),
        ({"format": "xml"}, 400),
    ],
)
def test_what_is_wrong_is_told_in_ollamas_shape(chat: Any, wrong: Any, status: int) -> None:
    response = chat(**wrong)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("field", ["suffix", "template"])
def test_what_generate_lacks(generate: Any, field: str) -> None:
    assert field in generate(**{field: "x"}).json()["error"]
    assert "context" in generate(context=[1, 2]).json()["error"]


def test_an_error_within_a_stream(chat: Any, service: Any, fakes: Any) -> None:
    service.script = [*fakes.say("Hel")[:1], BackendError("a worker died")]
    assert lines(chat())[-1] == {"error": "a worker died"}


def test_a_wrong_key(service: Any, call: Any) -> None:
    app = create_app(service, api_keys=["key"])
    response = call(app, "GET", "/api/tags")
    assert response.status_code == 401
    assert isinstance(response.json()["error"], str)
    assert call(app, "GET", "/api/tags", headers={"authorization": "Bearer key"}).status_code == 200
