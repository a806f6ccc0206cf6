from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardcompute.api import Limits, create_app
from shardcompute.core.errors import BackendError, PromptTooLongError, QueueFullError
from shardcompute.core.generation import Delta

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}

NOTHING_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


def test_the_shape_of_a_chat_stream(chat: Any, fakes: Any) -> None:
    response = chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    *chunks, done = fakes.events(response.text)
    assert done == "[DONE]"
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "org/tiny")
    }
    choices = [c["choices"][0] for c in chunks]
    assert choices == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"},
    ]
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["timings"]["prompt_tokens"] == 4
    assert all("timings" not in chunk for chunk in chunks[:-1])


def test_usage_comes_last_when_asked_for(chat: Any, fakes: Any) -> None:
    response = chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = fakes.events(response.text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12} | NOTHING_CACHED


def test_streamed_logprobs_cover_every_token(chat: Any, service: Any, fakes: Any) -> None:
    held_back = Delta(text="", tokens=(fakes.choice(ord("a")),))
    service.script = [held_back, *fakes.say("b")]
    chunks = fakes.events(chat(stream=True, logprobs=True).text)[:-1]
    logprobs = [c["choices"][0]["logprobs"] for c in chunks]
    tokens = [entry["token"] for found in logprobs if found for entry in found["content"]]
    assert tokens == ["a", "b"]


def test_each_choice_opens_and_ends_once(chat: Any, service: Any, fakes: Any) -> None:
    service.scripts = {1: fakes.say("Bye", finish="length")}
    chunks = fakes.events(chat(stream=True, n=2).text)[:-1]
    choices = [c["choices"][0] for c in chunks]
    for index, text, reason in ((0, "Hello", "stop"), (1, "Bye", "length")):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [reason]
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("full", hint="wait"), 429, "rate_limit_exceeded"),
        (PromptTooLongError("too long"), 400, "context_length_exceeded"),
        (BackendError("broken"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_byte_are_http_errors(
    chat: Any, service: Any, error: Exception, status: int, code: str | None, stream: bool
) -> None:
    service.script = [error]
    response = chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 429)
    assert service.closed == 1


def test_errors_after_the_first_byte_are_an_event(chat: Any, service: Any, fakes: Any) -> None:
    service.script = [*fakes.say("Hel")[:1], BackendError("a worker died", hint="try again")]
    response = chat(stream=True)
    assert response.status_code == 200
    *chunks, last = fakes.events(response.text)
    assert chunks[-1]["choices"][0]["delta"] == {"content": "Hel"}
    assert last["error"]["message"] == "a worker died (try again)"
    assert last["error"]["type"] == "server_error"


def test_one_failing_choice_ends_the_others(chat: Any, service: Any, fakes: Any) -> None:
    service.scripts = {0: [asyncio.Event()], 1: [BackendError("broken")]}
    assert chat(n=2).status_code == 500
    assert (service.opened, service.closed) == (2, 2)


def test_a_generation_without_an_end_is_our_fault(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("Hel")[:1]
    assert chat().status_code == 500


def test_a_cancelled_generation_is_no_answer(chat: Any, service: Any, fakes: Any) -> None:
    service.script = fakes.say("Hel", finish="cancelled")
    assert chat().status_code == 499
    assert "error" in fakes.events(chat(stream=True).text)[-1]


def test_pings_show_that_a_long_prefill_lives(service: Any, fakes: Any) -> None:
    async def run() -> str:
        prefill = asyncio.Event()
        service.script = [prefill, *fakes.say("Hello")]

        def on_body(body: bytes, call: Any) -> None:
            if body == b": ping\n\n":
                prefill.set()

        app = create_app(service, limits=Limits(ping_interval_s=0.001))
        call = fakes.AsgiCall(app, CHAT, BODY, on_body)
        await call.run()
        return str(call.text)

    text = asyncio.run(run())
    assert text.startswith(": ping\n\n")
    chunks = fakes.events(text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1] == "[DONE]"


def test_an_error_after_a_ping_is_an_event(service: Any, fakes: Any) -> None:
    async def run() -> str:
        prefill = asyncio.Event()
        service.script = [prefill, QueueFullError("full")]
        app = create_app(service, limits=Limits(ping_interval_s=0.001))
        call = fakes.AsgiCall(app, CHAT, BODY, lambda body, call: prefill.set())
        await call.run()
        return str(call.text)

    assert fakes.events(asyncio.run(run()))[-1]["error"]["code"] == "rate_limit_exceeded"


def test_a_client_that_leaves_mid_stream_closes_the_iterator(service: Any, fakes: Any) -> None:
    async def run() -> None:
        service.script = [*fakes.say("Hel")[:1], asyncio.Event(), *fakes.say("never")]

        def on_body(body: bytes, call: Any) -> None:
            if b"Hel" in body:
                call.leave.set()

        call = fakes.AsgiCall(create_app(service), CHAT, BODY, on_body)
        await call.run()
        assert service.closed == 1
        assert "never" not in call.text
        assert "[DONE]" not in call.text

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_closes_the_iterator(
    service: Any, fakes: Any, stream: bool
) -> None:
    async def run() -> None:
        call = fakes.AsgiCall(create_app(service), CHAT, {**BODY, "stream": stream, "n": 2})

        class LeavesWhenBothRun(asyncio.Event):
            async def wait(self) -> Any:
                if service.opened == 2:
                    call.leave.set()
                return await super().wait()

        service.script = [LeavesWhenBothRun()]
        await call.run()
        assert (service.opened, service.closed) == (2, 2)
        assert call.messages == []

    asyncio.run(run())
