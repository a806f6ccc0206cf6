"""Every list that a client may send has an end, and what a body costs is known before it is read."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from annotated_types import MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.requests import Request

from shardcompute.api import Limits, create_app
from shardcompute.api.app import ROUTES
from shardcompute.api.body import RequestBody, read_body
from shardcompute.api.cluster import ROUTES as CLUSTER_ROUTES
from shardcompute.api.generation import schemas
from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import MAX_STOP_CHARS

BODIES = {route.body for route in (*ROUTES, *CLUSTER_ROUTES) if route.body is not None}


def lists_in(kind: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[str, list[Any]]]:
    """Each list of a body, however deep, with what is said of it."""
    if kind in seen:
        return
    seen.add(kind)
    for name, field in kind.model_fields.items():
        yield from _lists(field.annotation, list(field.metadata), f"{kind.__name__}.{name}", seen)


def _lists(
    annotation: Any, said: list[Any], where: str, seen: set[type[BaseModel]]
) -> Iterator[tuple[str, list[Any]]]:
    arguments = get_args(annotation)
    if getattr(annotation, "__metadata__", None) is not None:
        facts = [each for fact in annotation.__metadata__ for each in getattr(fact, "metadata", [fact])]
        yield from _lists(arguments[0], facts, where, seen)
    elif getattr(annotation, "__origin__", None) is list:
        yield where, said
        yield from _lists(arguments[0], [], where, seen)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from lists_in(annotation, seen)
    else:
        for argument in arguments:
            yield from _lists(argument, said, where, seen)


def test_wrong_lists_are_not_searched_for_more_mistakes() -> None:
    seen: set[type[BaseModel]] = set()
    found = [each for body in BODIES for each in lists_in(body, seen)]
    assert len(found) > 15
    for where, said in found:
        assert any(getattr(fact, "fail_fast", None) for fact in said), where


@pytest.mark.parametrize("name", ["messages", "tools", "stop", "include", "stop_sequences", "tokens"])
def test_these_lists_have_an_end(name: str) -> None:
    seen: set[type[BaseModel]] = set()
    named = [said for body in BODIES for where, said in lists_in(body, seen) if where.endswith(f".{name}")]
    assert named
    assert all(any(isinstance(fact, MaxLen) for fact in said) for said in named)


STOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": ("/v1/completions", {"prompt": "x"}),
    "stop_sequences": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    "options.stop": ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
}


@pytest.mark.parametrize("stop", [["x" * (MAX_STOP_CHARS + 1)], ["x" * (MAX_STOP_CHARS // 2 + 1)] * 2])
@pytest.mark.parametrize("param", STOPS)
def test_stop_strings_have_an_end_together(app: Any, call: Any, param: str, stop: list[str]) -> None:
    path, body = STOPS[param]
    outer, _, inner = param.partition(".")
    reply = call(app, "POST", path, json={**body, outer: {inner: stop} if inner else stop})
    assert reply.status_code == 400
    assert reply.text.count(param) >= 1
    assert f"at most {MAX_STOP_CHARS} characters" in reply.text


def test_stop_strings_at_the_limit_are_taken(complete: Any, service: Any) -> None:
    stops = ["x" * (MAX_STOP_CHARS // 16)] * 16
    assert complete(stop=stops).status_code == 200
    assert service.requests[0].stop == tuple(stops)


def test_tools_have_an_end_together(chat: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "x" * 9000}} for i in range(30)
    ]
    reply = chat(tools=tools)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"


def test_choices_share_what_is_equal(complete: Any, service: Any) -> None:
    assert complete(n=3, logit_bias={"65": 1}, stop=["x"]).status_code == 200
    first, *others = service.requests
    for other in others:
        assert other.prompt is first.prompt
        assert other.stop is first.stop
        assert other.sampling.logit_bias is first.sampling.logit_bias
    assert len({each.sampling.seed for each in service.requests}) == 3


TOO_MANY = {
    "texts": (4, 100, b'{"a":"b","c":"d","e":0}'),
    "objects": (4, 100, b'{"a":[{},{},{}]}'),
    "lists": (4, 100, b'{"a":[[],[],[]]}'),
    "numbers": (4, 100, b'{"a":[' + b"0," * 101 + b"0]}"),
}


@pytest.mark.parametrize(("values", "items", "body"), TOO_MANY.values(), ids=TOO_MANY)
def test_a_body_of_too_many_values_is_refused(
    call: Any, service: Any, values: int, items: int, body: bytes
) -> None:
    app = create_app(service, limits=Limits(max_body_values=values, max_body_items=items))
    headers = {"content-type": "application/json"}
    assert call(app, "POST", "/v1/completions", content=body, headers=headers).status_code == 413
    roomy = create_app(service, limits=Limits(max_body_values=values + 4, max_body_items=items + 4))
    assert call(roomy, "POST", "/v1/completions", content=body, headers=headers).status_code == 400


def test_what_is_in_a_text_is_not_counted(call: Any, service: Any) -> None:
    app = create_app(service, limits=Limits(max_body_values=8, max_body_items=8))
    for text in ('"{[,' * 100, "\\" * 99, '\\"' * 99, '\\\\"{,'):
        body = {"prompt": "x", "unknown": text}
        assert call(app, "POST", "/v1/completions", json=body).status_code == 200


def test_a_large_body_is_read_off_the_event_loop(
    call: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    validate = schemas.GenerationBody.model_validate_json.__func__  # type: ignore[attr-defined]

    def note(kind: Any, raw: bytes) -> Any:
        seen.append(threading.current_thread().name)
        return validate(kind, raw)

    monkeypatch.setattr(RequestBody, "model_validate_json", classmethod(note))
    for size in (10, 100_000):
        call(app, "POST", "/v1/completions", json={"prompt": "x", "unknown": "x" * size})
    assert seen[0] == threading.current_thread().name
    assert seen[1].startswith("request work")


def test_bodies_share_a_memory(app: Any) -> None:
    limits = Limits(max_held_bytes=1000)

    def post(size: int) -> Request:
        chunks = [{"type": "http.request", "body": b" " * size, "more_body": True}]

        async def receive() -> Any:
            if chunks:
                return chunks.pop()
            await asyncio.Event().wait()

        headers = [(b"content-type", b"application/json")]
        return Request({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)

    async def run() -> None:
        first = asyncio.create_task(read_body(post(700), RequestBody, limits))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="large requests"):
            await read_body(post(700), RequestBody, limits)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert app.state.held_body_bytes == 0

    asyncio.run(run())


def test_a_schema_as_text_is_bounded_before_it_is_read(complete: Any) -> None:
    reply = complete(guided_json="[" * 300_000)
    assert reply.status_code == 400
    assert "characters" in reply.json()["error"]["message"]


def test_a_long_text_is_not_tokenized_at_once(app: Any, call: Any) -> None:
    reply = call(app, "POST", "/tokenize", content=json.dumps({"prompt": "x" * ((1 << 20) + 1)}).encode(),
                 headers={"content-type": "application/json"})  # fmt: skip
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"


def test_fields_know_what_is_said_of_them() -> None:
    """Otherwise the tests above would look at nothing."""
    field: FieldInfo = schemas.ChatCompletionRequest.model_fields["messages"]
    assert any(isinstance(fact, MaxLen) for fact in field.metadata)
