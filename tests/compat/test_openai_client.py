"""The official `openai` package against a real server on loopback."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcompute.api import create_app, serve
from shardcompute.core.errors import BackendError, PromptTooLongError, QueueFullError

openai = pytest.importorskip("openai")

_NAME = "shardcompute_api_fakes"
if _NAME not in sys.modules:
    _path = Path(__file__).parents[1] / "unit" / "api" / "fakes.py"
    _spec = importlib.util.spec_from_file_location(_NAME, _path)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
fakes: Any = sys.modules[_NAME]

MESSAGES = [{"role": "user", "content": "hi"}]


class Server:
    """Serves a fake service from a thread; leaving the block stops it."""

    def __init__(self, service: Any) -> None:
        self._app = create_app(service, api_keys=["key"])
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.url = ""

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._listening.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(self._app, port=0, stop=self._stop, on_listening=self._tell, grace_s=1)

    def _tell(self, host: str, port: int) -> None:
        self.url = f"http://{host}:{port}/v1"
        self._listening.set()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Any, str]]:
    service = fakes.FakeService()
    with Server(service) as server:
        yield service, server.url


@pytest.fixture
def service(shared: tuple[Any, str]) -> Any:
    fresh = fakes.FakeService()
    vars(shared[0]).update(vars(fresh))
    return shared[0]


@pytest.fixture
def client(shared: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with openai.OpenAI(base_url=shared[1], api_key="key", max_retries=0, timeout=60) as client:
        yield client


def test_lists_models(service: Any, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").owned_by == "shardcompute"


def test_chats(service: Any, client: Any) -> None:
    reply = client.chat.completions.create(
        model="org/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1, extra_body={"top_k": 3}
    )
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == 12
    assert reply.choices[0].logprobs.content[0].token == "H"
    assert reply.choices[0].logprobs.content[0].top_logprobs[0].bytes == [72]
    assert service.requests[0].sampling.top_k == 3
    assert reply._request_id


def test_streams_a_chat(service: Any, client: Any) -> None:
    with client.chat.completions.create(
        model="org/tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 12


def test_completes_with_logprobs(service: Any, client: Any) -> None:
    reply = client.completions.create(model="org/tiny", prompt=["a", "b"], logprobs=1, echo=True, n=2)
    assert [choice.text for choice in reply.choices] == ["aHello", "aHello", "bHello", "bHello"]
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == ["<bos>", "a", "H", "e", "l", "l", "o"]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == [0, 0, 1, 2, 3, 4, 5]


def test_streams_a_completion(service: Any, client: Any) -> None:
    with client.completions.create(model="org/tiny", prompt=[104, 105], stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFullError("full"), "RateLimitError"),
        (PromptTooLongError("long"), "BadRequestError"),
        (BackendError("broken"), "InternalServerError"),
        (ZeroDivisionError("bug"), "InternalServerError"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_mapped(service: Any, client: Any, error: Exception, kind: str, stream: bool) -> None:
    service.script = [error]
    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=stream)
    assert caught.value.body["message"]


def test_requests_that_are_wrong(service: Any, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="org/tiny", messages=MESSAGES, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()


def test_an_error_within_a_stream(service: Any, client: Any) -> None:
    service.script = [*fakes.say("Hel")[:1], BackendError("a worker died")]
    with (
        client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True) as stream,
        pytest.raises(openai.APIError, match="a worker died"),
    ):
        list(stream)


def test_a_client_that_closes_its_stream_ends_the_generation(service: Any, client: Any) -> None:
    closed = threading.Event()
    service.script = [*fakes.say("Hel")[:1], asyncio.Event()]
    service.when_closed = closed.set
    stream = client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    assert not closed.is_set()
    stream.close()
    assert closed.wait(60)
