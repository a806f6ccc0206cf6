"""OpenAI's chat completions: messages in, an assistant's message out, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import AnyReply, TextTemplate, read_body
from shardcompute.api.context import context_of
from shardcompute.api.generation.answer import answer
from shardcompute.api.generation.chat import ChatPlan, open_chat
from shardcompute.api.generation.chat_choices import text_choice
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.schemas import ChatCompletionRequest
from shardcompute.api.openai.envelope import Envelope, open_envelope, resumption_of, usage_of, wants_usage
from shardcompute.api.openai.framing import CompletionsFraming
from shardcompute.api.openai.replies import ChatChunk, ChatCompletion, Usage
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute
from shardcompute.core.generation import Delta, Interruption


async def create_chat_completion(request: Request) -> Response:
    body = await read_body(request, ChatCompletionRequest, context_of(request).chat_limits)
    chat = await open_chat(request, body)
    envelope = open_envelope(request, "chatcmpl", chat.plan)
    adapter = ChatCompletionsAdapter(chat, envelope, has_usage=wants_usage(body))
    return await answer(
        request,
        chat.plan,
        adapter,
        CompletionsFraming(),
        is_stream=bool(body.stream),
        resumption=resumption_of(request, chat.plan, envelope) if body.stream else None,
    )


class ChatCompletionsAdapter:
    """Words a chat as chat completions, which have its choices as they are."""

    def __init__(self, chat: ChatPlan, envelope: Envelope, *, has_usage: bool) -> None:
        self._chat = chat
        self._envelope = envelope
        self._no_usage: dict[str, Any] = {"usage": None} if has_usage else {}
        """A stream that ends with its usage says in each chunk before that there is none yet."""
        self._interruptions: list[Interruption] = []
        """Not told yet: not every delta has a chunk."""
        self._templates: dict[int, TextTemplate] = {}

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterator[AnyReply]:
        if delta.interruption is not None:
            self._interruptions.append(delta.interruption)
        elif not self._interruptions and self._chat.choices.add_text(index, delta):
            yield self._template(index).fill(delta.text)
            return
        for choice in self._chat.choices.chunks(index, delta, outcomes[index]):
            told, self._interruptions = self._interruptions, []
            is_last = choice.finish_reason is not None and all(outcome.finish for outcome in outcomes)
            yield ChatChunk(
                object="chat.completion.chunk",
                choices=[choice],
                **self._envelope.fields(outcomes if is_last else (), told),
                **self._no_usage,
            )

    def _template(self, index: int) -> TextTemplate:
        """Of chunks that have text and nothing else, which most are."""
        if index not in self._templates:
            self._templates[index] = TextTemplate(
                lambda text: ChatChunk(
                    object="chat.completion.chunk",
                    choices=[text_choice(index, text)],
                    **self._envelope.fields((), ()),
                    **self._no_usage,
                )
            )
        return self._templates[index]

    def closing(self, outcomes: list[Outcome]) -> Iterator[ChatChunk]:
        if self._no_usage:
            usage = self._usage(outcomes)
            yield ChatChunk(
                object="chat.completion.chunk", choices=[], usage=usage, **self._envelope.fields()
            )

    def whole(self, outcomes: list[Outcome]) -> ChatCompletion:
        return ChatCompletion(
            object="chat.completion",
            choices=self._chat.choices.whole(outcomes),
            usage=self._usage(outcomes),
            **self._envelope.fields(outcomes),
        )

    def _usage(self, outcomes: list[Outcome]) -> Usage:
        return usage_of(self._chat.plan, outcomes, self._chat.choices.reasoning_tokens(outcomes))


CHAT_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation.",
        needs=Access.USE,
        body=ChatCompletionRequest,
        reply=ChatCompletion,
        chunk=ChatChunk,
        statuses=GENERATION_ERRORS,
    ),
)
