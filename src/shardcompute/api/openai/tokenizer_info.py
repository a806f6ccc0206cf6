"""vLLM's `/tokenizer_info`: what evaluation programs ask before they count tokens themselves."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from shardcompute.api.context import context_of
from shardcompute.api.generation.answer import json_response
from shardcompute.api.generation.parameters import choose_model
from shardcompute.api.generation.replies import ReplyBody
from shardcompute.api.openapi import ApiRoute


class TokenizerReply(ReplyBody):
    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


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


TOKENIZER_ENDPOINTS: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "The tokens around a text, and how long it may be.",
        reply=TokenizerReply,
        statuses=(400, 404, 503),
    ),
)
