"""Streams that broke off go on by `Last-Event-ID`: the same answer, nothing twice, nothing missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api.generation.resumption import AnswerPlace, cut_at
from shardcompute.core.generation import Delta, TokenChoice


@pytest.fixture
def chat(app: Any, call: Any) -> Any:
    """Posts to chat completions with a default message, and these headers."""

    def post(headers: dict[str, str], **fields: Any) -> Any:
        body = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return call(app, "POST", "/v1/chat/completions", json=body, headers=headers)

    return post


def events(response: Any) -> list[tuple[str, str]]:
    """(id, data) of each event, "" where it has none."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id", ""), fields["data"]))
    return found


def text_of(found: list[tuple[str, str]]) -> str:
    bodies = [json.loads(data) for _, data in found if data != "[DONE]"]
    return "".join(body["choices"][0]["delta"].get("content") or "" for body in bodies if body["choices"])


def begin(chat: Any, **body: Any) -> list[tuple[str, str]]:
    return events(chat({"Last-Event-ID": "0"}, stream=True, **body))


def test_events_have_ids_only_where_they_are_asked_for(chat: Any) -> None:
    assert not any(id for id, _ in events(chat({}, stream=True)))
    assert any(id for id, _ in begin(chat))


def test_a_stream_goes_on_after_any_of_its_events(chat: Any, service: Any) -> None:
    whole = begin(chat)
    seed = service.requests[-1].sampling.seed
    ids = [id for id, _ in whole if id]
    assert len(ids) == len(set(ids)) > 2
    for id in ids:
        rest = events(chat({"Last-Event-ID": id}, stream=True))
        had = whole[: 1 + max(n for n, (each, _) in enumerate(whole) if each == id)]
        assert [*had, *rest] == whole, "the same chunks, with the same ids"
        assert service.requests[-1].sampling.seed == seed, "though the server had drawn it"


def test_pieces_that_come_otherwise_are_cut_where_they_were(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("He", "ll", "o")
    whole = begin(chat)
    middle = next(id for id, data in whole if '"He"' in data)
    service.script = fakes.say("H", "el", "lo")
    assert text_of(events(chat({"Last-Event-ID": middle}, stream=True))) == "llo"
    service.script = fakes.say("Hello")
    assert text_of(events(chat({"Last-Event-ID": middle}, stream=True))) == "llo"


@pytest.mark.parametrize("id", ["1", "x.1.2", "AAAA.1.2", "9" * 600, "....", "AAAA.1.2e"])
def test_what_is_no_id_is_refused(chat: Any, id: str) -> None:
    response = chat({"Last-Event-ID": id}, stream=True)
    assert response.status_code == 400
    assert "Last-Event-ID" in response.json()["error"]["message"]


def test_another_request_cannot_go_on_with_it(chat: Any) -> None:
    id = begin(chat)[1][0]
    response = chat({"Last-Event-ID": id}, stream=True, temperature=0.3)
    assert response.status_code == 400
    assert "another request" in response.json()["error"]["message"]


def test_several_answers_cannot_be_resumed(chat: Any) -> None:
    assert not any(id for id, _ in begin(chat, n=2))
    id = begin(chat)[0][0] or begin(chat)[1][0]
    assert chat({"Last-Event-ID": id}, stream=True, n=2).status_code == 400


def test_a_delta_is_cut_once_and_wholly() -> None:
    tokens = tuple(TokenChoice(n) for n in range(4))
    delta = Delta("abcdef", tokens, finish="stop")
    first, second = cut_at(delta, AnswerPlace(10, 20), AnswerPlace(12, 23))
    assert (first.text, first.tokens, first.finish) == ("abc", tokens[:2], None)
    assert (second.text, second.tokens, second.finish) == ("def", tokens[2:], "stop")
    assert list(cut_at(delta, AnswerPlace(10, 20), AnswerPlace(30, 40))) == [delta]
    assert list(cut_at(delta, AnswerPlace(10, 20), AnswerPlace(10, 20))) == [delta]
    assert list(cut_at(delta, AnswerPlace(10, 20), AnswerPlace(14, 26, is_end=True))) == [delta]
    spoken, end = cut_at(delta, AnswerPlace(10, 20), AnswerPlace(14, 26))
    assert spoken == replace(delta, finish=None)
    assert (end.text, end.tokens, end.finish) == ("", (), "stop")
