"""Whatever a client sends, the answer is never a 5xx."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcompute.api import create_app
from shardcompute.api.anthropic.schemas import MessagesRequest
from shardcompute.api.generation.schemas import ChatCompletionRequest
from shardcompute.api.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from shardcompute.api.openai.embeddings import EmbeddingsRequest
from shardcompute.api.openai.responses_schemas import ResponsesRequest
from shardcompute.api.openai.schemas import CompletionRequest

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
        told = response.json()["error"]
        assert told if isinstance(told, str) else told["message"]
    assert service.opened == service.closed


@GENTLE
@given(fields=_fields(ChatCompletionRequest))
def test_chat(call: Any, fakes: Any, fields: dict[str, Any]) -> None:
    _post(call, fakes, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})


@GENTLE
@given(fields=_fields(CompletionRequest))
def test_completions(call: Any, fakes: Any, fields: dict[str, Any]) -> None:
    _post(call, fakes, "/v1/completions", {"prompt": "x", **fields})


FOREIGN = {
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "x"}),
    "/api/chat": (OllamaChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    "/api/generate": (OllamaGenerateRequest, {"prompt": "x"}),
}


@GENTLE
@given(data=st.data())
def test_other_protocols(call: Any, fakes: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(FOREIGN)))
    kind, least = FOREIGN[path]
    _post(call, fakes, path, {**least, **data.draw(_fields(kind))})


@GENTLE
@given(
    path=st.sampled_from(
        [*FOREIGN, "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/api/embed"]
    ),
    body=VALUES,
)
def test_any_body(call: Any, fakes: Any, path: str, body: Any) -> None:
    _post(call, fakes, path, body)
