"""Whatever a client sends, the answer is never a 5xx."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcompute.api import create_app
from shardcompute.api.schemas import ChatCompletionRequest, CompletionRequest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["none", "auto", "text", "user", "org/tiny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
GENTLE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _fields(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(kind.model_fields)), VALUES, max_size=4)


def _post(call: Any, fakes: Any, path: str, body: Any) -> None:
    service = fakes.FakeService()
    headers = {"content-type": "application/json"}
    response = call(create_app(service), "POST", path, content=json.dumps(body).encode(), headers=headers)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    assert service.opened == service.closed


@GENTLE
@given(fields=_fields(ChatCompletionRequest))
def test_chat(call: Any, fakes: Any, fields: dict[str, Any]) -> None:
    _post(call, fakes, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})


@GENTLE
@given(fields=_fields(CompletionRequest))
def test_completions(call: Any, fakes: Any, fields: dict[str, Any]) -> None:
    _post(call, fakes, "/v1/completions", {"prompt": "x", **fields})


@GENTLE
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]), body=VALUES
)
def test_any_body(call: Any, fakes: Any, path: str, body: Any) -> None:
    _post(call, fakes, path, body)
