"""Generations know who asked for them and by which request."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.api.auth import name_key

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/chat/completions", CHAT, 1),
        ("/v1/completions", {"prompt": ["hi", "you"], "n": 2}, 4),
        ("/v1/responses", {"input": "hi"}, 1),
        ("/v1/embeddings", {"input": ["hi", "you"]}, 2),
        ("/v1/messages", {**CHAT, "max_tokens": 5}, 1),
        ("/api/chat", {**CHAT, "stream": False}, 1),
        ("/api/embed", {"input": "hi"}, 1),
    ],
)
def test_every_protocol_tells_the_caller_and_the_request(
    service: Any, call: Any, path: str, body: dict[str, Any], count: int
) -> None:
    app = create_app(service, api_keys=["one", "two"])
    for key in ("one", "two"):
        headers = {"authorization": f"Bearer {key}", "x-request-id": f"by-{key}"}
        assert call(app, "POST", path, json=body, headers=headers).status_code == 200
    origins = [(request.caller, request.request_id) for request in service.requests]
    assert origins == [(name_key(key), f"by-{key}") for key in ("one", "two") for _ in range(count)]
    assert len({request.prefix_scope for request in service.requests}) == 2


def test_an_open_api_has_no_callers_and_salts_part_them(service: Any, chat: Any) -> None:
    chat()
    chat(cache_salt="mine")
    assert [request.prefix_scope for request in service.requests] == [("", "", ""), ("", "mine", "")]
