"""Replies of OpenAI's routes, and of vLLM's about tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardcompute.api.body import ReplyBody
from shardcompute.api.generation.replies import ChatChoice, ChatChunkChoice


class ModelObject(ReplyBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    input_modalities: list[Literal["text", "image"]]


class ModelList(ReplyBody):
    object: Literal["list"]
    data: list[ModelObject]


class PromptTokensDetails(ReplyBody):
    cached_tokens: int = 0


class CompletionTokensDetails(ReplyBody):
    reasoning_tokens: int = 0


class Usage(ReplyBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class InterruptionReply(ReplyBody):
    """Not OpenAI's: machines were lost, or layers moved, and the answer went on where it was. No token is lost."""

    lost: tuple[str, ...]
    taken_over_by: tuple[str, ...]
    pause_s: float
    after_tokens: int


class TimingsReply(ReplyBody):
    """Not OpenAI's: where the time went, in seconds."""

    queue_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    generated_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    cached_tokens: int = 0
    traversals: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = Field(default_factory=list)
    accepted_by_position: list[int] = Field(default_factory=list)
    wire_s: float = 0.0
    stage_queue_s: float = 0.0
    codec_s: float = 0.0
    compute_s: float = 0.0
    draft_s: float = 0.0
    bytes_per_token: float = 0.0
    codecs: list[str] = Field(default_factory=list)
    interrupted_s: float = 0.0


class ChatCompletion(ReplyBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsReply | None = None
    interruptions: list[InterruptionReply] = Field(default_factory=list)


class ChatChunk(ReplyBody):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: TimingsReply | None = None
    interruptions: list[InterruptionReply] = Field(default_factory=list)


class CompletionLogprobs(ReplyBody):
    """`text_offset` counts characters of the returned text, which holds the prompt only with `echo`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ReplyBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(ReplyBody):
    """A whole completion, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: TimingsReply | None = None
    interruptions: list[InterruptionReply] = Field(default_factory=list)


class TokenizeReply(ReplyBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(ReplyBody):
    prompt: str


class TokenizerReply(ReplyBody):
    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
