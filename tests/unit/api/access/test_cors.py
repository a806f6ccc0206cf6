from __future__ import annotations

from typing import Any

import pytest

from shardcompute.api import create_app

CHAT = "/v1/chat/completions"
PAGE, OTHER = "https://page.test", "https://other.test"
ASK = {"messages": [{"role": "user", "content": "hi"}]}


def preflight(
    origin: str = PAGE, headers: str = "content-type, authorization, x-stainless-os"
) -> dict[str, str]:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": headers}
    return {"origin": origin, **asked}


def test_cors_is_off_unless_asked_for(service: Any, call: Any) -> None:
    app = create_app(service)
    for method, path, options in (
        ("OPTIONS", CHAT, {"headers": preflight()}),
        ("GET", "/v1/models", {"headers": {"origin": PAGE}}),
    ):
        closed = call(app, method, path, **options)
        assert not [name for name in closed.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/v1/responses"])
def test_preflights_of_chosen_origins_need_no_key(service: Any, call: Any, path: str) -> None:
    app = create_app(service, api_keys=["k"], cors_origins=[PAGE])
    opened = call(app, "OPTIONS", path, headers=preflight())
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in opened.headers["access-control-allow-headers"]
    assert "POST" in opened.headers["access-control-allow-methods"]
    assert "origin" in opened.headers["vary"].lower()
    other = call(app, "OPTIONS", path, headers=preflight(OTHER))
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


def test_answers_and_errors_are_for_chosen_origins_alone(service: Any, call: Any) -> None:
    app = create_app(service, api_keys=["k"], cors_origins=[PAGE])
    key = {"authorization": "Bearer k"}
    for headers, status in (({"origin": PAGE, **key}, 200), ({"origin": PAGE}, 401)):
        answered = call(app, "POST", CHAT, json=ASK, headers=headers)
        assert answered.status_code == status
        assert answered.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answered.headers["access-control-expose-headers"]
    hidden = call(app, "POST", CHAT, json=ASK, headers={"origin": OTHER, **key})
    assert "access-control-allow-origin" not in hidden.headers


@pytest.mark.parametrize("origins", [["*"], [PAGE], ["*", PAGE]])
def test_credentials_of_a_browser_are_never_allowed(service: Any, call: Any, origins: list[str]) -> None:
    app = create_app(service, cors_origins=origins)
    for method, options in (
        ("OPTIONS", {"headers": {**preflight(), "cookie": "a=b"}}),
        ("POST", {"headers": {"origin": PAGE, "cookie": "a=b"}, "json": ASK}),
    ):
        answered = call(app, method, CHAT, **options)
        assert answered.status_code == 200
        assert answered.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "access-control-allow-credentials" not in answered.headers


def test_no_page_of_others_steers_a_cluster(service: Any, call: Any) -> None:
    app = create_app(service, cors_origins=["*"])
    for method, headers in (("OPTIONS", preflight()), ("POST", {"origin": PAGE}), ("GET", {"origin": PAGE})):
        answered = call(app, method, "/cluster/tokens", headers=headers)
        assert "access-control-allow-origin" not in answered.headers
