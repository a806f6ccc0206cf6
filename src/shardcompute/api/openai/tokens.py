"""vLLM's tokenizer routes beside OpenAI's: `/tokenize`, `/detokenize`, and what evaluation programs ask first."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.body import json_response, read_body
from shardcompute.api.context import context_of, run_codec
from shardcompute.api.errors import RequestError
from shardcompute.api.generation.chat_prompt import encode_messages
from shardcompute.api.generation.parameters import check_ids, choose_model
from shardcompute.api.openai.replies import DetokenizeReply, TokenizeReply, TokenizerReply
from shardcompute.api.openai.schemas import DetokenizeRequest, TokenizeRequest
from shardcompute.api.openapi import BODY_ERRORS, ApiRoute


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
    if (prompt is None) == (body.messages is None):
        raise RequestError("The request needs either prompt or messages.", param="prompt")
    if prompt is not None:
        ids = await run_codec(
            lambda: codec.encode(prompt, add_special=body.add_special_tokens), characters=len(prompt)
        )
    else:
        ids = await encode_messages(
            codec, body.messages or [], add_generation_prompt=body.add_generation_prompt
        )
    extra = {}
    if body.return_token_strs:
        extra["token_strs"] = [codec.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
    reply = TokenizeReply(count=len(ids), max_model_len=model.context_length, tokens=ids, **extra)
    return json_response(reply)


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest, context.limits)
    codec = context.service.codec(choose_model(context.service, body.model).name)
    check_ids(codec, body.tokens, "tokens")
    return json_response(DetokenizeReply(prompt=codec.decode(body.tokens, skip_special=False)))


TOKENS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST",
        "/tokenize",
        tokenize,
        "Text or messages to token ids.",
        body=TokenizeRequest,
        reply=TokenizeReply,
        statuses=BODY_ERRORS,
    ),
    ApiRoute(
        "POST",
        "/detokenize",
        detokenize,
        "Token ids to text.",
        body=DetokenizeRequest,
        reply=DetokenizeReply,
        statuses=BODY_ERRORS,
    ),
    ApiRoute(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "The tokens around a text, and how long it may be.",
        reply=TokenizerReply,
        statuses=(400, 404, 503),
    ),
)
