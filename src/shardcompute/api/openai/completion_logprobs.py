"""Log-probabilities of plain completions: parallel lists, beside chat's objects in `generation.logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from shardcompute.api.generation.logprobs import finite
from shardcompute.api.openai.replies import CompletionLogprobs
from shardcompute.core.generation import TokenChoice
from shardcompute.node.service import TextCodec


class CompletionRecorder:
    """Writes the tokens of one choice, chunk after chunk, keeping count of where in the text they start."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def record(self, tokens: Iterable[TokenChoice]) -> CompletionLogprobs:
        names: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for choice in tokens:
            names.append(_name(self._codec, choice.id))
            logprobs.append(None if choice.logprob is None else finite(choice.logprob))
            tops.append(self._top(choice))
            offsets.append(self._offset)
            self._offset += self._width(choice.id)
        return CompletionLogprobs(
            tokens=names, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets
        )

    def _top(self, choice: TokenChoice) -> dict[str, float] | None:
        """The most likely tokens and the chosen one; the first token of a prompt has neither."""
        if choice.logprob is None:
            return None
        ranked = {_name(self._codec, token_id): finite(value) for token_id, value in choice.alternatives}
        return ranked | {_name(self._codec, choice.id): finite(choice.logprob)}

    def _width(self, token_id: int) -> int:
        """Characters that this token completes; special tokens are not part of the text."""
        if self._codec.decode([token_id], skip_special=False) != self._codec.decode([token_id]):
            return 0
        return len(self._utf8.decode(self._codec.token_bytes(token_id)))


def _name(codec: TextCodec, token_id: int) -> str:
    """The token's text, or OpenAI's `bytes:\\xe2\\x80` for a piece of a character."""
    own = codec.token_bytes(token_id)
    try:
        return own.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
