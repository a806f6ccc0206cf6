"""From picked tokens to the text of an answer: detokeniser, stop rules, and how it ended."""

from __future__ import annotations

from shardcompute.core.generation import Delta, FinishReason, GenerationRequest, TokenChoice
from shardcompute.decoding import StopMatcher
from shardcompute.models.detokenizer import StreamingDetokenizer
from shardcompute.models.tokenizer import Tokenizer


class AnswerText:
    """One generation's text so far. `push` is given tokens in order until `finish` is set."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = StreamingDetokenizer(tokenizer, shown_ids=request.shown_ids)
        self._stops = StopMatcher(request.stop, request.include_stop) if request.stop else None
        self.count = 0
        self.finish: FinishReason | None = None

    def push(self, choice: TokenChoice) -> Delta:
        self.count += 1
        if choice.id in self._request.stop_ids:
            self.finish = "stop"
            return Delta(self._flush(), (choice,), finish=self.finish)
        text = self._detokenizer.push(choice.id)
        if self._stops is not None:
            result = self._stops.push(text)
            text = result.text
            if result.matched:
                self.finish = "stop"
        if self.finish is None and self.count >= self._request.max_tokens:
            self.finish = "length"
            text += self._flush()
        return Delta(text, (choice,), finish=self.finish)

    def _flush(self) -> str:
        """What was held back: an unfinished character, a possible stop string that never completed."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        result = self._stops.push(rest)
        if result.matched:
            self.finish = "stop"
            return result.text
        return result.text + self._stops.finish()
