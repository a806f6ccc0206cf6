"""A small client for a ShardCompute server; any OpenAI client works as well.

    with Client("http://127.0.0.1:8000") as client:
        print(client.chat("Why is the sky blue?").text)
        for piece in client.chat("And at dusk?", stream=True):
            print(piece, end="")

Errors are those of `core.errors`: what the server refused, or SourceError when it cannot be reached.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, overload

import httpx

from shardcompute.core.errors import (
    BackendError,
    CapacityError,
    PromptTooLongError,
    QueueFullError,
    ShardComputeError,
    SourceError,
    UnknownModelError,
    UsageError,
    WouldReplaceError,
)

DEFAULT_URL = "http://127.0.0.1:8000"
Messages = str | Sequence[Mapping[str, Any]]

_BY_CODE: Mapping[str, type[ShardComputeError]] = {
    "context_length_exceeded": PromptTooLongError,
    "model_not_found": UnknownModelError,
    "rate_limit_exceeded": QueueFullError,
    "overloaded": CapacityError,
    "would_replace": WouldReplaceError,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer; `raw` is the server's whole body: all choices, log-probabilities, timings."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    raw: Mapping[str, Any] = field(repr=False)


class Client:
    """Talks to one server. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
        tls_pin: str | None = None,
        tls_certificate: str | None = None,
    ) -> None:
        """Of an HTTPS server whose certificate no authority of the system has signed: `tls_pin` is what it says when
        it starts (`sha256//…`), `tls_certificate` the certificate itself (PEM)."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=timeout,
            transport=transport,
            verify=_trust(url, tls_pin, tls_certificate),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """The names of the models served."""
        return [card["id"] for card in self._call("GET", "/v1/models")["data"]]

    def health(self) -> bool:
        """Whether a model is loaded and answers."""
        response = self._send(self._http.build_request("GET", "/health"))
        if response.status_code not in (200, 503):
            raise _error_of(response)
        return response.status_code == 200

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        **parameters: Any,
    ) -> Answer: ...

    @overload
    def chat(
        self, messages: Messages, *, model: str | None = None, stream: Literal[True], **parameters: Any
    ) -> Iterator[str]: ...

    def chat(
        self, messages: Messages, *, model: str | None = None, stream: bool = False, **parameters: Any
    ) -> Answer | Iterator[str]:
        """Answers a conversation, or a single question given as a string; streamed, it yields text."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = _body(model, messages=list(messages), **parameters)
        if stream:
            return _texts(self._stream("/v1/chat/completions", body))
        reply = self._call("POST", "/v1/chat/completions", body)
        return _answer(reply, reply["choices"][0]["message"]["content"])

    @overload
    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        stream: Literal[False] = False,
        **parameters: Any,
    ) -> Answer: ...

    @overload
    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        stream: Literal[True],
        **parameters: Any,
    ) -> Iterator[str]: ...

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        stream: bool = False,
        **parameters: Any,
    ) -> Answer | Iterator[str]:
        """Continues a text or token ids; streamed, it yields text."""
        body = _body(model, prompt=prompt if isinstance(prompt, str) else list(prompt), **parameters)
        if stream:
            return _texts(self._stream("/v1/completions", body))
        reply = self._call("POST", "/v1/completions", body)
        return _answer(reply, reply["choices"][0]["text"])

    def tokenize(
        self, prompt: str, *, model: str | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        body = _body(model, prompt=prompt, add_special_tokens=add_special_tokens)
        return list(self._call("POST", "/tokenize", body)["tokens"])

    def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        return str(self._call("POST", "/detokenize", _body(model, tokens=list(tokens)))["prompt"])

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        response = self._send(self._http.build_request(method, path, json=body))
        if response.status_code != 200:
            raise _error_of(response)
        reply: dict[str, Any] = response.json()
        return reply

    def _send(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        try:
            return self._http.send(request, stream=stream)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error

    def _stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The first choice of each event. Closing the iterator ends the generation."""
        request = self._http.build_request("POST", path, json={**body, "stream": True})
        response = self._send(request, stream=True)
        try:
            if response.status_code != 200:
                response.read()
                raise _error_of(response)
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _error_from(event["error"], 500)
                yield from (choice for choice in event["choices"] if choice["index"] == 0)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        finally:
            response.close()


def _trust(url: str, pin: str | None, certificate: str | None) -> ssl.SSLContext | bool:
    """Whom to trust; the system's authorities unless more is known."""
    if pin is None and certificate is None:
        return True
    from shardcompute.security.https.clients import pinned, trusting

    return pinned(url, pin) if pin is not None else trusting(certificate or "")


def _texts(choices: Generator[dict[str, Any], None, None]) -> Iterator[str]:
    with closing(choices):
        for choice in choices:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                yield text


def _body(model: str | None, **fields: Any) -> dict[str, Any]:
    return fields if model is None else {"model": model, **fields}


def _answer(reply: Mapping[str, Any], text: str) -> Answer:
    usage = reply["usage"]
    return Answer(
        text=text,
        finish_reason=reply["choices"][0]["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        raw=reply,
    )


def _unreachable(url: httpx.URL, error: httpx.HTTPError) -> SourceError:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return SourceError(
            f"The certificate of the server at {url} is not trusted here: {error}.",
            hint="give the pin that the server says when it starts (--tls-pin, in Python tls_pin), or have "
            "SSL_CERT_FILE name the authority that has signed it",
        )
    return SourceError(f"The server at {url} cannot be reached: {error}.", hint="check that it runs")


def _error_of(response: httpx.Response) -> ShardComputeError:
    try:
        detail = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        detail = {"message": f"The server answered {response.status_code} without saying why."}
    return _error_from(detail, response.status_code)


def _error_from(detail: Mapping[str, Any], status: int) -> ShardComputeError:
    kind = _BY_CODE.get(detail.get("code") or "")
    if kind is None:
        kind = {429: QueueFullError, 503: CapacityError}.get(
            status, UsageError if status < 500 else BackendError
        )
    return kind(str(detail.get("message", "")))
