"""vLLM's tokenizer routes beside OpenAI's: `/tokenize`, `/detokenize`, and what evaluation programs ask first."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.access.requirement import Access
from shardcompute.api.body import json_response, read_body
from shardcompute.api.context import context_of
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.chat_prompt import encode_messages, size_of
from shardcompute.api.generation.parameters import check_ids, choose_model
from shardcompute.api.offload import run_sized
from shardcompute.api.openai.replies import DetokenizeReply, TokenizeReply, TokenizerReply
from shardcompute.api.openai.schemas import MAX_TOKENIZED, DetokenizeRequest, TokenizeRequest
from shardcompute.api.openapi import BODY_ERRORS, ApiRoute
from shardcompute.api.reasoning.variables import template_variables


async def tokenizer_info(request: Request) -> Response:
    """Of the model named in the query, or of the only one."""
    service = context_of(request).service
    model = choose_model(service, request.query_params.get("model"))
    codec = service.codec(model.name)
    before = codec.encode("")
    eos_id = min(codec.eos_ids, default=None)
    return json_response(
        TokenizerReply(
            tokenizer_class="shardcompute",
            model_max_length=model.context_length,
            bos_token=codec.decode(before[:1], skip_special=False) if before else None,
            eos_token=None if eos_id is None else codec.decode([eos_id], skip_special=False),
            chat_template=codec.chat_template_source(),
        )
    )


async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, TokenizeRequest, context.limits)
    model = choose_model(context.service, body.model)
    codec = context.service.codec(model.name)
    prompt = body.prompt
    if prompt is not None and body.chat_template_kwargs:
        raise RequestError(
            "chat_template_kwargs are for messages, and a prompt has no template.",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    if (prompt is None) == (body.messages is None):
        raise RequestError("The request needs either prompt or messages.", param="prompt")
    if prompt is not None:
        _check_size(len(prompt), "prompt")
        ids = await run_sized(
            lambda: codec.encode(prompt, add_special=body.add_special_tokens), characters=len(prompt)
        )
    else:
        messages = body.messages or []
        _check_size(sum(map(size_of, messages)), "messages")
        ids = await encode_messages(
            codec,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            variables=template_variables(codec.chat_template_source(), body.chat_template_kwargs, None),
        )

    def word() -> Response:
        extra = {}
        if body.return_token_strs:
            extra["token_strs"] = [codec.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
        reply = TokenizeReply(count=len(ids), max_model_len=model.context_length, tokens=ids, **extra)
        return json_response(reply)

    return await run_sized(word, characters=len(ids))


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest, context.limits)
    codec = context.service.codec(choose_model(context.service, body.model).name)

    def word() -> Response:
        check_ids(codec, body.tokens, "tokens")
        return json_response(DetokenizeReply(prompt=codec.decode(body.tokens, skip_special=False)))

    return await run_sized(word, characters=len(body.tokens))


def _check_size(characters: int, param: str) -> None:
    if characters > MAX_TOKENIZED:
        message = f"{param} has {characters} characters, more than {MAX_TOKENIZED}."
        raise RequestError(message, hint="tokenize it in pieces", param=param, code="invalid_value")


TOKENS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/tokenize",
        tokenize,
        "Text or messages to token ids.",
        needs=Access.USE,
        body=TokenizeRequest,
        reply=TokenizeReply,
        statuses=BODY_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/detokenize",
        detokenize,
        "Token ids to text.",
        needs=Access.USE,
        body=DetokenizeRequest,
        reply=DetokenizeReply,
        statuses=BODY_ERRORS,
    ),
    ApiRoute(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "The tokens around a text, and how long it may be.",
        needs=Access.USE,
        reply=TokenizerReply,
        statuses=(400, 404, 503),
    ),
)
