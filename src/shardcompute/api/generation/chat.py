"""Chat planning: from a chat request to the generations that answer it, whichever protocol it was asked in.

`open_chat` is the one way: protocols translate their bodies to a `ChatCompletionRequest` and the choices of the
`ChatPlan` to their replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from shardcompute.api.body import holding_bytes
from shardcompute.api.context import context_of
from shardcompute.api.errors import RequestError, unsupported
from shardcompute.api.generation.chat_choices import ChatChoices
from shardcompute.api.generation.chat_prompt import begun_text, encode_messages, forget_images, image_parts
from shardcompute.api.generation.parameters import (
    Plan,
    choose_model,
    naming_prompt,
    plan_generations,
    refuse_unsupported,
)
from shardcompute.api.generation.schemas import ChatCompletionRequest, NamedTool, ToolDefinition
from shardcompute.api.generation.structured import check_grammar, refused_grammar, requested_grammar
from shardcompute.api.images.showing import PictureEncoder, show_images
from shardcompute.api.offload import offload, run_sized
from shardcompute.api.reasoning import ChannelPlan, ThinkingPlan, plan_thinking, template_variables
from shardcompute.api.tools import Enforcement, Tool, ToolPlan, plan_tools
from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Grammar
from shardcompute.decoding import rule_of
from shardcompute.node.service import ServedModel, TextCodec

MAX_TOOLS_CHARS = 1 << 18
"""Of all tools of a request, as JSON: they are written into the prompt and made into a grammar."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A conversation ready to be answered."""

    body: ChatCompletionRequest
    plan: Plan
    choices: ChatChoices


async def open_chat(
    request: Request, body: ChatCompletionRequest, text: str | None = None, *, prompt_param: str = "messages"
) -> ChatPlan:
    """Everything up to the first token: checks, the prompt, and the choices to be worded.

    `text`, where given, is the prompt as it is, in the place of the messages. `prompt_param` is what the protocol calls
    them.
    """
    context = context_of(request)
    refuse_unsupported(body)
    _refuse_what_chat_lacks(body)
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    offered = _tools(body)
    tools = await _plan_tool_calls(body, offered, codec)
    held = await _plan_grammar(body, codec, tools)
    template = codec.chat_template_source(has_tools=tools is not None)
    variables = template_variables(template, body.chat_template_kwargs, body.reasoning_effort, body.thinks)
    encoder = await _show_images(request, body, model)
    with naming_prompt(prompt_param):
        if text is not None:
            prompt = await run_sized(
                lambda: codec.encode(text, context_length=model.context_length), characters=len(text)
            )
        else:
            prompt = await encode_messages(
                codec,
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=() if tools is None else offered,
                context_length=model.context_length,
                is_continued=bool(body.continue_final_message),
                variables=variables,
                encoder=encoder,
            )
    thinking = None
    if text is None:
        begun = begun_text(body.messages) if body.continue_final_message else ""
        thinking = await offload(lambda: plan_thinking(codec, template, prompt, begun))
    grammar = await _let_think(body, codec, held.grammar, thinking)
    marks = frozenset() if tools is None else tools.marks.shown_ids
    plan = plan_generations(
        model,
        codec,
        body,
        [prompt],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_param=prompt_param,
        limits=context.limits,
        grammar=grammar,
        shown_ids=marks if thinking is None else marks | thinking.shown_ids,
        pictures=() if encoder is None else encoder.pictures,
        unenforced=held.unenforced,
    )
    choices = ChatChoices(plan, tools, thinking, has_logprobs=bool(body.logprobs))
    return ChatPlan(body, plan, choices)


async def _show_images(
    request: Request, body: ChatCompletionRequest, model: ServedModel
) -> PictureEncoder | None:
    parts = image_parts(body.messages)
    if not parts:
        return None
    context = context_of(request)
    with holding_bytes(request.app.state, context.limits, sum(len(part.url) for part in parts)):
        encoder = await show_images(context.service, model, parts, context.images)
        forget_images(body.messages)
    return encoder


