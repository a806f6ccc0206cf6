from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shardcompute.api import create_app
from shardcompute.client import Client
from shardcompute.core.errors import (
    BackendError,
    PromptTooLongError,
    QueueFullError,
    ShardComputeError,
    SourceError,
    UnknownModelError,
    UsageError,
)
from support.api.bridge import Bridge


@pytest.fixture
def client(app: Any) -> Iterator[Client]:
    with Client("http://127.0.0.1", transport=Bridge(app)) as client:
        yield client


def test_models_health_and_tokens(client: Client, service: Any) -> None:
    assert client.models() == ["org/tiny"]
    assert client.health()
    service.ready = False
    assert not client.health()
    service.ready = True
    assert client.tokenize("hi") == [257, 104, 105]
    assert client.tokenize("hi", add_special_tokens=False) == [104, 105]
    assert client.detokenize([104, 105], model="org/tiny") == "hi"


def test_chat_and_complete(client: Client, service: Any) -> None:
    answer = client.chat("hi", temperature=0, max_tokens=9)
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 5)
    assert answer.raw["timings"]["decode_s"] == 1.0
    assert service.requests[0].max_tokens == 9
    assert client.chat([{"role": "user", "content": "hi"}], model="org/tiny").text == "Hello"
    assert service.requests[0].prompt == service.requests[1].prompt
    assert client.complete("hi").text == "Hello"
    assert client.complete([104, 105]).prompt_tokens == 2


def test_streams_yield_text(client: Client) -> None:
    assert list(client.chat("hi", stream=True)) == ["Hel", "lo"]
    assert list(client.complete("hi", stream=True)) == ["Hel", "lo"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFullError("full"), QueueFullError),
        (PromptTooLongError("long"), PromptTooLongError),
        (BackendError("broken"), BackendError),
        (UsageError("wrong"), UsageError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_come_back_as_themselves(
    client: Client, service: Any, error: ShardComputeError, kind: type[ShardComputeError], stream: bool
) -> None:
    service.script = [error]
    with pytest.raises(kind) as caught:
        list(client.chat("hi", stream=stream))  # type: ignore[call-overload]
    assert type(caught.value) is kind
    assert error.message in caught.value.message


def test_an_error_within_a_stream_is_raised(client: Client, service: Any, fakes: Any) -> None:
    service.script = [*fakes.say("Hel")[:1], QueueFullError("full")]
    pieces = client.chat("hi", stream=True)
    assert next(pieces) == "Hel"
    with pytest.raises(QueueFullError):
        next(pieces)


def test_an_unknown_model(client: Client) -> None:
    with pytest.raises(UnknownModelError):
        client.chat("hi", model="nope")


def test_the_key_is_sent(service: Any) -> None:
    app = create_app(service, api_keys=["key"])
    with Client("http://127.0.0.1", api_key="key", transport=Bridge(app)) as client:
        assert client.models() == ["org/tiny"]
    with Client("http://127.0.0.1", transport=Bridge(app)) as client, pytest.raises(UsageError):
        client.models()


def test_a_server_that_is_not_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with Client("http://127.0.0.1", transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(SourceError, match="cannot be reached"):
            client.models()
        with pytest.raises(SourceError, match="cannot be reached"):
            list(client.chat("hi", stream=True))


def test_an_answer_that_is_not_ours() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(502, text="<html>"))
    with Client("http://127.0.0.1", transport=transport) as client, pytest.raises(BackendError, match="502"):
        client.models()
