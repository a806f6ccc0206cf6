"""Request validation: what bodies have in common, their limits, and how one is read without trusting its length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers, State
from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.errors import RequestError, from_validation
from shardcompute.api.offload import run_sized
from shardcompute.core.errors import CapacityError

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a request, and how often a silent stream shows that it lives."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_image_body_bytes: int = 48 * 1024 * 1024
    """In the place of `max_body_bytes`, where a model that sees is served: images come in bodies."""
    max_body_values: int = 65_536
    """Texts, names, objects and lists of one body."""
    max_body_items: int = 524_288
    """All values of one body, such as token ids: most of them are numbers, which cost less."""
    max_held_bytes: int = 256 * 1024 * 1024
    """Bodies that are being received and read, together."""
    max_choices: int = 128
    """Generations of one request: prompts times `n`."""
    ping_interval_s: float = 3.0
    body_timeout_s: float = 60.0
    """How long a client may take to send its body."""


class RequestBody(BaseModel):
    """What all bodies share: strict types (`"5"` is no number), finite numbers, unknown fields kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="Which model; may be left out when one is served.")


class RequestPart(BaseModel):
    """An object within a body: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ReplyBody(BaseModel):
    """What we answer with. A field is written, null or not, exactly when it was given."""

    model_config = ConfigDict(frozen=True)

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class WrittenBody:
    """A reply that is written down already."""

    __slots__ = ("_written",)

    def __init__(self, written: bytes) -> None:
        self._written = written

    def to_json(self) -> bytes:
        return self._written


AnyReply: TypeAlias = ReplyBody | WrittenBody


class TextTemplate:
    """Replies that differ in one text alone: written once, and then cut at that text."""

    _MARK = "\ue000text\ue001"

    def __init__(self, make: Callable[[str], ReplyBody]) -> None:
        self._head, mark, self._tail = make(self._MARK).to_json().partition(f'"{self._MARK}"'.encode())
        if not mark:
            raise ValueError("the reply does not have the text as it is")

    def fill(self, text: str) -> WrittenBody:
        return WrittenBody(self._head + msgspec.json.encode(text) + self._tail)


class ErrorDetail(ReplyBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ReplyBody):
    error: ErrorDetail


def required(value: str | None, param: str, *, may_be_empty: bool = False) -> str:
    """A field that only some kinds of an object need; 400 where it is missing."""
    if value is None or not (value or may_be_empty):
        raise RequestError(f"{param} is missing.", param=param, code="invalid_value")
    return value


def json_response(body: ReplyBody, status: int = 200) -> Response:
    return Response(body.to_json(), status_code=status, media_type="application/json")


async def read_body(
    request: Request, kind: type[Body], limits: Limits, *, needs_json_type: bool = True
) -> Body:
    """The body as `kind`: 415 for another content type, 413 when too long, 408 when too slow, 400 when it does not
    fit. Without `needs_json_type` any content type will do, but for browsers on pages of other sites."""
    if needs_json_type or _is_from_another_site(request.headers):
        _check_content_type(request.headers.get("content-type", ""))
    held = _HeldBytes(request.app.state, limits.max_held_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            raw = await _read_bytes(request, limits.max_body_bytes, held)
        return await run_sized(lambda: _parse(raw, kind, limits), characters=len(raw))
    except TimeoutError:
        raise _too_slow(limits.body_timeout_s) from None
    finally:
        held.release()


async def read_bytes(request: Request, limits: Limits, most_bytes: int) -> bytes:
    """A body that is bytes: 415 for another content type, 413 when too long, 408 when too slow."""
    _check_content_type(request.headers.get("content-type", ""), "application/octet-stream")
    held = _HeldBytes(request.app.state, limits.max_held_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read_bytes(request, most_bytes, held, "send a smaller file")
    except TimeoutError:
        raise _too_slow(limits.body_timeout_s) from None
    finally:
        held.release()


def _parse(raw: bytes, kind: type[Body], limits: Limits) -> Body:
    _check_values(raw, limits)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def _check_values(raw: bytes, limits: Limits) -> None:
    """Validating takes one step, however large: what it costs is counted before. Most bodies pass the first look."""
    if (
        raw.count(b'"') // 2 + _opened(raw) <= limits.max_body_values
        and raw.count(b",") <= limits.max_body_items
    ):
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts <= limits.max_body_values:
        outside = b"".join(bare.split(b'"')[::2])
        if (
            texts + _opened(outside) <= limits.max_body_values
            and outside.count(b",") <= limits.max_body_items
        ):
            return
    raise RequestError(
        f"The body has more than {limits.max_body_values} texts, objects and lists, or {limits.max_body_items} values.",
        hint="split the request",
        code="body_too_large",
        status=413,
    )


def _opened(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


@contextmanager
def holding_bytes(shared: State, limits: Limits, count: int) -> Iterator[None]:
    """While a request holds so many bytes of what was sent, of all that requests may hold together; CapacityError
    beyond that."""
    held = _HeldBytes(shared, limits.max_held_bytes)
    held.add(count)
    try:
        yield
    finally:
        held.release()


class _HeldBytes:
    """One body's part of what all bodies under way may take of the memory of an application."""

    def __init__(self, shared: State, limit: int) -> None:
        self._shared = shared
        self._limit = limit
        self._own = 0

    def add(self, count: int) -> None:
        total = getattr(self._shared, "held_body_bytes", 0) + count
        if total > self._limit:
            raise CapacityError(
                "Too many large requests are being received.", hint="send the request again in a moment"
            )
        self._shared.held_body_bytes = total
        self._own += count

    def release(self) -> None:
        if self._own:
            self._shared.held_body_bytes -= self._own
            self._own = 0


def _check_content_type(header: str, wanted: str = "application/json") -> None:
    """Insisting on JSON, or on bytes, also keeps web pages from posting here without a CORS preflight."""
    kind = header.partition(";")[0].strip().lower()
    if kind != wanted:
        raise RequestError(
            f"The body's content type is {kind!r}." if kind else "The request has no content type.",
            hint=f"send the header Content-Type: {wanted}",
            code="unsupported_media_type",
            status=415,
        )


def _is_from_another_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin sends this. Programs say nothing of the kind."""
    origin = headers.get("origin")
    is_own = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    return not is_own or headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin")


async def _read_bytes(
    request: Request, limit: int, held: _HeldBytes, hint: str = "send a shorter prompt"
) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_long(limit, hint)
    body = bytearray()
    async for chunk in request.stream():
        held.add(len(chunk))
        body += chunk
        if len(body) > limit:
            raise _too_long(limit, hint)
    return bytes(body)


def _too_slow(limit_s: float) -> RequestError:
    return RequestError(
        f"The body did not come within {limit_s:g} s.",
        hint="send the request again",
        code="body_too_slow",
        status=408,
        headers={"connection": "close"},
    )


def _too_long(limit: int, hint: str) -> RequestError:
    return RequestError(
        f"The body is longer than {limit} bytes.",
        hint=hint,
        code="body_too_large",
        status=413,
    )
