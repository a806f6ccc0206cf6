"""Ollama's clients often do not say that their bodies are JSON; browsers of other sites cannot say anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest

BODY = json.dumps({"model": "org/tiny", "prompt": "hi", "stream": False}).encode()
FORM = "application/x-www-form-urlencoded"
ROUTES = [
    ("POST", "/api/generate", {"prompt": "hi", "stream": False}),
    ("POST", "/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
    ("POST", "/api/embed", {"input": "hi"}),
    ("POST", "/api/embeddings", {"prompt": "hi"}),
    ("POST", "/api/show", {}),
    ("POST", "/api/pull", {}),
]


@pytest.mark.parametrize(("method", "path", "fields"), ROUTES)
@pytest.mark.parametrize("kind", [FORM, "text/plain", None])
def test_bodies_need_not_say_that_they_are_json(
    app: Any, call: Any, method: str, path: str, fields: dict[str, Any], kind: str | None
) -> None:
    content = json.dumps({"model": "org/tiny", **fields}).encode()
    headers = {} if kind is None else {"content-type": kind}
    answered = call(app, method, path, content=content, headers=headers)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:81"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1", "sec-fetch-site": "cross-site"},
    ],
)
def test_a_page_of_another_site_cannot_post_without_a_preflight(
    app: Any, call: Any, service: Any, headers: dict[str, str]
) -> None:
    refused = call(
        app, "POST", "/api/generate", content=BODY, headers={"content-type": "text/plain", **headers}
    )
    assert refused.status_code == 415
    assert service.opened == 0


@pytest.mark.parametrize(
    "headers", [{"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}]
)
def test_our_own_page_may(app: Any, call: Any, headers: dict[str, str]) -> None:
    answered = call(app, "POST", "/api/generate", content=BODY, headers={"content-type": FORM, **headers})
    assert answered.status_code == 200


def test_what_is_no_json_is_said_to_be_none(app: Any, call: Any) -> None:
    refused = call(app, "POST", "/api/generate", content=b"prompt=hi", headers={"content-type": FORM})
    assert refused.status_code == 400
    assert "not JSON" in refused.json()["error"]


def test_other_protocols_still_insist(app: Any, call: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert call(app, "POST", path, content=BODY, headers={"content-type": FORM}).status_code == 415
