"""Request schemas of generations: sampling and stop parameters, and the chat request that protocols translate to.

Their names are OpenAI's, with vLLM's beside them. Fields that we do not list are ignored, as other servers do, unless
ignoring them would silently change the answer; those are in `parameters.REFUSED`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from shardcompute.api.body import RequestBody, RequestPart
from shardcompute.api.reasoning import Effort
from shardcompute.core.generation import MAX_STOP_CHARS, MAX_STOPS

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_TOP_LOGPROBS = 20

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _check_stops(stops: list[str]) -> list[str]:
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        message = "Stop strings should have at most {most} characters together"
        raise PydanticCustomError("too_long", message, {"most": MAX_STOP_CHARS})
    return stops


StopTexts = Annotated[
    list[StopText], Field(fail_fast=True, max_length=MAX_STOPS), AfterValidator(_check_stops)
]


class StreamOptions(RequestPart):
    include_usage: bool | None = None


class SpeculationOptions(BaseModel):
    """Not OpenAI's: how drafts may speed up the answer. They never change it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    drafter: Literal["auto", "off", "ngram", "model", "head"] = "auto"
    tokens: int | None = Field(None, ge=1, le=16, description="Drafted tokens in a frame.")
    frames: int | None = Field(None, ge=1, le=8, description="Frames on their way at once.")


Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=4096)
]
SchemaText = dict[str, Any] | str


class StructuredOutputs(BaseModel):
    """vLLM's: the form of the answer, in one of these ways."""

    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)

    json_: SchemaText | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None


class SamplingBody(RequestBody):
    """How tokens are picked and where answers stop, by the names that all of OpenAI's routes take."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 when left out.")
    top_p: float | None = Field(None, ge=0, le=1, description="0: the likeliest token alone.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id, written as a string, to what is added to its logit."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The server picks one when left out.")
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    speculation: SpeculationOptions | None = None
    cache_salt: str | None = Field(
        None,
        max_length=256,
        description="Prompts' beginnings are shared only with requests of the same salt.",
    )


SAMPLING_FIELDS = frozenset(SamplingBody.model_fields) - {"model"}


class GenerationBody(SamplingBody):
    """What chat and plain completions have in common."""

    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = Field(None, description="A JSON schema that the answer follows.")
    guided_regex: str | None = Field(None, description="A regular expression that the whole answer matches.")
    guided_choice: Choices | None = Field(None, description="Texts of which the answer is one.")
    json_schema: SchemaText | None = Field(None, description="Another name of guided_json.")
    user: str | None = Field(None, description="Accepted and not used.")


class ImageUrl(RequestPart):
    url: str = Field(description="A data: URL; others are fetched only where the operator allows it.")
    detail: str | None = Field(None, description="Accepted and not used.")


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str = Field(
        description="`text`, `image_url` for models that see, or `refusal` of the assistant's; other kinds are refused."
    )
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None

    @property
    def is_image(self) -> bool:
        return self.type == "image_url"


class FunctionCall(RequestPart):
    name: str
    arguments: str


class ToolCall(RequestPart):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestPart):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    refusal: str | None = Field(None, description="What the assistant said instead of content.")
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, description="Of a tool's message: the call that it answers.")
    reasoning_content: str | None = Field(
        None, description="What the assistant thought; the template decides."
    )
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")

    @property
    def thought(self) -> str | None:
        """What the assistant thought before it said this."""
        return (self.reasoning_content or self.reasoning) if self.role == "assistant" else None


class JsonSchemaFormat(RequestPart):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Accepted and not used: schemas are always enforced.")


class ResponseFormat(RequestPart):
    type: str = Field(description="`text`, `json_object` or `json_schema`.")
    json_schema: JsonSchemaFormat | None = None


class FunctionDefinition(RequestPart):
    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Refuse a schema that cannot be enforced as a whole.")


class ToolDefinition(RequestPart):
    type: str = Field(description="`function`; other kinds are refused.")
    function: FunctionDefinition | None = None


class NamedFunction(RequestPart):
    name: str


class NamedTool(RequestPart):
    type: str = Field(description="`function`; other kinds are refused.")
    function: NamedFunction | None = None


class ChatCompletionRequest(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = Field(None, description="Up to the end of the context when left out.")
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None,
        description="Go on with the last message, an assistant's that was cut off; only what is new is answered.",
    )
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="`auto` when left out: the model decides."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the model's chat template, such as enable_thinking."
    )
    reasoning_effort: Effort | None = Field(
        None, description="Given to the template; `none` and `minimal` ask it not to let the model think."
    )
    thinks: bool | None = Field(
        None, description="Whether to think, by whatever name the model's template knows it."
    )
    thinking_budget: int | None = Field(
        None, ge=0, lt=2**31, description="Tokens of thinking, after which the answer is begun."
    )
    max_thinking_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Another name of thinking_budget."
    )
