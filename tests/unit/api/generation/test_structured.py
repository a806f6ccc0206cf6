"""An answer that its grammar broke off is an error in every protocol, and never passes for a whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api.generation.structured import GRAMMAR_TOO_COMPLEX
from shardcompute.core.generation import TokenChoice

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HI = {"messages": [{"role": "user", "content": "hi"}]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**HI, "response_format": FORM},
    "/v1/completions": {"prompt": "hi", "guided_json": SCHEMA},
    "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/messages": {
        **HI,
        "max_tokens": 30,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {**HI, "model": "org/tiny", "format": SCHEMA},
}
Post = Callable[..., Any]


@pytest.fixture
def ended(service: Any, fakes: Any) -> Callable[[str], None]:
    """Lets the model say this and end its answer."""

    def end(text: str) -> None:
        *pieces, last = fakes.say(text)
        service.script = [*pieces, replace(last, tokens=(TokenChoice(fakes.EOS),))]

    return end


@pytest.mark.parametrize("path", ASKED)
def test_it_is_an_error(path: str, app: Any, call: Any, ended: Callable[[str], None]) -> None:
    ended('{"a":')
    body = {**ASKED[path], "stream": False}
    response = call(app, "POST", path, json=body)
    assert response.status_code == 400
    assert "broken off before its form was complete" in response.text
    ended('{"a": 5}')
    assert call(app, "POST", path, json=body).status_code == 200


@pytest.mark.parametrize("path", ASKED)
def test_it_is_the_last_event_of_a_stream(
    path: str, app: Any, call: Any, ended: Callable[[str], None]
) -> None:
    ended('{"a":')
    response = call(app, "POST", path, json={**ASKED[path], "stream": True})
    assert response.status_code == 200
    *_, last = filter(None, response.text.split("\n"))
    assert "broken off before its form was complete" in last
    assert not any(word in response.text for word in ("[DONE]", "message_stop", '"done":true', '"stop"'))


def test_clients_can_tell_it_by_its_code(chat: Any, ended: Callable[[str], None]) -> None:
    ended("{")
    error = chat(response_format=FORM).json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", GRAMMAR_TOO_COMPLEX)


def test_a_required_call_is_held_to_it_too(chat: Any, ended: Callable[[str], None]) -> None:
    ended('<tool_call>\n{"name": "f", "arguments": {')
    assert chat(tools=[TOOL], tool_choice="required").json()["error"]["code"] == GRAMMAR_TOO_COMPLEX
    ended('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    assert chat(tools=[TOOL], tool_choice="required").json()["choices"][0]["finish_reason"] == "tool_calls"


def test_who_asks_for_an_early_end_gets_it(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say('{"a":')  # as far as a stop string
    choice = chat(response_format=FORM, stop=["5"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a":', "stop")
    service.script = fakes.say('{"a":', finish="length")
    assert chat(response_format=FORM).json()["choices"][0]["finish_reason"] == "length"
