"""Grammar masks: which tokens can still lead to an answer of the wanted form.

A `GrammarCompiler` belongs to a vocabulary and turns a `Grammar` into the state of one answer. That state is a
pure function of the answer's tokens so far: it is advanced by them and taken back with them (`truncate`), so that
drafts, batches and replays after a failure meet the same masks. A token that the grammar forbids cannot have been
picked, so it was drafted and the rows behind it will be thrown away: they are not masked at all. The end of an
answer is allowed exactly where the grammar may end, and nothing else is once it must.

Grammars come from strangers. Their text is limited here, and what they may cost while they are compiled and for
each mask is limited in steps and states by the library that computes the masks. That is imported with the first of
them: most processes never see one.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_CHARS, Grammar
from shardcompute.decoding.grammar.costs import JSON_RULE, excess_of
from shardcompute.decoding.grammar.json_schemas import close_objects
from shardcompute.models.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

log = logging.getLogger(__name__)
Logits = npt.NDArray[np.float32]
_KEPT_GRAMMARS = 16
_KEPT_RULES, _KEPT_RULE_CHARS = 256, 16_384
_REASON_CHARS = 400
_PREFIX = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
# Every way to cut the text into tokens is allowed: the model knows better than a rule which one it was taught.
_HEADER = '%llguidance {"no_forcing": true}\n'
# JSON in one line: a space behind a separator or none, as the model was taught, and no other gaps. Indented answers
# have twice the tokens, and a model that has nothing to say would fill gaps for ever.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarCompiler:
    """Grammars over one vocabulary. Methods may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_ids:
            raise UsageError(
                "this model has no token that ends an answer, so no grammar can hold it to a form",
                hint="ask without response_format and tools",
            )
        from llguidance import LLTokenizer, TokenizerWrapper

        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Spelling(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=sorted(vocabulary.eos_ids),
        )
        self._eos = sorted(vocabulary.eos_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar) -> GrammarState:
        """The state before the first token of an answer; UsageError where the grammar is wrong or asks too much."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                compiled = self._compile(grammar)
            self._compiled[grammar] = compiled
            while len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarState(compiled.deep_copy(), self._eos)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise _refused(f"it has {len(grammar.text)} characters, more than {MAX_GRAMMAR_CHARS}")
        if len(zlib.compress(grammar.text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
            raise _refused(f"compressed it has more than {MAX_GRAMMAR_BYTES} bytes")
        if (excess := excess_of(grammar)) is not None:
            raise _refused(excess)
        try:
            matcher = LLMatcher(self._tokenizer, _lark_of(grammar), log_level=0, limits=_limits())
            # One that nothing can satisfy, or that is far too complex, may show with its first mask only.
            probe = matcher.deep_copy()
            if not matcher.is_error() and not probe.is_error():
                probe.compute_bitmask()
        except BaseException as error:
            # A panic of the package is no Exception, and its class cannot be imported.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise _refused(str(error)[:_REASON_CHARS]) from error
        if matcher.is_error():
            raise _refused(_reason_of(matcher.get_error()))
        if probe.is_error():
            raise _refused("no text satisfies it, or it is too complex")
        return matcher


class GrammarState:
    """Where one answer stands in its grammar, after the first `len(state)` tokens of it."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._eos = eos_ids
        self._tokens: list[int] = []
        self._valid = 0
        """So many of the first tokens are what the grammar allows; a draft may have strayed from it."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def has_warnings(self) -> bool:
        """Whether the grammar leaves something of its schemas to the model."""
        return any(self._fresh.get_grammar_warnings())

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here. Tokens of an answer's end are not part of it."""
        return self._valid == len(self._tokens) and self._matcher.is_accepting()

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens follow."""
        if tokens and self._valid == len(self._tokens):
            self._valid += self._matcher.try_consume_tokens(list(tokens))
        self._tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens count."""
        del self._tokens[length:]
        if self._matcher.is_error() or (
            length < self._valid and not self._matcher.rollback(self._valid - length)
        ):
            # An error is for ever, and it may have come from a draft.
            self._matcher = self._fresh.deep_copy()
            self._valid = self._matcher.try_consume_tokens(self._tokens)
        self._valid = min(self._valid, length)

    def mask(self, logits: Logits) -> Logits:
        """The logits with those of forbidden tokens at -inf; as they are behind a token that was forbidden."""
        if self._valid < len(self._tokens) and not self._matcher.is_error():
            return logits
        bits = self._matcher.compute_bitmask()
        allowed = np.zeros(logits.size, dtype=np.bool_)
        if self._matcher.is_stopped():
            allowed[[token for token in self._eos if token < logits.size]] = True
        else:
            known = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[: logits.size]
            allowed[: known.size] = known
        if self._matcher.is_error():
            # Too complex after all: the answer ends here, incomplete, and the others of this batch go on.
            log.info("a grammar broke off an answer: %s", _reason_of(self._matcher.get_error()))
        return np.where(allowed, logits, np.float32(-np.inf))


