"""Request bodies of OpenAI's plain completions, and of vLLM's routes about tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from shardcompute.api.body import RequestBody
from shardcompute.api.generation.schemas import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    ChatMessage,
    GenerationBody,
    TokenId,
    TokenIds,
)

MAX_TOKENIZED = 1 << 20


class CompletionRequest(GenerationBody):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="16 when left out; 0 only with echo.")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=128, description="Only the same as n.")
    suffix: str | None = Field(None, description="Refused.")


class TokenizeRequest(RequestBody):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables for the model's chat template, such as enable_thinking, as a chat has them.",
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENIZED)]
