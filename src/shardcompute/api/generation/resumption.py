"""Resumption of a stream that broke off, by this server or another: `Last-Event-ID` and the same request again.

Nothing is kept for it. An event's id says where in the answer the event ends, and what the request does not determine:
the seed that the server drew, the reply's id and time. Sampling is a pure function of prompt, seed and position, so any
driver computes the same answer again; what the client has is not sent twice.

A stream has ids where its request asks for them: `Last-Event-ID: 0` begins one, an id goes on after it.
"""

from __future__ import annotations

import array
import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request

from shardcompute.api.errors import RequestError
from shardcompute.api.generation.parameters import Plan
from shardcompute.core.generation import Delta, GenerationRequest

HEADER = "last-event-id"
BEGINNING = "0"
_MOST_CHARACTERS = 512
_DIGEST_BYTES = 12
_PLACE_DIGITS = 9
_END = "e"


class ReplyOrigin(msgspec.Struct, frozen=True, array_like=True):
    """What makes an answer this answer, beside its request."""

    request_id: str
    created_s: int
    seed: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """How far an answer has come."""

    tokens: int = 0
    characters: int = 0
    is_end: bool = False

    def after(self, delta: Delta) -> AnswerPlace:
        return AnswerPlace(
            self.tokens + len(delta.tokens), self.characters + len(delta.text), delta.finish is not None
        )

    def is_covered_by(self, other: AnswerPlace) -> bool:
        """Whether it is no further than the other."""
        is_short = self.tokens <= other.tokens and self.characters <= other.characters
        return is_short and (other.is_end or not self.is_end)


@dataclass(frozen=True, slots=True)
class StreamResumption:
    """A stream with ids: where it comes from, and after which place it goes on."""

    origin: ReplyOrigin
    place: AnswerPlace

    def id_at(self, place: AnswerPlace) -> str:
        return f"{_pack(self.origin)}.{place.tokens}.{place.characters}{_END * place.is_end}"


def given_origin(request: Request) -> ReplyOrigin | None:
    """Of the answer that a request goes on with; None where it begins one. RequestError for an id that is none."""
    given = request.headers.get(HEADER, "")
    return None if given in ("", BEGINNING) else _parse(given)[0]


def open_resumption(request: Request, plan: Plan, request_id: str, created_s: int) -> StreamResumption | None:
    """How a stream is to be numbered; None where nobody asks for it, or it has several answers."""
    given = request.headers.get(HEADER, "")
    if not given or len(plan.requests) != 1:
        if given not in ("", BEGINNING):
            raise RequestError(
                "Only a stream with one answer can be resumed.", hint="leave out n, or begin anew"
            )
        return None
    [asked] = plan.requests
    digest = _digest(plan.model.name, asked)
    if given == BEGINNING:
        return StreamResumption(
            ReplyOrigin(request_id, created_s, asked.sampling.seed, digest), AnswerPlace()
        )
    origin, place = _parse(given)
    if origin.digest != digest:
        raise RequestError(
            "Last-Event-ID belongs to another request, or the chat template gives another prompt now.",
            hint="send the request with which the stream was begun, or begin anew",
        )
    return StreamResumption(origin, place)


def with_seed(plan: Plan, resumption: StreamResumption | None) -> Plan:
    """The plan of the answer that is resumed."""
    if resumption is None:
        return plan
    [asked] = plan.requests
    sampling = replace(asked.sampling, seed=resumption.origin.seed)
    return replace(plan, requests=(replace(asked, sampling=sampling),))


def cut_at(delta: Delta, before: AnswerPlace, place: AnswerPlace) -> Iterator[Delta]:
    """A delta that follows after `before`, in two where it passes a place at which one ended the first time."""
    after = before.after(delta)
    tokens, characters = place.tokens - before.tokens, place.characters - before.characters
    is_within = 0 <= tokens <= len(delta.tokens) and 0 <= characters <= len(delta.text)
    if after == place or not is_within or (tokens, characters) == (0, 0):
        yield delta
        return
    yield Delta(delta.text[:characters], delta.tokens[:tokens], delta.prompt, interruption=delta.interruption)
    yield Delta(delta.text[characters:], delta.tokens[tokens:], finish=delta.finish, timings=delta.timings)


def _digest(model: str, request: GenerationRequest) -> bytes:
    sampling = replace(request.sampling, seed=0)
    rest = repr(
        (model, sampling, request.max_tokens, request.stop, sorted(request.stop_ids), len(request.pictures))
    )
    found = hashlib.sha256(array.array("q", request.prompt).tobytes())
    found.update(rest.encode(errors="replace"))
    return found.digest()[:_DIGEST_BYTES]


def _pack(origin: ReplyOrigin) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(origin)).decode().rstrip("=")


def _parse(text: str) -> tuple[ReplyOrigin, AnswerPlace]:
    parts = text.removesuffix(_END).split(".") if len(text) <= _MOST_CHARACTERS else [""]
    packed, *numbers = parts
    try:
        if len(numbers) != 2 or not all(each.isdecimal() and len(each) <= _PLACE_DIGITS for each in numbers):
            raise ValueError
        content = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        origin = msgspec.msgpack.decode(content, type=ReplyOrigin)
        tokens, characters = map(int, numbers)
        return origin, AnswerPlace(tokens, characters, text.endswith(_END))
    except ValueError:
        raise RequestError(
            "Last-Event-ID is not the id of an event of ours.",
            hint=f"send the last id that came, or {BEGINNING} to begin a stream with ids",
        ) from None