def compiler_of(vocabulary: Vocabulary) -> GrammarCompiler:
    """The one compiler of a vocabulary in this process; it is made when it is first needed."""
    with _COMPILERS_LOCK:
        compiler = _COMPILERS.get(vocabulary)
        if compiler is None:
            compiler = _COMPILERS[vocabulary] = GrammarCompiler(vocabulary)
        return compiler


_COMPILERS: WeakKeyDictionary[Vocabulary, GrammarCompiler] = WeakKeyDictionary()
_COMPILERS_LOCK = threading.Lock()


class _Spelling:
    """A vocabulary as the library reads it. It never has to encode text, since it is told not to force tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids | vocabulary.eos_ids)

    def __call__(self, text: bytes) -> list[int]:
        return []


def _lark_of(grammar: Grammar) -> str:
    return _HEADER + (grammar.text if grammar.kind == "lark" else f"start: {rule_of(grammar)}\n")


def rule_of(grammar: Grammar) -> str:
    """The right side of a Lark rule that stands for a grammar of any kind but Lark's own."""
    if grammar.kind == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(grammar.text, 'dw')}/"
    if grammar.kind == "json_schema":
        return json_rule(json.loads(grammar.text))
    if grammar.kind == "choice":
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
    raise ValueError("a Lark grammar is no single rule")


def json_rule(schema: object, *, is_lenient: bool = False) -> str:
    """The right side of a Lark rule that stands for JSON of this schema, without undeclared keys (see `json_schemas`).
    `is_lenient`: what of it cannot be enforced is left to the model, instead of being refused."""
    schema = close_objects(schema)
    if isinstance(schema, dict):
        options = {**_JSON_OPTIONS, "lenient": is_lenient, "coerce_one_of": is_lenient}
        schema = {**schema, "x-guidance": options}
    return JSON_RULE + json.dumps(schema)


def check_rule(rule: str) -> bool:
    """Whether the right side of a Lark rule leaves nothing of its schema to the model; UsageError where it is wrong.
    What it costs to follow shows only where it is compiled."""
    has_failed, messages = (_checked if len(rule) <= _KEPT_RULE_CHARS else _checked.__wrapped__)(rule)
    if has_failed:
        raise _refused(_reason_of(messages[0] if messages else ""))
    return not any(messages)


@lru_cache(_KEPT_RULES)
def _checked(rule: str) -> tuple[bool, tuple[str, ...]]:
    if (excess := excess_of(Grammar("lark", rule))) is not None:
        return True, (excess,)
    from llguidance import LLMatcher

    has_failed, messages = LLMatcher.validate_grammar_with_warnings(f"{_HEADER}start: {rule}\n")
    return has_failed, tuple(messages)


def _limits() -> LLParserLimits:
    """A tenth of a second to compile and a few milliseconds for a mask, on a slow core."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _reason_of(error: str) -> str:
    """What the library says, without the place in a text that is ours and the quotes below it."""
    first, *others = error.split("<")[0].splitlines() or [""]
    if "coerce_one_of" in first:
        return "branches of oneOf may overlap, which cannot be prevented; use anyOf"
    reasons = [_PREFIX.sub("", first)] + [
        line.removeprefix("error: ") for line in others if "error: " in line
    ]
    return " ".join(reasons).strip()[:_REASON_CHARS] or "it is too complex"


def _refused(why: str) -> UsageError:
    return UsageError(f"The grammar cannot be used: {why}.", hint="simplify the schema or the expression")
