"""Request and reply schemas of Ollama's API: what clients send and what they are answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardcompute.api.body import ReplyBody, RequestBody, RequestPart
from shardcompute.api.generation.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    StopText,
    StopTexts,
)
from shardcompute.api.images.sources import MAX_IMAGES


class Options(BaseModel):
    """Ollama's names. What is not listed concerns the loading of models and is ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    num_predict: int | None = Field(
        None, ge=-2, lt=2**31, description="-1 and -2: up to the end of the context."
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0.8 when left out.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="40 when left out.")
    top_p: float | None = Field(None, ge=0, le=1, description="0.9 when left out.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | StopTexts | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=10, description="1, which changes nothing.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    mirostat: int | None = Field(None, description="Only 0.")
    typical_p: float | None = Field(None, description="Only 1.")
    tfs_z: float | None = Field(None, description="Only 1.")


class OllamaRequest(RequestBody):
    stream: bool | None = Field(None, description="true when left out.")
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="`json` or a JSON schema.")
    keep_alive: str | int | float | None = Field(None, description="Accepted and not used.")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="Whether to think, or how much; as the model's template does when left out."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


Images = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_IMAGES)]


class OllamaFunction(RequestPart):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(RequestPart):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(RequestPart):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Images | None = Field(None, description="As base64, for models that see.")
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    prompt: str = ""
    suffix: str | None = Field(None, description="Refused.")
    system: str | None = None
    template: str | None = Field(None, description="Refused.")
    raw: bool | None = Field(None, description="Without the chat template.")
    images: Images | None = Field(None, description="As base64, for models that see.")
    thinking: str | None = None
    context: Any = Field(None, description="Refused: send the conversation to /api/chat.")


class ModelName(RequestBody):
    name: str | None = Field(None, description="The older name of model.")


class OllamaTimes(ReplyBody):
    """When and for how long, in nanoseconds as Ollama has it."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaReplyMessage(ReplyBody):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatReply(OllamaTimes):
    """A whole answer, and each line of a streamed one."""

    message: OllamaReplyMessage


class OllamaGenerateReply(OllamaTimes):
    """A whole answer, and each line of a streamed one."""

    response: str
    thinking: str | None = None


class OllamaError(ReplyBody):
    error: str


class ModelDetails(ReplyBody):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(ReplyBody):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class RunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(ReplyBody):
    models: list[OllamaModel]


class RunningModels(ReplyBody):
    models: list[RunningModel]


class OllamaModelReply(ReplyBody):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
    digest: str
    size: int


class PullReply(ReplyBody):
    status: Literal["success"]


class OllamaVersion(ReplyBody):
    version: str
