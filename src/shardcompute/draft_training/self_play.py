"""Self-play, a model that talks to itself on one device: many sessions side by side, each along a script.

On a CUDA device the sessions are computed in two halves by turns: while the device works on one, the host reads what
the other has said, which is the one thing it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from shardcompute.backends.torch.executor import TorchExecutor
from shardcompute.core.batch import Segment
from shardcompute.draft_training.dialogue import ChosenTokens, Script, SelfPlayDialogue

_LOOP_TOKENS = 32
_LONGEST_LOOP = 64
_NUCLEUS_TOKENS = 256
_LEAST_NOISE = 1e-20


@dataclass(slots=True)
class _SelfPlaySession:
    number: int
    script: Script
    context_length: int
    ids: list[int] = field(default_factory=list)
    fed: int = 0
    is_over: bool = False
    _turn: int = 0
    _said: int = 0
    _greedy_from: int | None = None

    def __post_init__(self) -> None:
        self._read_on()

    @property
    def speech(self) -> ChosenTokens:
        turn = self.script[self._turn]
        assert isinstance(turn, ChosenTokens)
        return turn

    @property
    def conversation(self) -> SelfPlayDialogue:
        ids = tuple(self.ids[: self.context_length])
        return SelfPlayDialogue(ids, len(ids) if self._greedy_from is None else self._greedy_from)

    def hear(self, token: int) -> None:
        """The model has chosen its next token."""
        speech, is_final = self.speech, self._turn + 1 == len(self.script)
        is_stop = token in speech.stops
        if not is_stop or is_final:
            self.ids.append(token)
            self._said += 1
        is_looping = self._said % _LOOP_TOKENS == 0 and _is_looping(self.ids)
        if is_looping or len(self.ids) >= self.context_length:
            self.is_over = True
        elif is_stop or self._said >= speech.limit:
            self._turn += 1
            self._read_on()

    def _read_on(self) -> None:
        """Take what is given up to the next speech."""
        while self._turn < len(self.script):
            turn = self.script[self._turn]
            if isinstance(turn, ChosenTokens):
                self._said, self._greedy_from = 0, None if turn.temperature else len(self.ids)
                break
            self.ids.extend(turn.ids)
            self._turn += 1
        self.is_over = self._turn >= len(self.script) or len(self.ids) >= self.context_length


@dataclass(slots=True)
class _Half:
    """Sessions that are computed together, and what they are about to say."""

    sessions: list[_SelfPlaySession]
    speakers: list[int] = field(default_factory=list)
    words: torch.Tensor | None = None
    event: torch.cuda.Event | None = None


class SelfPlay:
    """Sessions under way; a finished one is replaced at once. Scripts must not end, and begin with what is given."""

    def __init__(
        self,
        executor: TorchExecutor,
        scripts: Iterator[Script],
        *,
        sessions: int,
        context_length: int,
        max_rows: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._executor = executor
        self._scripts = scripts
        self._context_length = context_length
        self._max_rows = max_rows
        self._device = device
        self._random = torch.Generator(device).manual_seed(seed)
        self._opened = 0
        # Where the host itself computes there is nothing to wait for.
        first = sessions // 2 if device.type == "cuda" else 0
        counts = [count for count in (first, sessions - first) if count]
        self._halves = [_Half([self._open() for _ in range(count)]) for count in counts]
        self._next = 0

    @property
    def tokens(self) -> int:
        """Those of the sessions under way."""
        return sum(len(session.ids) for half in self._halves for session in half.sessions)

    def step(self) -> list[SelfPlayDialogue]:
        """Hear one half and let it go on; the conversations that ended."""
        half = self._halves[self._next]
        self._next = (self._next + 1) % len(self._halves)
        ended = self._hear(half)
        self._compute(half)
        return ended

    def close(self) -> list[SelfPlayDialogue]:
        """End all sessions; what was said in them so far."""
        found = []
        for half in self._halves:
            found += self._hear(half)
            for session in half.sessions:
                self._executor.close_session(session.number)
                if session.fed:
                    found.append(session.conversation)
            half.sessions.clear()
        return found

    def _open(self) -> _SelfPlaySession:
        while True:
            self._opened += 1
            session = _SelfPlaySession(self._opened, next(self._scripts), self._context_length)
            if not session.is_over:
                return session

    def _hear(self, half: _Half) -> list[SelfPlayDialogue]:
        if half.words is None:
            return []
        if half.event is not None:
            half.event.synchronize()
        ended = []
        for index, token in zip(half.speakers, half.words.tolist(), strict=True):
            session = half.sessions[index]
            session.hear(token)
            if session.is_over:
                ended.append(session.conversation)
                self._executor.close_session(session.number)
                half.sessions[index] = self._open()
        half.words = None
        return ended

    def _compute(self, half: _Half) -> None:
        segments: list[Segment] = []
        ids: list[int] = []
        half.speakers = []
        for index, session in enumerate(half.sessions):
            count = len(session.ids) - session.fed
            if segments and len(ids) + count > self._max_rows:
                continue
            segments.append(Segment(session.number, session.fed, count, 1))
            ids += session.ids[session.fed :]
            session.fed += count
            half.speakers.append(index)
        with torch.inference_mode():
            logits = self._executor.step_tensor(segments, torch.tensor(ids))
            chosen = self._choose(logits, [half.sessions[index].speech for index in half.speakers])
        if self._device.type != "cuda":
            half.words = chosen.cpu()
            return
        half.words = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        half.words.copy_(chosen, non_blocking=True)
        half.event = torch.cuda.Event()
        half.event.record()

    def _choose(self, logits: torch.Tensor, speeches: Sequence[ChosenTokens]) -> torch.Tensor:
        """A token for every row: the likeliest, or one by chance where there is a temperature."""
        chosen = logits.argmax(-1)
        for is_nucleus in (False, True):
            rows = [
                row
                for row, speech in enumerate(speeches)
                if speech.temperature > 0 and (speech.top_p < 1) is is_nucleus
            ]
            if not rows:
                continue
            heat = torch.tensor([[speeches[row].temperature, speeches[row].top_p] for row in rows])
            index, heat = (x.to(self._device, non_blocking=True) for x in (torch.tensor(rows), heat))
            scores = logits[index] / heat[:, :1]
            chosen[index] = self._draw_nucleus(scores, heat[:, 1:]) if is_nucleus else self._draw(scores)
        return chosen

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores).exponential_(generator=self._random)
        return scores.sub_(noise.clamp_min_(_LEAST_NOISE).log_()).argmax(-1)

    def _draw_nucleus(self, scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Among the likeliest tokens that together have `top_p` (and of some hundreds at most)."""
        total = scores.logsumexp(-1, keepdim=True)
        best, ids = scores.topk(min(_NUCLEUS_TOKENS, scores.shape[-1]), dim=-1)
        shares = (best - total).exp()
        best = best.masked_fill(shares.cumsum(-1) - shares > top_p, -torch.inf)
        return ids.gather(-1, self._draw(best)[:, None])[:, 0]


def _is_looping(ids: Sequence[int]) -> bool:
    """Whether the last tokens repeat those shortly before: such text goes on for ever and teaches nothing."""
    tail = ids[-_LOOP_TOKENS:]
    if len(ids) < _LOOP_TOKENS + _LONGEST_LOOP:
        return False
    return any(ids[-_LOOP_TOKENS - step : -step] == tail for step in range(1, _LONGEST_LOOP + 1))
