"""Request and reply schemas of OpenAI's Responses API: what clients send and what they are answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from shardcompute.api.body import ReplyBody, RequestPart
from shardcompute.api.generation.replies import ChosenToken
from shardcompute.api.generation.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Count,
    SamplingBody,
)
from shardcompute.api.reasoning import Effort


class InputPart(RequestPart):
    type: str = Field(
        description="`input_text`, `input_image` for models that see, `output_text` or, of thinking, "
        "`reasoning_text`; other media are refused."
    )
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(
        None, description="A data: URL; others are fetched only where the operator allows it."
    )
    file_id: str | None = Field(None, description="Refused: no files are kept here.")


class InputItem(RequestPart):
    """An item of the input, as loose as its many kinds: which fields it needs depends on `type`."""

    type: str | None = Field(
        None,
        description="`message` when left out; or `function_call`, `function_call_output`, `item_reference`, "
        "`reasoning`.",
    )
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[InputPart], Field(fail_fast=True)] | None = None


class ReasoningOptions(RequestPart):
    effort: Effort | None = Field(None, description="As reasoning_effort of chat.")
    summary: str | None = Field(None, description="Accepted and not used: thinking comes whole.")


class ResponseTool(RequestPart):
    type: str = Field(description="`function`; tools that run on a server are refused.")
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSelection(RequestPart):
    type: str
    name: str | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestPart):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Accepted and not used.")


class ResponsesRequest(SamplingBody):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = Field(None, description="Up to the end of the context when left out.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = Field(
        None, description="`message.output_text.logprobs`; others are ignored."
    )
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Given back and not used.")
    user: str | None = Field(None, description="Accepted and not used.")
    store: bool | None = Field(
        None, description="Whether to keep the response for an hour; true when left out."
    )
    previous_response_id: str | None = Field(
        None, description="A response that was kept: its conversation goes on with this input."
    )
    truncation: str | None = Field(None, description='Only "disabled".')
    background: bool | None = Field(None, description="true is refused.")
    reasoning: ReasoningOptions | None = None
    thinking_budget: int | None = Field(
        None, ge=0, lt=2**31, description="Tokens of thinking, after which the answer is begun."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the model's chat template, such as enable_thinking."
    )


class OutputText(ReplyBody):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChosenToken]


class OutputMessage(ReplyBody):
    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(ReplyBody):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class ReasoningPart(ReplyBody):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ReplyBody):
    type: Literal["reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[ReasoningPart]
    content: list[ReasoningPart]


OutputItem: TypeAlias = OutputMessage | OutputCall | OutputReasoning


class IncompleteDetails(ReplyBody):
    reason: Literal["max_output_tokens"]


class ResponsesUsage(ReplyBody):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseError(ReplyBody):
    code: str
    message: str


class ResponseReply(ReplyBody):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    metadata: dict[str, str]


class DeletedResponse(ReplyBody):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(ReplyBody):
    """One event of a stream; which fields it has depends on `type`."""

    type: str
    sequence_number: int
    response: ResponseReply | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[ChosenToken] | None = None
