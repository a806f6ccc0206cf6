"""A GGUF file's vocabulary as a `tokenizers.Tokenizer`.

GGUF stores no pipeline, only lists (`tokenizer.ggml.*`) and the name of a pipeline that readers are
expected to know. Two kinds are read: "gpt2" (byte-level BPE with explicit merges; `tokenizer.ggml.pre`
names how text is cut into words) and "llama" (SentencePiece BPE, where a piece's score is its merge
priority). A name that is not known here is refused: a wrong cut still produces fluent-looking ids, and
quietly worse answers.

`read_gguf_vocabulary` raises UnsupportedModelError for kinds and cuts that are not known, CorruptModelError
for lists that contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from shardcompute.core.errors import CorruptModelError, UnsupportedModelError

SPACE_MARK = "\u2581"
"""SentencePiece's visible stand-in for a space."""

_KEY = "tokenizer.ggml."


class Spelling(Enum):
    """How the text of an ordinary token stands for bytes."""

    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"


class TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What a GGUF file says about its tokens. `pipeline` adds no BOS or EOS: see `add_bos`, `add_eos`."""

    pipeline: Pipeline
    spelling: Spelling
    size: int
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a family cuts text into words before merging."""

    patterns: tuple[str, ...]
    normalizes: bool = False  # to NFC
    prefers_whole_words: bool = False  # a word that is a token is taken without merging
    adds_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN35 = rf"{_CONTRACTION}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)

