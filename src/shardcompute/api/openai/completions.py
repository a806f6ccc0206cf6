"""OpenAI's plain completions: text or token ids in, their continuation out, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import AnyReply, Limits, ReplyBody, TextTemplate, read_body
from shardcompute.api.context import context_of
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.answer import answer
from shardcompute.api.generation.generations import Outcome
from shardcompute.api.generation.parameters import (
    Plan,
    check_ids,
    choose_model,
    naming_prompt,
    plan_generations,
    refuse_unsupported,
)
from shardcompute.api.generation.structured import check_grammar, requested_grammar
from shardcompute.api.offload import run_sized
from shardcompute.api.openai.completion_logprobs import CompletionRecorder
from shardcompute.api.openai.envelope import Envelope, open_envelope, resumption_of, usage_of, wants_usage
from shardcompute.api.openai.framing import CompletionsFraming
from shardcompute.api.openai.replies import Completion, CompletionChoice, CompletionLogprobs, Usage
from shardcompute.api.openai.schemas import CompletionRequest
from shardcompute.api.openapi import GENERATION_ERRORS, ApiRoute
from shardcompute.core.generation import Delta, TokenChoice
from shardcompute.node.service import ServedModel, TextCodec

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt as text and as ids; the text is filled in where it is echoed."""

    ids: list[int]
    text: str


