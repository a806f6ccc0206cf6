"""Draft model: a small one that drafts for a large one, beside the driver.

Any model with the same vocabulary will do. It keeps KV of its own for each session, as much as its budget allows,
and picks with the session's own sampling, seed and positions: where both models think alike they draw alike, at any
temperature. How sure it is of itself becomes the draft's grade. It may be asked to go on while frames travel
(`propose_while`), and leaves it at that as soon as somebody waits.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import DenseMatrix
from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.core.generation import TokenChoice
from shardcompute.core.settings import Settings
from shardcompute.core.steps import Draft, Opening, SessionRows
from shardcompute.decoding.drafting import Drafter, IsWanted, grade_of
from shardcompute.models.spec import whole
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

_UNSURE = 0.2
"""A token whose best alternative is less likely than this, for the small model, ends the draft before it."""
_KV_FRACTION = 0.05
_GRADE_BOUNDS = (0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class DraftModelLimits:
    """`vocab_size` and `target_vocab_size` are the models' (which may pad the tokenizer's); `end_ids` end a draft."""

    vocab_size: int
    target_vocab_size: int
    context_length: int
    max_rows: int = 256
    end_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class _DraftSession:
    tokens: list[int] = field(default_factory=list)
    """Those that its KV holds."""
    certain: int = 0
    """So many of them were known, not assumed, and stay."""


class ModelDrafter:
    """A `Drafter` over a whole model in this process. `forget` may be called at any time from any thread."""

    name = "model"
    is_slow = True

    def __init__(self, executor: Executor, limits: DraftModelLimits) -> None:
        self._stage = StageRuntime(executor, is_first=True, is_last=True)
        self._limits = limits
        self._sessions: OrderedDict[int, _DraftSession] = OrderedDict()
        """Least recently used first."""
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()

    def propose(
        self, session: int, known: Sequence[int], assumed: Sequence[int], limit: int, opening: Opening
    ) -> Draft | None:
        """May take long for a session's first draft, which computes its whole prompt. Raises BackendError."""
        return self.propose_while([*known, *assumed], len(known), limit, opening, lambda: True)

    def propose_while(
        self, tokens: Sequence[int], known: int, limit: int, opening: Opening, is_wanted: IsWanted
    ) -> Draft | None:
        session = opening.session
        limits = self._limits
        # The last drafted token is never computed, so it may lie just past the context.
        limit = min(limit, limits.context_length - len(tokens) + 1)
        if limit < 1 or not tokens or max(tokens) >= limits.vocab_size:
            return None
        with self._lock:
            self._drop_ended()
            try:
                return self._draft(list(tokens), known, limit, self._fitting(opening), is_wanted)
            except CapacityError:
                self._drop(session)
                return None

    def forget(self, session: int) -> None:
        # A draft may be under way, and whoever tells us must not wait for it.
        self._ended.append(session)

    def held_sessions(self) -> list[int]:
        """Those that hold KV, least recently used first."""
        with self._lock:
            return list(self._sessions)

    def close(self) -> None:
        with self._lock:
            self._sessions.clear()
            self._stage.close()

    def _draft(
        self, tokens: list[int], known: int, limit: int, opening: Opening, is_wanted: IsWanted
    ) -> Draft | None:
        session = opening.session
        choice = self._catch_up(session, tokens, known, opening)
        ids: list[int] = []
        sureness = 0.0
        while choice.id < self._limits.target_vocab_size:
            likelihood = choice.alternatives[0][1]
            if ids and likelihood < math.log(_UNSURE):
                break
            ids.append(choice.id)
            sureness += likelihood
            if len(ids) == limit or choice.id in self._limits.end_ids or not is_wanted():
                break
            choice = self._step(session, (choice.id,), opening)
        if not ids:
            return None
        grade = grade_of(math.exp(sureness / len(ids)), _GRADE_BOUNDS)
        return Draft(session, len(tokens), tuple(ids), grade)

    def _catch_up(self, session: int, tokens: list[int], known: int, opening: Opening) -> TokenChoice:
        """Compute what the session's KV lacks, from the first token that differs; the pick after the last one."""
        state = self._sessions.setdefault(session, _DraftSession())
        self._sessions.move_to_end(session)
        same = min(state.certain, len(state.tokens))
        while same < min(len(state.tokens), len(tokens)) and state.tokens[same] == tokens[same]:
            same += 1
        start = min(same, len(tokens) - 1)
        del state.tokens[start:]
        state.certain = min(known, start)
        choice: TokenChoice | None = None
        while choice is None or len(state.tokens) < len(tokens):
            first = len(state.tokens)
            choice = self._step(session, tuple(tokens[first : first + self._limits.max_rows]), opening)
        state.certain = known
        return choice

    def _step(self, session: int, ids: tuple[int, ...], opening: Opening) -> TokenChoice:
        """Extend a session; where memory lacks, those that were not used for long give theirs."""
        state = self._sessions[session]
        start = len(state.tokens)
        work = [SessionRows(session, start, ids, logit_rows=1)]
        while True:
            try:
                picked = self._stage.step(work, [opening] if start == 0 else [], None)
                break
            except CapacityError:
                oldest = next(iter(self._sessions))
                if oldest == session:
                    raise
                self._drop(oldest)
        state.tokens += ids
        if not isinstance(picked, list):
            raise UsageError("a draft model must be whole, so that it picks tokens")
        return picked[-1].choice

    def _fitting(self, opening: Opening) -> Opening:
        """The opening for this model: with the best token's likelihood, and biases for tokens that it has."""
        bias = {i: amount for i, amount in opening.sampling.logit_bias.items() if i < self._limits.vocab_size}
        sampling = replace(opening.sampling, logprobs=1, logit_bias=bias)
        return Opening(opening.session, sampling, opening.prompt_length)

    def _drop_ended(self) -> None:
        while self._ended:
            self._drop(self._ended.popleft())

    def _drop(self, session: int) -> None:
        if self._sessions.pop(session, None) is not None:
            self._stage.close_sessions([session])