_PLAIN = _Cut((_GPT2,))
_DIGITS_APART = _Cut((r"\p{N}", _GPT2))
_LLAMA3_CUT = _Cut((_LLAMA3,), prefers_whole_words=True, adds_bos=True)
_CUTS: dict[str, _Cut] = {
    # What files from before `pre` existed mean, too.
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "exaone4": _PLAIN,
    "olmo": _Cut((_GPT2,), normalizes=True),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "command-r": _Cut((r"\p{N}", _GPT2), normalizes=True),
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "falcon3": _LLAMA3_CUT,
    "falcon-h1": _LLAMA3_CUT,
    "pixtral": _LLAMA3_CUT,
    "lfm2": _LLAMA3_CUT,
    "dbrx": _Cut((_LLAMA3,)),
    "smaug-bpe": _Cut((_LLAMA3,)),
    "chatglm-bpe": _Cut((_LLAMA3,)),
    "glm4": _Cut((_LLAMA3,)),
    "qwen2": _Cut((_QWEN2,), normalizes=True),
    "deepseek-r1-qwen": _Cut((_QWEN2,)),
    "qwen35": _Cut((_QWEN35,), normalizes=True),
    "tekken": _Cut((_TEKKEN,), prefers_whole_words=True, adds_bos=True),
    "gpt-4o": _Cut((_GPT4O,)),
    "llama4": _Cut((_GPT4O,)),
    "deepseek-coder": _Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": _Cut((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """The vocabulary that `metadata` (GGUF keys and values) describes."""
    kind = metadata.get(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is of kind {kind!r}, and only 'gpt2' and 'llama' are known here",
            hint="use the model's Hugging Face folder, whose tokenizer.json describes itself",
        )
    types = _read_types(metadata)
    tokens = _read_tokens(metadata, types)
    bos_id = _read_id(metadata, "bos", tokens, usual="<s>")
    eos_ids = frozenset(
        token_id
        for name in ("eos", "eot", "eom")
        if (token_id := _read_id(metadata, name, tokens, usual="</s>" if name == "eos" else None)) is not None
    )
    if kind == "gpt2":
        cut = _choose_cut(metadata)
        pipeline, spelling, adds_bos = (
            _build_byte_level(metadata, tokens, cut),
            Spelling.BYTE_LEVEL,
            cut.adds_bos,
        )
    else:
        pipeline, spelling, adds_bos = (
            _build_sentencepiece(metadata, tokens, types),
            Spelling.SENTENCEPIECE,
            True,
        )
    special_ids = frozenset(
        token_id
        for token_id, kind_of_token in enumerate(types)
        if kind_of_token in (TokenType.CONTROL, TokenType.UNKNOWN)
    ) | (eos_ids if bos_id is None else eos_ids | {bos_id})
    _add_whole_tokens(pipeline, tokens, types, special_ids, strips_right=_strips_right(metadata))
    return GgufVocabulary(
        pipeline=pipeline,
        spelling=spelling,
        size=len(tokens),
        special_ids=special_ids,
        bos_id=bos_id,
        eos_ids=eos_ids,
        add_bos=bool(metadata.get(f"{_KEY}add_bos_token", adds_bos)) and bos_id is not None,
        add_eos=bool(metadata.get(f"{_KEY}add_eos_token", False)),
    )


def _choose_cut(metadata: Mapping[str, Any]) -> _Cut:
    name = metadata.get(f"{_KEY}pre") or "default"
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise UnsupportedModelError(
            f"how this GGUF file's tokenizer cuts text is not known here: tokenizer.ggml.pre is {name!r}",
            hint="use the model's Hugging Face folder, whose tokenizer.json describes itself",
        )
    return cut


def _build_byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], cut: _Cut) -> Pipeline:
    merges = [_split_merge(merge) for merge in _read_list(metadata, "merges", str)]
    pipeline = _build_bpe(tokens, merges, ignore_merges=cut.prefers_whole_words)
    if cut.normalizes:
        pipeline.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    bytes_last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_last])
    return pipeline


def _split_merge(merge: str) -> tuple[str, str]:
    # From the second character on, since the left part may itself be a space.
    left, gap, right = merge[1:].partition(" ")
    if not gap or not right:
        raise _corrupt(f"the merge {merge!r} is not two tokens separated by a space")
    return merge[0] + left, right


def _build_sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Pipeline:
    scores = _read_list(metadata, "scores", float, int)
    if len(scores) < len(tokens):
        raise _corrupt(f"there are {len(tokens)} tokens but {len(scores)} scores")
    if any(math.isnan(score) for score in scores):
        raise _corrupt("a score is not a number")
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None
    )
    merges = [
        (left, right)
        for *_, left, right in sorted(_ranked_merges(tokens, scores, types), key=lambda ranked: ranked[:2])
    ]
    pipeline = _build_bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    marks: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if metadata.get(f"{_KEY}add_space_prefix", True):
        # SentencePiece prefixes every stretch of text, also one that begins with a space.
        marks.insert(0, normalizers.Prepend(SPACE_MARK))
    pipeline.normalizer = normalizers.Sequence(marks)
    return pipeline


def _ranked_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> Iterator[tuple[float, int, str, str]]:
    """Every way to make a piece of two others, as (rank, tie-break, left, right); the lowest goes first."""
    mergeable = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED)
    }
    for token, score in zip(tokens, scores, strict=False):
        if token in mergeable:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in mergeable and right in mergeable:
                    yield -score, -cut, left, right


def _build_bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> Pipeline:
    try:
        return Pipeline(models.BPE({token: i for i, token in enumerate(tokens)}, merges, **options))
    except Exception as error:  # the package raises bare Exception
        raise _corrupt(f"the tokens and merges do not fit together: {error}") from error


def _add_whole_tokens(
    pipeline: Pipeline,
    tokens: Sequence[str],
    types: Sequence[int],
    special_ids: frozenset[int],
    *,
    strips_right: bool,
) -> None:
    """Make control and user-defined tokens match whole, before any cutting or merging."""
    keeps_blanks = {"<unk>", "<s>", "<|endoftext|>"}
    control = [
        AddedToken(
            tokens[i], special=True, normalized=False, rstrip=strips_right and tokens[i] not in keeps_blanks
        )
        for i in sorted(special_ids)
    ]
    user_defined = [
        AddedToken(token, special=False, normalized=False)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.USER_DEFINED and i not in special_ids
    ]
    pipeline.add_special_tokens(control)
    pipeline.add_tokens(user_defined)


def _strips_right(metadata: Mapping[str, Any]) -> bool:
    # Phi-3 swallows blanks after its control tokens; the format has no field for it, only the model's name.
    name = str(metadata.get("general.name", "")).lower()
    return metadata.get(f"{_KEY}model") == "llama" and ("phi-3" in name or "phi3" in name)


def _read_types(metadata: Mapping[str, Any]) -> list[int]:
    count = len(_read_list(metadata, "tokens", str))
    if metadata.get(f"{_KEY}token_type") is None:
        return [TokenType.NORMAL] * count
    types = _read_list(metadata, "token_type", int)
    if len(types) < count:
        raise _corrupt(f"there are {count} tokens but {len(types)} token types")
    return types[:count]


def _read_tokens(metadata: Mapping[str, Any], types: Sequence[int]) -> list[str]:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_read_list(metadata, "tokens", str))]
    if not tokens:
        raise _corrupt("the list of tokens is empty")
    if metadata[f"{_KEY}model"] == "llama":
        # User-defined tokens are looked for in the text as it comes, where a space is a space.
        tokens = [
            token.replace(SPACE_MARK, " ") if kind == TokenType.USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        ]
    first_seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if (first := first_seen.setdefault(token, i)) != i:
            raise _corrupt(f"tokens {first} and {i} are both {token!r}")
    return tokens


def _read_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str], usual: str | None) -> int | None:
    token_id = metadata.get(f"{_KEY}{name}_token_id")
    if token_id is None:
        return tokens.index(usual) if usual in tokens else None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise _corrupt(f"{name}_token_id is {token_id!r}, outside the {len(tokens)} tokens")
    return int(token_id)


def _read_list(metadata: Mapping[str, Any], name: str, *kinds: type) -> list[Any]:
    values = metadata.get(f"{_KEY}{name}")
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise _corrupt(f"the list of {name} is missing")
    for i, value in enumerate(values):
        if not isinstance(value, kinds):
            raise _corrupt(f"entry {i} of {name} is a {type(value).__name__}")
    return list(values)


def _corrupt(what: str) -> CorruptModelError:
    return CorruptModelError(
        f"the GGUF file's vocabulary contradicts itself: {what}", hint="download or convert the model again"
    )
