"""Chat adapters: what the protocols besides OpenAI's chat share, each being a translation to and from chat.

A protocol's body becomes the fields of a `ChatCompletionRequest`; the choices that chat would answer with, whole or
chunk by chunk, become the protocol's own reply. So whatever chat can do, they all can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from shardcompute.api.body import ReplyBody
from shardcompute.api.errors import from_validation
from shardcompute.api.generation.chat import ChatPlan, open_chat
from shardcompute.api.generation.chat_prompt import parse_arguments
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.parameters import Plan
from shardcompute.api.generation.replies import CalledTool, ChatChoice, ChatChunkChoice
from shardcompute.api.generation.schemas import ChatCompletionRequest
from shardcompute.core.generation import Delta


async def open_conversation(
    request: Request,
    fields: Mapping[str, Any],
    text: str | None = None,
    *,
    prompt_param: str = "messages",
) -> ChatPlan:
    """The chat that these fields of a chat completion ask for; fields that are None are left out. `text`, where
    given, is the prompt as it is, in the place of the messages."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        body = ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None
    return await open_chat(request, body, text, prompt_param=prompt_param)


def limit(chat: ChatPlan, max_tokens: int | None) -> ChatPlan:
    """The chat with answers of at most so many tokens, where more than the context has room for is no mistake."""
    if max_tokens is None:
        return chat
    requests = tuple(
        replace(request, max_tokens=min(request.max_tokens, max_tokens)) for request in chat.plan.requests
    )
    return replace(chat, plan=replace(chat.plan, requests=requests))


class ChatAdapter(ABC):
    """A reply adapter over a chat. Subclasses translate one choice of a chunk, and one that is whole."""

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
    def translate_whole(self, choice: ChatChoice, outcome: Outcome) -> ReplyBody: ...

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterator[ReplyBody]:
        if not self._is_open:
            self._is_open = True
            yield from self.opening()
        for choice in self.chat.choices.chunks(index, delta, outcomes[index]):
            yield from self.translate(choice, outcomes[index])

    def closing(self, outcomes: list[Outcome]) -> Iterable[ReplyBody]:
        return ()

    def whole(self, outcomes: list[Outcome]) -> ReplyBody:
        [choice] = self.chat.choices.whole(outcomes)
        return self.translate_whole(choice, outcomes[0])


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call whose arguments are an object, as some protocols want them."""

    id: str
    name: str
    arguments: dict[str, Any]


def read_calls(calls: Iterable[CalledTool], *, is_cut: bool) -> tuple[list[ReadCall], str]:
    """The calls whose arguments are objects, and what else the model wrote in their place, as text. One that was cut
    short is neither: nobody knows what it would have become."""
    read: list[ReadCall] = []
    others: list[str] = []
    for call in calls:
        arguments = parse_arguments(call.function.arguments)
        if arguments is not None:
            read.append(ReadCall(call.id, call.function.name, arguments))
        elif not is_cut:
            others.append(call.function.arguments)
    return read, "\n".join(others)
