"""Tokenizer: text to token ids and back, for the tokenizers of Hugging Face folders and of GGUF files.

Decoding is by bytes: every token stands for exact bytes (`token_bytes`), and the text of ids is the UTF-8
reading of those bytes joined. So a text in pieces equals the text in one go, and SentencePiece's leading
space, which belongs to its first token, is kept. Special tokens written in a text are read as special
tokens, as chat templates need.

Raises CorruptModelError for files that contradict themselves, UnsupportedModelError for tokenizers whose
tokens do not stand for exact bytes, UsageError for text or messages that cannot be encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from tokenizers import Tokenizer as Pipeline

from shardcompute.core.errors import (
    CorruptModelError,
    PromptTooLongError,
    UnsupportedModelError,
    UsageError,
)
from shardcompute.models.chat_template import ChatTemplate
from shardcompute.models.gguf_vocabulary import SPACE_MARK, Spelling, read_gguf_vocabulary
from shardcompute.models.vocabulary import Vocabulary

_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_UNUSUAL_TOKEN_CHARS = 16
"""Text of which so many characters make a token, all in all, is not what people write: a token has about four."""
_PIECE_CHARS = 1 << 15
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What both kinds of file come down to."""

    pipeline: Pipeline
    spelling: Spelling
    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...]  # what a text begins with when special tokens are added
    suffix: tuple[int, ...]
    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]