def open_draft_model(
    reference: str,
    settings: Settings,
    *,
    target: Tokenizer,
    target_vocab_size: int,
    options: ExecutorOptions,
    backend: str = "onnx",
    form: str | None = None,
    progress: Progress | None = None,
) -> ModelDrafter:
    """Fetch and load a model that drafts for one with the tokenizer `target`; UsageError where vocabularies differ.

    `options.kv_bytes` bounds the KV of all sessions together. Without a `form` it is `quick_form`.
    """
    with open_checkpoint(resolve(parse_reference(reference), settings, progress)) as checkpoint:
        tokenizer, spec = checkpoint.tokenizer(), checkpoint.spec
        check_same_vocabulary(checkpoint.name, tokenizer, target)
        options = replace(options, context_length=min(options.context_length, spec.context_length))
        limits = DraftModelLimits(
            vocab_size=spec.vocab_size,
            target_vocab_size=target_vocab_size,
            context_length=options.context_length,
            max_rows=options.max_rows,
            end_ids=target.eos_ids,
        )
        form = form or quick_form(checkpoint)
        return ModelDrafter(open_shard(checkpoint, backend=backend, form=form, options=options), limits)


def quick_form(checkpoint: Checkpoint) -> str:
    """In 8 bits where the file has plain numbers: a drafter has to be quick, and need not be exact."""
    if "attention.out" not in checkpoint.layout.layers[0]:
        return "native"  # another library runs it
    matrix = checkpoint.source(whole(checkpoint.spec)).matrix("attention.out", 0)
    return "int8" if isinstance(matrix, DenseMatrix) else "native"


def drafters_from(
    reference: str | None, settings: Settings, context_length: int
) -> Callable[[Tokenizer, int], Sequence[Drafter]]:
    """Opens what drafts for a model, given its tokenizer and vocabulary's size; nothing without a reference."""

    def open_drafters(target: Tokenizer, target_vocab_size: int) -> Sequence[Drafter]:
        if reference is None:
            return ()
        options = ExecutorOptions(
            kv_bytes=int(psutil.virtual_memory().available * _KV_FRACTION),
            context_length=context_length,
            threads=settings.threads or 1,
        )
        drafter = open_draft_model(
            reference, settings, target=target, target_vocab_size=target_vocab_size, options=options
        )
        return (drafter,)

    return open_drafters


def check_same_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise unless every id stands for the same token in both."""
    hint = "draft with a smaller model of the same family and generation"
    if draft.vocab_size != target.vocab_size:
        raise UsageError(
            f"{name} cannot draft for this model: it has {draft.vocab_size} tokens and the model "
            f"{target.vocab_size}",
            hint=hint,
        )
    for token in range(target.vocab_size):
        if draft.token_bytes(token) != target.token_bytes(token):
            raise UsageError(
                f"{name} cannot draft for this model: token {token} is {draft.token_bytes(token)!r} there "
                f"and {target.token_bytes(token)!r} in the model",
                hint=hint,
            )