async def _plan_grammar(body: ChatCompletionRequest, codec: TextCodec, tools: ToolPlan | None) -> Enforcement:
    """The grammar that the answer must follow, proven to work."""
    form = requested_grammar(body)
    if tools is not None and body.ignore_eos and tools.choice == "required":
        message = "An answer that must be a call ends where the call does."
        raise RequestError(message, hint="leave ignore_eos out", param="ignore_eos", code="invalid_value")
    if form is not None:
        await check_grammar(codec, form[1], form[0])
    if tools is None:
        return Enforcement(None if form is None else form[1])
    if body.ignore_eos:
        return Enforcement(None, tuple(tool.name for tool in tools.tools))
    text_rule = None if form is None else rule_of(form[1])
    try:
        return await offload(lambda: tools.enforce(codec, text_rule))
    except UsageError as error:
        raise refused_grammar(error, "tools") from error


async def _let_think(
    body: ChatCompletionRequest,
    codec: TextCodec,
    grammar: Grammar | None,
    thinking: ThinkingPlan | ChannelPlan | None,
) -> Grammar | None:
    """The grammar with room for thinking before the answer, proven to work."""
    if thinking is None:
        return grammar
    budget = body.thinking_budget if body.max_thinking_tokens is None else body.max_thinking_tokens
    if budget is not None and body.ignore_eos:
        message = "An answer whose thinking is limited ends where the model ends it."
        raise RequestError(message, hint="leave ignore_eos out", param="ignore_eos", code="invalid_value")
    try:
        wrapped = await offload(lambda: thinking.hold(grammar, budget))
    except UsageError as error:
        raise refused_grammar(error, "thinking_budget") from error
    if wrapped is not None and wrapped != grammar:
        await check_grammar(codec, wrapped, "thinking_budget" if grammar is None else "tools")
    return wrapped


async def _plan_tool_calls(
    body: ChatCompletionRequest, tools: Sequence[Tool], codec: TextCodec
) -> ToolPlan | None:
    """What the model may call; None where it may call nothing."""
    choice = body.tool_choice or "auto"
    if isinstance(choice, NamedTool) and (choice.type != "function" or choice.function is None):
        message = f"A tool choice of type {choice.type!r} is not supported."
        raise unsupported("tool_choice", message, hint='use "none", "auto", "required" or name a function')
    if not tools or choice == "none":
        if choice in ("none", "auto"):
            return None
        message = "tool_choice asks for a call, but there are no tools."
        raise RequestError(message, hint="send tools", param="tool_choice", code="invalid_value")
    named = choice.function.name if isinstance(choice, NamedTool) and choice.function is not None else None
    if named is not None and named not in {tool.name for tool in tools}:
        message = f"tool_choice names {named!r}, which is none of the tools."
        raise RequestError(message, hint="name one of them", param="tool_choice", code="invalid_value")
    return await offload(
        lambda: plan_tools(
            codec,
            tools,
            choice="required" if choice == "required" else "auto",
            named=named,
            is_parallel=body.parallel_tool_calls is not False,
        )
    )


def _tools(body: ChatCompletionRequest) -> list[Tool]:
    tools = [_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())]
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("Two tools have the same name.", param="tools", code="invalid_value")
    size = sum(tool.size for tool in tools)
    if size > MAX_TOOLS_CHARS:
        message = f"The tools have {size} characters, more than {MAX_TOOLS_CHARS}."
        raise RequestError(message, hint="describe them more briefly", param="tools", code="invalid_value")
    return tools


def _tool(given: ToolDefinition, where: str) -> Tool:
    if given.type != "function":
        message = f"A tool of type {given.type!r} is not supported."
        raise unsupported(f"{where}.type", message, hint="send functions of your own")
    function = given.function
    if function is None:
        raise RequestError(f"{where}.function is missing.", param=f"{where}.function", code="invalid_value")
    parameters = function.parameters or {"type": "object", "properties": {}}
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        param = f"{where}.function.parameters"
        message = f"{param}: arguments are an object, and this schema has the type {kinds!r}."
        raise RequestError(message, hint='use "type": "object"', param=param, code="invalid_value")
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def _refuse_what_chat_lacks(body: ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    if None not in (lengths := {body.max_tokens, body.max_completion_tokens}) and len(lengths) > 1:
        message = "max_tokens and max_completion_tokens contradict each other."
        raise RequestError(message, hint="send one of them", param="max_completion_tokens")
