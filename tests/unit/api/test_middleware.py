"""The id that a client is told is the one that everything behind the API knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shardcompute.core.generation import Delta, GenerationRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def heard(service: Any) -> list[str]:
    ids: list[str] = []
    answer = service.generate

    async def generate(model: str, request: GenerationRequest) -> AsyncIterator[Delta]:
        ids.append(request.request_id)
        async for delta in answer(model, request):
            yield delta

    service.generate = generate
    return ids


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/chat/completions", CHAT, "chatcmpl-"),
        ("/v1/completions", {"prompt": "hi"}, "cmpl-"),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, "msg_"),
    ],
)
def test_answers_carry_it(
    app: Any, call: Any, heard: list[str], path: str, body: dict[str, Any], prefix: str
) -> None:
    response = call(app, "POST", path, json=body)
    assert heard == [response.headers["x-request-id"]]
    assert response.json()["id"] == prefix + heard[0]


def test_clients_may_choose_it(app: Any, call: Any, heard: list[str]) -> None:
    call(app, "POST", "/v1/completions", json={"prompt": "hi", "n": 2}, headers={"x-request-id": "mine.7"})
    call(app, "POST", "/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "no spaces"})
    assert heard[:2] == ["mine.7", "mine.7"]
    assert "no spaces" not in heard
