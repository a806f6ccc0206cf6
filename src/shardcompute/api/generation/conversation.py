"""What the dialects besides OpenAI's chat share: each is a translation to and from chat completions.

A dialect's body becomes the fields of a `ChatCompletionRequest`; what chat would answer, whole or chunk by chunk,
becomes the dialect's own reply. So whatever chat can do, they all can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from shardcompute.api.errors import from_validation
from shardcompute.api.generation.chat import ChatPlan, open_chat
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.replies import ChatChunkChoice, ChatCompletion, ReplyBody
from shardcompute.api.generation.schemas import ChatCompletionRequest
from shardcompute.api.generation.sse import event
from shardcompute.core.generation import Delta


async def open_conversation(request: Request, fields: Mapping[str, Any], text: str | None = None) -> ChatPlan:
    """The chat that these fields of a chat completion ask for; fields that are None are left out. `text`, where
    given, is the prompt as it is, in the place of the messages."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        body = ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None
    return await open_chat(request, body, text)


def limit(chat: ChatPlan, max_tokens: int | None) -> ChatPlan:
    """The chat with answers of at most so many tokens, where more than the context has room for is no mistake."""
    if max_tokens is None:
        return chat
    requests = tuple(
        replace(request, max_tokens=min(request.max_tokens, max_tokens)) for request in chat.plan.requests
    )
    return replace(chat, plan=replace(chat.plan, requests=requests))


class Translation(ABC):
    """A dialect that words what chat says. Subclasses translate one choice of a chunk, and a whole completion."""

    def __init__(self, chat: ChatPlan) -> None:
        self.chat = chat
        self.plan: Plan = chat.plan
        self._is_open = False

    def opening(self) -> Iterable[ReplyBody]:
        """Before the first delta."""
        return ()

    @abstractmethod
    def translate(self, choice: ChatChunkChoice, outcome: Outcome) -> Iterable[ReplyBody]: ...

    @abstractmethod
    def translate_whole(self, completion: ChatCompletion, outcome: Outcome) -> ReplyBody: ...

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterator[ReplyBody]:
        if not self._is_open:
            self._is_open = True
            yield from self.opening()
        for chunk in self.chat.dialect.chunks(index, delta, outcomes):
            for choice in chunk.choices:
                yield from self.translate(choice, outcomes[0])

    def closing(self, outcomes: list[Outcome]) -> Iterable[ReplyBody]:
        return ()

    def whole(self, outcomes: list[Outcome]) -> ReplyBody:
        return self.translate_whole(self.chat.dialect.whole(outcomes), outcomes[0])


def matched_stop(plan: Plan, outcome: Outcome) -> str | None:
    """The stop string that ended an answer; None when it ended by itself or was cut off."""
    request = plan.requests[0]
    is_silent = bool(outcome.tokens) and outcome.tokens[-1].id in request.stop_ids
    if outcome.finish != "stop" or is_silent or not request.stop:
        return None
    written = plan.codec.decode([choice.id for choice in outcome.tokens])
    behind = written[len(outcome.text) :]
    return next((stop for stop in _longest_first(request.stop) if behind.startswith(stop)), request.stop[0])


def _longest_first(stops: Sequence[str]) -> list[str]:
    return sorted(stops, key=len, reverse=True)


def named_event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(data)
