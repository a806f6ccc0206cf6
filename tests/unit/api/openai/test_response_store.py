"""Second turns: a conversation goes on by the id of its last response, or with items that are only referred to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api import Limits, create_app
from shardcompute.api.openai.response_store import ResponseStore, StoreLimits

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}


@pytest.fixture
def post(app: Any, call: Any, service: Any) -> Any:
    service.served = (replace(service.served[0], context_length=4096),)
    return lambda **fields: call(app, "POST", PATH, json={"model": "org/tiny", **fields})


def prompt_of(service: Any) -> str:
    return bytes(service.requests[-1].prompt).decode()


def final(fakes: Any, response: Any) -> Any:
    return fakes.named_events(response.text)[-1][1]["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_by_id(post: Any, service: Any, fakes: Any, stream: bool) -> None:
    first = post(input="ask", instructions="Be kind", stream=stream)
    first = final(fakes, first) if stream else first.json()
    assert first["store"] is True
    second = post(input="more", previous_response_id=first["id"]).json()
    assert prompt_of(service) == "u:ask;a:Hello;u:more;a:", "instructions are not carried on"
    assert second["previous_response_id"] == first["id"]
    post(input="again", previous_response_id=second["id"])
    assert prompt_of(service) == "u:ask;a:Hello;u:more;a:Hello;u:again;a:"


def test_items_are_known_by_reference(post: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say_call()
    message, called = post(input="ask", tools=[TOOL]).json()["output"]
    service.script = fakes.say("Sunny")
    references = [{"type": "item_reference", "id": item["id"]} for item in (message, called)]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "sun"}
    asked = {"role": "user", "content": "ask"}
    assert post(input=[asked, *references, result], tools=[TOOL]).status_code == 200
    assert prompt_of(service).startswith("[weather]u:ask;a:Let me see.;t:sun;")


def test_results_answer_calls_of_the_response_before(post: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say_call()
    first = post(input="ask", tools=[TOOL]).json()
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "sun"}
    assert post(input=[result], previous_response_id=first["id"]).status_code == 200
    assert prompt_of(service) == "u:ask;a:Let me see.;t:sun;a:"


def test_a_call_that_was_cut_short_is_no_part_of_the_conversation(
    post: Any, service: Any, fakes: Any
) -> None:
    service.script = fakes.say('Hm. <tool_call>\n{"name": "weather", "arguments": {"ci', finish="length")
    first = post(input="ask", tools=[TOOL]).json()
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    post(input="more", previous_response_id=first["id"])
    assert prompt_of(service) == "u:ask;a:Hm.;u:more;a:"


def test_what_is_not_to_be_kept_is_not(post: Any, service: Any, fakes: Any) -> None:
    first = post(input="ask", store=False).json()
    assert first["store"] is False
    lost = post(input="more", previous_response_id=first["id"])
    assert lost.status_code == 400
    error = lost.json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    gone = post(input=[{"type": "item_reference", "id": first["output"][0]["id"]}])
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "input[0]")
    assert service.opened == 1


def test_a_response_that_is_too_large_says_that_it_is_not_kept(service: Any, call: Any) -> None:
    app = create_app(service)
    app.state.responses = ResponseStore(StoreLimits(max_response_bytes=10))
    assert call(app, "POST", PATH, json={"input": "ask"}).json()["store"] is False


def test_a_kept_response_can_be_asked_for_and_forgotten(post: Any, app: Any, call: Any) -> None:
    first = post(input="ask").json()
    where = f"{PATH}/{first['id']}"
    assert call(app, "GET", where).json() == first
    assert call(app, "DELETE", where).json() == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert call(app, method, where).status_code == 404
    assert post(input="more", previous_response_id=first["id"]).status_code == 400


def test_nobody_finds_what_another_key_has_made(service: Any, call: Any) -> None:
    app = create_app(service, api_keys=["one", "two"])

    def ask(key: str, method: str = "POST", path: str = PATH, **fields: Any) -> Any:
        body = {"json": {"input": "ask", **fields}} if method == "POST" else {}
        return call(app, method, path, headers={"authorization": f"Bearer {key}"}, **body)

    first = ask("one").json()
    assert ask("two", previous_response_id=first["id"]).status_code == 400
    assert ask("two", input=[{"type": "item_reference", "id": first["output"][0]["id"]}]).status_code == 404
    for method in ("GET", "DELETE"):
        assert ask("two", method, f"{PATH}/{first['id']}").status_code == 404
    assert ask("one", previous_response_id=first["id"]).status_code == 200


def test_references_are_bounded_by_what_they_lead_to(service: Any, call: Any, fakes: Any) -> None:
    service.served = (replace(service.served[0], context_length=100_000),)
    service.script = fakes.say("x" * 1000)
    app = create_app(service, limits=Limits(max_body_bytes=5000))
    [item] = call(app, "POST", PATH, json={"input": "ask"}).json()["output"]
    references = [{"type": "item_reference", "id": item["id"]}] * 9
    refused = call(app, "POST", PATH, json={"input": references})
    assert refused.status_code == 413
    assert refused.json()["error"]["param"] == "input"


class TestStore:
    def keep(self, store: ResponseStore, caller: str, name: str, size: int = 10) -> bool:
        item = {"type": "message", "id": f"item_{name}"}
        return store.keep(caller, name, b"r" * size, [{"type": "message"}], [item])

    def names(self, store: ResponseStore, caller: str, names: str) -> str:
        return "".join(name for name in names if store.find(caller, name) is not None)

    def test_the_oldest_of_a_caller_go_first(self) -> None:
        store = ResponseStore(StoreLimits(max_caller_responses=2))
        self.keep(store, "you", "x")
        for name in "abc":
            self.keep(store, "me", name)
        assert self.names(store, "me", "abc") == "bc"
        assert store.find("you", "x") is not None
        assert store.find_item("me", "item_a") is None
        assert store.find_item("me", "item_b") == b'{"type": "message", "id": "item_b"}'
        assert store.find_item("you", "item_b") is None

    def test_bytes_are_bounded_for_each_and_for_all(self) -> None:
        store = ResponseStore(StoreLimits(max_bytes=5000, max_caller_bytes=3000, max_response_bytes=1500))
        assert not self.keep(store, "me", "z", 2000)
        for name in "abcd":
            self.keep(store, "me", name, 1000)
        assert self.names(store, "me", "abcd") == "cd"
        for name in "efgh":
            self.keep(store, "you", name, 1000)
        assert store.size_bytes <= 5000
        assert self.names(store, "me", "cd") == "cd"
        assert self.names(store, "you", "efgh") == "gh"
        for caller in "uvw":
            self.keep(store, caller, "q", 1000)
        assert store.size_bytes <= 5000
        assert self.names(store, "me", "cd") == "", "the oldest of all go first"

    def test_time_runs_out(self) -> None:
        now_s = 0.0
        store = ResponseStore(StoreLimits(life_s=10), clock=lambda: now_s)
        self.keep(store, "me", "a")
        now_s = 9.0
        self.keep(store, "you", "b")
        assert store.find("me", "a") is not None
        now_s = 11.0
        assert store.find("me", "a") is None
        assert store.find("you", "b") is not None
        now_s = 30.0
        assert store.find_item("you", "item_b") is None
        assert store.size_bytes == 0

    def test_the_same_name_replaces(self) -> None:
        store = ResponseStore()
        for _ in range(3):
            self.keep(store, "me", "a")
        size = store.size_bytes
        assert store.forget("me", "a")
        assert size < 200
        assert not store.forget("me", "a")
