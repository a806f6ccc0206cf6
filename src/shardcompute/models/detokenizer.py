"""Detokenizer: token ids to text, as they arrive.

The text is that of the tokens' exact bytes, decoded as UTF-8 with a decoder that keeps an unfinished
character until its last byte comes. So nothing is ever shown and taken back, a U+FFFD appears only for
bytes that can no longer become a character, and the pieces joined equal `Tokenizer.decode` of all ids.
Generated text continues a prompt: the space with which SentencePiece begins a word is kept, also at the
very start. Each token costs its own bytes only.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenSpelling(Protocol):
    """As much of a tokenizer as turning ids into text needs."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class StreamingDetokenizer:
    """One generation's text. Not to be shared between generations."""

    __slots__ = ("_decoder", "_skipped_ids", "_tokenizer")

    def __init__(
        self,
        tokenizer: TokenSpelling,
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Special tokens are left out of the text, but for `shown_ids`."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids - shown_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is unfinished."""
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got its last byte. Then ready for a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
