from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from shardcompute.api import Limits, create_app
from shardcompute.core.errors import UsageError

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def test_models_are_listed(app: Any, call: Any) -> None:
    card = {
        "id": "org/tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "shardcompute",
        "max_model_len": 64,
        "input_modalities": ["text"],
    }
    assert call(app, "GET", "/v1/models").json() == {"object": "list", "data": [card]}
    assert call(app, "GET", "/v1/models/org/tiny").json() == card
    assert call(app, "GET", "/v1/models/org%2Ftiny").json() == card


def test_an_unknown_model_is_404(app: Any, call: Any) -> None:
    response = call(app, "GET", "/v1/models/nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_tokens_there_and_back(app: Any, call: Any) -> None:
    response = call(app, "POST", "/tokenize", json={"prompt": "hi", "return_token_strs": True})
    assert response.json() == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [257, 104, 105],
        "token_strs": ["<bos>", "h", "i"],
    }
    plain = call(app, "POST", "/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert plain == {"count": 2, "max_model_len": 64, "tokens": [104, 105]}
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "add_generation_prompt": False}
    assert bytes(call(app, "POST", "/tokenize", json=body).json()["tokens"]) == b"u:x;"
    body["chat_template_kwargs"] = {"enable_thinking": False}
    told = call(app, "POST", "/tokenize", json=body).json()["tokens"]
    assert bytes(told) == b"enable_thinking=False;u:x;"
    assert call(app, "POST", "/detokenize", json={"tokens": [257, 104]}).json() == {"prompt": "<bos>h"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"enable_thinking": False}}),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "x" * 20_000}},
        ),
        ("/detokenize", {"tokens": [9999]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
)
def test_wrong_token_requests_are_400(app: Any, call: Any, path: str, body: Any) -> None:
    assert call(app, "POST", path, json=body).status_code == 400


def test_nothing_is_served_while_loading(app: Any, call: Any, chat: Any, service: Any) -> None:
    assert call(app, "GET", "/health").json() == {"status": "ok"}
    service.ready, service.served = False, ()
    response = call(app, "GET", "/health")
    assert response.status_code == 503
    assert response.json() == {"status": "loading", "reason": "tiny is still being loaded (try again)"}
    response = chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "server_error"


def test_version(app: Any, call: Any) -> None:
    assert set(call(app, "GET", "/version").json()) == {"version"}


def test_unknown_routes_and_methods_have_openais_error(app: Any, call: Any) -> None:
    for path in ("/nope", "/v1/models/", "/v1/chat/completions/"):
        response = call(app, "GET", path)
        assert response.status_code == 404
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    response = call(app, "GET", CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 60_000,
        b'{"a":' * 5_000,
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 500 + b"]" * 500 + b"}",
    ],
)
def test_garbage_is_400(app: Any, call: Any, content: bytes) -> None:
    response = call(app, "POST", CHAT, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_another_content_type_is_415(app: Any, call: Any, kind: str) -> None:
    response = call(app, "POST", CHAT, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415


def test_a_charset_is_fine(app: Any, call: Any) -> None:
    content = json.dumps({"prompt": "é"}).encode()
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert call(app, "POST", "/tokenize", content=content, headers=headers).status_code == 200


def test_long_bodies_are_413(service: Any, call: Any) -> None:
    app = create_app(service, limits=Limits(max_body_bytes=100))

    async def unsized() -> Any:
        for _ in range(10):
            yield b" " * 20

    assert call(app, "POST", "/tokenize", content=b" " * 101, headers=JSON).status_code == 413
    response = call(app, "POST", "/tokenize", content=unsized(), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert call(app, "POST", "/tokenize", json={"prompt": "x"}).status_code == 200


def test_keys_open_everything_but_health_is_open(service: Any, call: Any) -> None:
    app = create_app(service, api_keys=["observe first", "sécond"])

    def status(path: str, header: bytes | None) -> int:
        headers = {} if header is None else {b"authorization": header}
        return int(call(app, "GET", path, headers=headers).status_code)

    assert status("/health", None) == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/version", "/nope"):
        assert status(path, None) == 401
    assert status("/metrics", b"Bearer first") == 200
    assert status("/metrics", b"Bearer " + "sécond".encode()) == 403
    assert status("/v1/models", b"Bearer first") == 200
    assert status("/v1/models", b"bearer " + "sécond".encode()) == 200
    for wrong in (b"Bearer second", b"Bearer ", b"Bearer", b"Basic first", b"first", b"Bearer firs", b"\xff"):
        assert status("/v1/models", wrong) == 401
    response = call(app, "GET", "/v1/models")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("keys", [[], [""], ["good", ""]])
def test_a_list_of_keys_that_guards_nothing_is_refused(service: Any, keys: list[str]) -> None:
    with pytest.raises(UsageError):
        create_app(service, api_keys=keys)


def test_every_response_has_a_request_id(app: Any, call: Any) -> None:
    first, second = (call(app, "GET", "/nope").headers["x-request-id"] for _ in range(2))
    assert first != second
    own = call(app, "GET", "/health", headers={"x-request-id": "trace-1"})
    assert own.headers["x-request-id"] == "trace-1"
    unsafe = call(app, "GET", "/health", headers={"x-request-id": "a b"})
    assert unsafe.headers["x-request-id"] != "a b"


def test_the_unforeseen_is_logged_once_and_told_by_its_id(
    chat: Any, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = [ZeroDivisionError("secret detail")]
    with caplog.at_level(logging.ERROR):
        response = chat()
    assert response.status_code == 500
    request_id = response.headers["x-request-id"]
    error = response.json()["error"]
    assert error["code"] == "internal_error"
    assert request_id in error["message"]
    assert "secret" not in response.text
    assert len(caplog.records) == 1
    assert request_id in caplog.records[0].getMessage()


def test_the_unforeseen_in_a_stream_is_logged_once(
    chat: Any, service: Any, fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = [*fakes.say("Hel")[:1], ZeroDivisionError("secret detail")]
    with caplog.at_level(logging.ERROR):
        response = chat(stream=True)
    assert fakes.events(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert len(caplog.records) == 1


def test_a_client_that_leaves_while_sending_is_no_failure(
    app: Any, fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaves(fakes.AsgiCall):  # type: ignore[misc]
        async def _receive(self) -> Any:
            return {"type": "http.disconnect"}

    call = Leaves(app, CHAT, {})
    asyncio.run(call.run())
    assert call.messages == []
    assert caplog.records == []


def test_openapi_describes_every_route(app: Any, service: Any, call: Any) -> None:
    document = call(app, "GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
        "/metrics",
        "/tokenizer_info",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/receipts/{receipt_id}",
        *(f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "tags", "ps", "version")),
        *(f"/api/{name}" for name in ("show", "pull", "create", "copy", "push", "delete")),
    }
    assert "security" not in document
    chat = document["paths"][CHAT]["post"]
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert schema["required"] == ["messages"]
    assert {"temperature", "max_completion_tokens", "logit_bias"} <= set(schema["properties"])
    keyed = call(
        create_app(service, api_keys=["k"]), "GET", "/openapi.json", headers={"authorization": "Bearer k"}
    )
    assert keyed.json()["security"] == [{"key": []}]


def test_every_reference_of_openapi_resolves(app: Any, call: Any) -> None:
    document = call(app, "GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [r for value in node.values() for r in references(value)]
        return [r for value in node for r in references(value)] if isinstance(node, list) else []

    found = references(document)
    assert found
    assert all(reference.removeprefix("#/components/schemas/") in schemas for reference in found)