async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, CompletionRequest, context.limits)
    refuse_unsupported(body)
    _refuse_what_completions_lack(body)
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    form = requested_grammar(body)
    if form is not None:
        await check_grammar(codec, form[1], form[0])
    with naming_prompt("prompt"):
        prompts = await _prompts(codec, model, body, context.limits)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    plan = plan_generations(
        model,
        codec,
        body,
        [prompt.ids for prompt in prompts],
        # Scoring a prompt alone (max_tokens 0) computes one token more, which is not shown.
        max_tokens=max(max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        prompt_param="prompt",
        limits=context.limits,
        grammar=None if form is None else form[1],
    )
    envelope = open_envelope(request, "cmpl", plan)
    adapter = CompletionsAdapter(
        plan,
        envelope,
        echoes=[prompt.text for prompt in prompts] if body.echo else None,
        has_logprobs=body.logprobs is not None,
        has_usage=wants_usage(body),
        is_prompt_only=max_tokens == 0,
    )
    return await answer(
        request,
        plan,
        adapter,
        CompletionsFraming(),
        is_stream=bool(body.stream),
        resumption=resumption_of(request, plan, envelope) if body.stream else None,
    )


class CompletionsAdapter:
    """Words outcomes as text completions. `echoes` holds each prompt's text where it is given back."""

    def __init__(
        self,
        plan: Plan,
        envelope: Envelope,
        *,
        echoes: Sequence[str] | None,
        has_logprobs: bool,
        has_usage: bool,
        is_prompt_only: bool,
    ) -> None:
        self._plan = plan
        self._envelope = envelope
        self._echoes = echoes
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage
        self._is_prompt_only = is_prompt_only
        self._recorders = [CompletionRecorder(plan.codec) for _ in plan.requests]
        self._opened: set[int] = set()
        self._has_text_alone = not has_logprobs and not is_prompt_only
        self._templates: dict[int, TextTemplate] = {}

    def chunks(self, index: int, delta: Delta, outcomes: list[Outcome]) -> Iterable[AnyReply]:
        is_first = index not in self._opened
        if not is_first and delta.text and delta.finish is None and self._has_text_alone:
            yield self._template(index).fill(delta.text)
            return
        self._opened.add(index)
        text, logprobs = self._piece(index, delta.text, delta.tokens, delta.prompt, is_first=is_first)
        if text or (logprobs is not None and logprobs.tokens):
            yield self._frame(
                [CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)]
            )
        finish = outcomes[index].finish
        if finish is not None:
            reason = "length" if self._is_prompt_only else finish
            choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason)
            is_last = all(outcome.finish for outcome in outcomes)
            yield self._frame([choice], outcomes=outcomes if is_last else ())

    def _template(self, index: int) -> TextTemplate:
        """Of chunks that have text and nothing else, which most are."""
        if index not in self._templates:
            self._templates[index] = TextTemplate(
                lambda text: self._frame(
                    [CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)]
                )
            )
        return self._templates[index]

    def closing(self, outcomes: list[Outcome]) -> Iterable[AnyReply]:
        if self._has_usage:
            yield self._frame([], usage=self._usage(outcomes))

    def whole(self, outcomes: list[Outcome]) -> ReplyBody:
        choices = []
        for index, outcome in enumerate(outcomes):
            text, logprobs = self._piece(index, outcome.text, outcome.tokens, outcome.prompt, is_first=True)
            reason = "length" if self._is_prompt_only else outcome.finish
            choices.append(CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason))
        return self._frame(choices, usage=self._usage(outcomes), outcomes=outcomes)

    def _piece(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenChoice],
        prompt: Sequence[TokenChoice],
        *,
        is_first: bool,
    ) -> tuple[str, CompletionLogprobs | None]:
        """Text and log-probabilities of a piece; the first one begins with the prompt where it is echoed."""
        if self._is_prompt_only:
            text, tokens = "", ()
        has_echo = is_first and self._echoes is not None
        if self._echoes is not None and has_echo:
            text = self._echoes[index // self._plan.choices_per_prompt] + text
        if not self._has_logprobs:
            return text, None
        recorded = (*prompt, *tokens) if has_echo else tokens
        return text, self._recorders[index].record(recorded)

    def _usage(self, outcomes: list[Outcome]) -> Usage:
        return usage_of(self._plan, [] if self._is_prompt_only else outcomes)

    def _frame(
        self,
        choices: list[CompletionChoice],
        *,
        usage: Usage | None = None,
        outcomes: Sequence[Outcome] = (),
    ) -> Completion:
        extra: dict[str, Any] = {"usage": usage} if self._has_usage or usage is not None else {}
        return Completion(
            object="text_completion", choices=choices, **self._envelope.fields(outcomes), **extra
        )


def _refuse_what_completions_lack(body: CompletionRequest) -> None:
    if body.suffix:
        raise unsupported("suffix", "Filling in the middle (suffix) is not supported.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of {body.best_of} with n {body.n or 1} is not supported."
        raise unsupported("best_of", message, hint="leave it out or set it to n")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens of 0 is only allowed together with echo.", param="max_tokens")


async def _prompts(
    codec: TextCodec, model: ServedModel, body: CompletionRequest, limits: Limits
) -> list[CompletionPrompt]:
    given: Sequence[str | list[int]]
    if isinstance(body.prompt, str) or _is_ids(body.prompt):
        given = [body.prompt]
    else:
        given = cast("list[str] | list[list[int]]", body.prompt)
    if len(given) > limits.max_choices:
        raise RequestError(
            f"{len(given)} prompts are more than {limits.max_choices}.",
            hint="split the request",
            param="prompt",
        )
    return await run_sized(
        lambda: [_prompt(codec, model, item, has_echo=bool(body.echo)) for item in given],
        characters=sum(map(len, given)),
    )


def _is_ids(prompt: Sequence[object]) -> TypeGuard[list[int]]:
    return isinstance(prompt[0], int)


def _prompt(
    codec: TextCodec, model: ServedModel, given: str | list[int], *, has_echo: bool
) -> CompletionPrompt:
    if isinstance(given, str):
        return CompletionPrompt(codec.encode(given, context_length=model.context_length), given)
    if len(given) > model.context_length:
        return CompletionPrompt(given, "")  # and is refused for its length
    check_ids(codec, given, "prompt")
    text = codec.decode(given, skip_special=False) if has_echo else ""
    return CompletionPrompt(given, text)


COMPLETIONS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue a text.",
        needs=Access.USE,
        body=CompletionRequest,
        reply=Completion,
        chunk=Completion,
        statuses=GENERATION_ERRORS,
    ),
)