class Tokenizer:
    """A model's tokenizer and chat template. Safe to share between threads."""

    def __init__(self, parts: _Parts) -> None:
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids | _find_turn_ends(parts.pipeline, parts.special_ids)
        self.special_ids = (
            parts.special_ids | self.eos_ids | (set() if self.bos_id is None else {self.bos_id})
        )
        self.has_chat_template = "default" in parts.templates
        self._parts = parts
        self._added = {i: token.content for i, token in parts.pipeline.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self._vocabulary: Vocabulary | None = None
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def from_hf(
        cls,
        tokenizer_json: str,
        tokenizer_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        special_tokens_map: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        model_eos: int | Sequence[int] | None = None,
    ) -> Tokenizer:
        """From what a Hugging Face folder holds. `model_eos` is the `eos_token_id` of config.json."""
        config = tokenizer_config or {}
        pipeline = _load_pipeline(tokenizer_json)
        added = pipeline.get_added_tokens_decoder()
        named = _read_named_tokens(special_tokens_map or {}) | _read_named_tokens(config)
        ids = {name: pipeline.token_to_id(text) for name, text in named.items()}
        bos_id, eos_id = ids.get("bos_token"), ids.get("eos_token")
        prefix, suffix = _find_frame(pipeline)
        if "add_bos_token" in config or "add_eos_token" in config:
            # Said outright, it overrides what tokenizer.json would add.
            prefix = (bos_id,) if config.get("add_bos_token") and bos_id is not None else ()
            suffix = (eos_id,) if config.get("add_eos_token") and eos_id is not None else ()
        eos = {
            *_read_ids((generation_config or {}).get("eos_token_id")),
            *_read_ids(model_eos),
            *_read_ids(eos_id),
        }
        templates = _read_hf_templates(config.get("chat_template"))
        return cls(
            _Parts(
                pipeline=pipeline,
                spelling=_find_spelling(pipeline),
                vocab_size=max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
                special_ids=frozenset(i for i, token in added.items() if token.special)
                | frozenset(i for i in ids.values() if i is not None),
                bos_id=prefix[0] if bos_id is None and prefix else bos_id,
                eos_ids=frozenset(eos),
                prefix=prefix,
                suffix=suffix,
                templates=templates if chat_template is None else {**templates, "default": chat_template},
                named_tokens=named,
            )
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's keys and values."""
        vocabulary = read_gguf_vocabulary(metadata)
        pipeline, bos_id = vocabulary.pipeline, vocabulary.bos_id
        eos_id = metadata.get("tokenizer.ggml.eos_token_id", min(vocabulary.eos_ids, default=None))
        named = {"bos_token": bos_id, "eos_token": eos_id}
        for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
            named[name] = metadata.get(f"tokenizer.ggml.{key}_token_id")
        texts = {name: pipeline.id_to_token(i) for name, i in named.items() if isinstance(i, int) and i >= 0}
        template_key = "tokenizer.chat_template"
        return cls(
            _Parts(
                pipeline=pipeline,
                spelling=vocabulary.spelling,
                vocab_size=vocabulary.size,
                special_ids=vocabulary.special_ids,
                bos_id=bos_id,
                eos_ids=vocabulary.eos_ids,
                prefix=(bos_id,) if vocabulary.add_bos and bos_id is not None else (),
                suffix=(eos_id,) if vocabulary.add_eos and eos_id is not None else (),
                templates={
                    key.removeprefix(template_key).removeprefix(".") or "default": source
                    for key, source in metadata.items()
                    if (key == template_key or key.startswith(f"{template_key}.")) and isinstance(source, str)
                },
                named_tokens={name: text for name, text in texts.items() if text is not None},
            )
        )

    def encode(self, text: str, *, add_special: bool = True, context_length: int | None = None) -> list[int]:
        """The ids of `text`; with `add_special`, also the BOS or EOS that the model expects around it.

        With a `context_length`, text far beyond it is a PromptTooLongError before much time is spent on it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}",
                hint="send UTF-8 text; surrogates stand for a character only in pairs",
            ) from error
        if context_length is not None and len(text) > _UNUSUAL_TOKEN_CHARS * context_length:
            self._check_fits(text, context_length)
        ids = self._encode_plain(text)
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_special else ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, without what the model expects around them."""
        encoded = self._parts.pipeline.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the tokens' bytes; U+FFFD where they are not UTF-8."""
        skipped = self.special_ids if skip_special else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token. An id without a token (models pad their vocabulary) stands for none."""
        known = self._bytes.get(token_id)
        if known is None:
            if token_id < 0:
                raise UsageError(f"{token_id} is not a token id", hint="token ids begin at 0")
            known = self._bytes[token_id] = self._spell(token_id) if token_id < self.vocab_size else b""
        return known

    def vocabulary(self) -> Vocabulary:
        """The bytes of all tokens, special ones and ends marked; always the same object."""
        if self._vocabulary is None:
            tokens = tuple(self.token_bytes(token_id) for token_id in range(self.vocab_size))
            known = frozenset(range(self.vocab_size))
            self._vocabulary = Vocabulary(tokens, frozenset(self.special_ids) & known, self.eos_ids & known)
        return self._vocabulary

    def chat_template_source(self, *, has_tools: bool = False) -> str | None:
        """The text of the template that messages are rendered with; None where there is none."""
        sources = self._parts.templates
        return sources.get("tool_use" if has_tools and "tool_use" in sources else "default")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template applied; UsageError when there is none or it refuses the messages.

        `variables` are passed on to the template, such as `enable_thinking`.
        """
        template = self._choose_template(has_tools=bool(tools))
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, context_length: int | None = None, **options: Any
    ) -> list[int]:
        """`render_chat`, then `encode_rendered`."""
        return self.encode_rendered(self.render_chat(messages, **options), context_length=context_length)

    def encode_rendered(self, rendered: str, *, context_length: int | None = None) -> list[int]:
        """What a chat template has written: begins with BOS once if the model wants it, never ends with EOS."""
        ids = self.encode(rendered, add_special=False, context_length=context_length)
        prefix = list(self._parts.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _encode_plain(self, text: str) -> list[int]:
        try:
            # Unlike `encode`, this lets other threads run: a long text would hold up heartbeats for seconds.
            ids: list[int] = self._parts.pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (
            Exception
        ) as error:  # the package raises bare Exception, such as for an unk_token that is no token
            raise CorruptModelError(
                f"the model's tokenizer cannot encode this text: {error}",
                hint="download the model's tokenizer files again",
            ) from error
        return ids

    def _check_fits(self, text: str, context_length: int) -> None:
        """Counts in pieces, until it is certain. Cutting may add a token or two to each of them, never double them."""
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            count += len(self._encode_plain(text[start : start + _PIECE_CHARS]))
            if count > 2 * context_length:
                raise PromptTooLongError(
                    f"This model's maximum context length is {context_length} tokens. However, the prompt is too "
                    f"long: it has more than {2 * context_length}.",
                    hint="shorten the prompt",
                )

    def _choose_template(self, *, has_tools: bool) -> ChatTemplate:
        sources = self._parts.templates
        name = "tool_use" if has_tools and "tool_use" in sources else "default"
        if name not in sources:
            raise UsageError(
                "this model has no chat template, so messages cannot be made into a prompt",
                hint="send a raw prompt (/v1/completions) instead, or serve an instruct model",
            )
        if name not in self._templates:
            # Compiled when first used: a model whose template is broken still completes raw prompts.
            self._templates[name] = ChatTemplate(sources[name], self._parts.named_tokens)
        return self._templates[name]

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._parts.pipeline.id_to_token(token_id) or ""
        if self._parts.spelling is Spelling.SENTENCEPIECE:
            if match := _BYTE_PIECE.fullmatch(piece):
                return bytes.fromhex(match[1])
            return piece.replace(SPACE_MARK, " ").encode()
        values = [_byte_of_character().get(character) for character in piece]
        # A token outside the byte alphabet was written as plain text.
        return piece.encode() if None in values else bytes(value for value in values if value is not None)


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


class _DescribedModel(msgspec.Struct):
    continuing_subword_prefix: str | None = None


class _Described(msgspec.Struct):
    """The little of tokenizer.json that is looked at before the `tokenizers` package sees it."""

    model: _DescribedModel


def _load_pipeline(tokenizer_json: str) -> Pipeline:
    try:
        described = msgspec.json.decode(tokenizer_json, type=_Described)
        if described.model.continuing_subword_prefix:
            # Not only no exact bytes: the package ends the whole process when such merges do not fit.
            raise UnsupportedModelError(
                "tokenizer.json marks the parts of words with a prefix, as tokenizers of encoders do",
                hint="choose a model that generates text",
            )
        pipeline = Pipeline.from_str(tokenizer_json)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise _unreadable(str(error)) from error
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline


def _unreadable(why: str) -> CorruptModelError:
    return CorruptModelError(
        f"tokenizer.json cannot be read: {why}", hint="download the model's tokenizer files again"
    )


def _find_spelling(pipeline: Pipeline) -> Spelling:
    steps = {*_step_types(pipeline.decoder), *_step_types(pipeline.pre_tokenizer)}
    if "ByteLevel" in steps:
        return Spelling.BYTE_LEVEL
    if steps & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    raise UnsupportedModelError(
        f"the tokenizer is neither byte-level nor SentencePiece: {', '.join(sorted(steps)) or 'no steps'}",
        hint="choose a model whose tokens stand for exact bytes, as those of text generators do",
    )


def _step_types(step: Any) -> Iterable[str]:
    if step is None:
        return
    waiting = [json.loads(step.__getstate__())]
    while waiting:
        described = waiting.pop()
        yield described["type"]
        waiting += described.get("decoders", []) + described.get("pretokenizers", [])


def _find_frame(pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tokenizer.json puts before and after a text."""
    try:
        framed = pipeline.encode("a", add_special_tokens=True)
        bare = pipeline.encode("a", add_special_tokens=False)
    except BaseException as error:
        # A panic of the package is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _unreadable(f"a text cannot be encoded: {error}") from error
    start = framed.special_tokens_mask.index(0) if bare.ids else len(framed.ids)
    return tuple(framed.ids[:start]), tuple(framed.ids[start + len(bare.ids) :])


def _find_turn_ends(pipeline: Pipeline, special_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer by convention, where the vocabulary holds them to be special."""
    found = {text: i for text in _TURN_ENDS if (i := pipeline.token_to_id(text)) in special_ids}
    if "<|return|>" in found and "<|call|>" in found:
        # In this format <|end|> separates the parts of one answer.
        found.pop("<|end|>", None)
    return frozenset(i for i in found.values() if i is not None)


def _read_named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _read_ids(value: object) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _read_hf_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, Mapping)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
