"""Log-probabilities of a chat's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from shardcompute.api.generation.replies import ChatLogprobs, ChosenToken, RankedToken
from shardcompute.core.generation import TokenChoice
from shardcompute.node.service import TextCodec

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def chat_logprobs(codec: TextCodec, tokens: Sequence[TokenChoice]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chosen(codec, choice) for choice in tokens])


def _chosen(codec: TextCodec, choice: TokenChoice) -> ChosenToken:
    ranked = [_ranked(codec, token_id, value) for token_id, value in choice.alternatives]
    own = codec.token_bytes(choice.id)
    return ChosenToken(
        token=own.decode("utf-8", "replace"),
        logprob=LOWEST_LOGPROB if choice.logprob is None else finite(choice.logprob),
        bytes=list(own),
        top_logprobs=ranked,
    )


def _ranked(codec: TextCodec, token_id: int, logprob: float) -> RankedToken:
    own = codec.token_bytes(token_id)
    return RankedToken(token=own.decode("utf-8", "replace"), logprob=finite(logprob), bytes=list(own))


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
