"""What would silently change or lose something is refused with the name of what is wrong, in every protocol."""

from __future__ import annotations

from typing import Any

import pytest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
LONG = "x" * 80
WORDS = "This model's maximum context length is 64 tokens."


@pytest.fixture
def post(app: Any, call: Any) -> Any:
    return lambda path, **fields: call(app, "POST", path, json={"model": "org/tiny", **fields})


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": [USER], "max_tokens": 64}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        (RESPONSES, {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
    ],
)
def test_what_does_not_fit_the_context_is_said_in_the_words_that_clients_match(
    post: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = post(path, **fields)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["message"].startswith(WORDS)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_other_protocols_say_it_too(post: Any) -> None:
    ask = [{"role": "user", "content": LONG}]
    refused = post(MESSAGES, messages=ask, max_tokens=4)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["message"].startswith(WORDS)) == ("invalid_request_error", True)
    assert "prompt is too long" in error["message"], "by these words Anthropic's clients know it"
    for path, fields in (("/api/chat", {"messages": ask}), ("/api/generate", {"prompt": LONG})):
        assert post(path, **fields).json()["error"].startswith(WORDS)
    assert post("/api/embed", input=LONG, truncate=False).json()["error"].startswith(WORDS)


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_without_content_is_refused(post: Any, role: str, content: dict[str, Any]) -> None:
    message = {"role": role, "tool_call_id": "1", **content}
    error = post(CHAT, messages=[USER, message, USER]).json()["error"]
    assert error["param"] == "messages[1].content"


def test_an_assistant_that_calls_or_refuses_needs_no_content(post: Any) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for fields in ({"tool_calls": [called]}, {"refusal": "No."}):
        said = {"role": "assistant", "content": None, **fields}
        assert post(CHAT, messages=[USER, said, USER]).status_code == 200


USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            CHAT,
            {"messages": [USER, {"role": "tool", "tool_call_id": "b", "content": "x"}]},
            "messages[1].tool_call_id",
        ),
        (CHAT, {"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            RESPONSES,
            {"input": [USER, {"type": "function_call_output", "call_id": "b", "output": "x"}]},
            "input[1].call_id",
        ),
    ],
)
def test_the_result_of_a_call_that_nobody_made_is_refused(
    post: Any, service: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = post(path, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert service.opened == 0


def test_so_it_is_in_other_protocols(post: Any) -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b", "content": "x"}]}
    refused = post(MESSAGES, max_tokens=4, messages=[USER, USED, result])
    assert "messages[2].content[0].tool_use_id" in refused.json()["error"]["message"]
    told = post("/api/chat", messages=[USER, {"role": "tool", "content": "x"}])
    assert told.status_code == 400


def test_results_in_ollamas_chats_find_their_calls(post: Any, service: Any) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    for results in (
        [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}],
        [
            {"role": "tool", "content": "x", "tool_name": "g"},
            {"role": "tool", "content": "y", "tool_name": "f"},
        ],
    ):
        assert post("/api/chat", messages=[USER, said, *results], stream=False).status_code == 200


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": [USER]}), (RESPONSES, {"input": "hi"})])
def test_best_of_is_refused(post: Any, path: str, fields: dict[str, Any]) -> None:
    assert post(path, **fields, best_of=3).json()["error"]["param"] == "best_of"
    assert post(path, **fields, best_of=1).status_code == 200


SAMPLED = {
    "seed": 7,
    "stop": ["x"],
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"65": 2.0},
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [(RESPONSES, {"input": "hi"}), (MESSAGES, {"messages": [USER], "max_tokens": 4})],
)
def test_sampling_parameters_of_chat_are_honoured(
    post: Any, service: Any, path: str, fields: dict[str, Any]
) -> None:
    given = {**SAMPLED, "stop": None} if path == MESSAGES else SAMPLED
    assert post(path, **fields, **given).status_code == 200
    assert post(CHAT, messages=[USER], max_tokens=4, **SAMPLED).status_code == 200
    one, other = service.requests
    assert one.sampling == other.sampling
    if path == RESPONSES:
        assert one.stop == other.stop == ("x",)


@pytest.mark.parametrize(
    ("path", "fields", "wrong"),
    [
        (RESPONSES, {"input": "hi"}, {"max_tokens": 4}),
        (RESPONSES, {"input": "hi"}, {"n": 2}),
        (RESPONSES, {"input": "hi"}, {"response_format": {"type": "json_object"}}),
        (RESPONSES, {"input": "hi"}, {"top_k": "many"}),
        (RESPONSES, {"input": "hi"}, {"min_tokens": 4}),
    ],
)
def test_what_responses_do_not_have_is_refused(
    post: Any, service: Any, path: str, fields: dict[str, Any], wrong: dict[str, Any]
) -> None:
    refused = post(path, **fields, **wrong)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(wrong))


def test_what_messages_do_not_have_is_refused(post: Any) -> None:
    for wrong in ({"stop": ["x"]}, {"min_tokens": 4}):
        refused = post(MESSAGES, messages=[USER], max_tokens=4, **wrong)
        assert refused.status_code == 400
        assert next(iter(wrong)) in refused.json()["error"]["message"]
