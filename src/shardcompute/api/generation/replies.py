"""The bodies that we answer with, in OpenAI's shapes (and vLLM's for `/tokenize` and `/detokenize`).

They are written out with `exclude_unset`: a field appears, null or not, exactly when it was given.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ReplyBody(BaseModel):
    model_config = ConfigDict(frozen=True)

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(ReplyBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ReplyBody):
    error: ErrorDetail


class ModelObject(ReplyBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ReplyBody):
    object: Literal["list"]
    data: list[ModelObject]


class PromptTokensDetails(ReplyBody):
    cached_tokens: int = 0


class Usage(ReplyBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


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
    wire_s: float = 0.0
    stage_queue_s: float = 0.0
    codec_s: float = 0.0
    compute_s: float = 0.0
    draft_s: float = 0.0
    bytes_per_token: float = 0.0
    codecs: list[str] = []


class RankedToken(ReplyBody):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(ReplyBody):
    content: list[ChosenToken]


class CalledFunction(ReplyBody):
    name: str
    arguments: str


class CalledTool(ReplyBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ReplyBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(ReplyBody):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ReplyBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsReply | None = None


class CalledFunctionDelta(ReplyBody):
    name: str | None = None
    arguments: str | None = None


class CalledToolDelta(ReplyBody):
    """The first of a call has its id and its function's name, the others pieces of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta | None = None


class ChatDelta(ReplyBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledToolDelta] | None = None


class ChatChunkChoice(ReplyBody):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(ReplyBody):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: TimingsReply | None = None


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


class TokenizeReply(ReplyBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(ReplyBody):
    prompt: str


class HealthReply(ReplyBody):
    status: Literal["ok", "loading"]
    reason: str | None = None


class VersionReply(ReplyBody):
    version: str
