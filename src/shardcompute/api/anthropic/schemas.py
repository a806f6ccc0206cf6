"""Request and reply schemas of Anthropic's Messages API: what clients send and what they are answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from shardcompute.api.body import ReplyBody, RequestBody, RequestPart
from shardcompute.api.generation.schemas import MAX_MESSAGES, MAX_TOOLS, Count, StopTexts
from shardcompute.api.reasoning import Effort


class ImageSource(RequestPart):
    type: str = Field(description="`base64`, or `url` where the operator allows it.")
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ContentBlock(RequestPart):
    """A content block, as loose as its many kinds: which fields it needs depends on `type`."""

    type: str = Field(
        description="`text`, `image` for models that see, `thinking`, `tool_use` or `tool_result`; other media are "
        "refused."
    )
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


class InputMessage(RequestPart):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class MessageTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    type: str | None = Field(None, description="`custom`; tools that run on a server are refused.")
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(RequestPart):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestPart):
    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="As far as the model's chat template has a switch; `adaptive`: as it does by itself."
    )
    budget_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Tokens of thinking, after which the answer is begun."
    )


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestPart):
    format: OutputFormat | None = None
    effort: Effort | None = Field(None, description="As reasoning_effort of chat.")


class CountRequest(RequestBody):
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    max_tokens: Count
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, description="1 when left out.")
    top_p: float | None = Field(None, ge=0, le=1, description="0: the likeliest token alone.")
    top_k: int | None = Field(None, ge=0, lt=2**31)
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    service_tier: str | None = Field(None, description="Accepted and not used.")


class MessagesError(ReplyBody):
    class Detail(ReplyBody):
        type: str
        message: str

    type: Literal["error"]
    error: Detail
    request_id: str | None = None


class MessagesUsage(ReplyBody):
    """A prompt's tokens are the sum of the three counts of input; nothing is charged for being cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(ReplyBody):
    type: Literal["text"]
    text: str


class ThinkingBlock(ReplyBody):
    """The signature is a hash of the thinking; it need not come back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(ReplyBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageReply(ReplyBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ReplyBody):
    input_tokens: int


class TextDelta(ReplyBody):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ReplyBody):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ReplyBody):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(ReplyBody):
    type: Literal["input_json_delta"]
    partial_json: str


class MessageEnd(ReplyBody):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageEvent(ReplyBody):
    """One event of a stream; which fields it has depends on `type`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageReply | None = None
    index: int | None = None
    content_block: ReplyBlock | None = None
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta | MessageEnd | None = None
    usage: MessagesUsage | None = None
