"""Self-play, a model that talks to itself on one device: many sessions side by side, each along a script.

All sessions of a half go on together for some dozens of tokens before the host looks at what they said: what they do
meanwhile stays on the device. A token behind a stop is forgotten. On a CUDA device there are two halves: while the
device works on one, the host reads the other. Final states are kept where they are computed, in a buffer of sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from shardcompute.backends.torch.executor import TorchExecutor
from shardcompute.backends.torch.transfers import upload
from shardcompute.core.batch import PAGE_TOKENS, Segment
from shardcompute.draft_training.dialogue import DRAWN, GIVEN, GREEDY, ChosenTokens, Script, SelfPlayDialogue

STEPS_AHEAD = 32
"""Tokens that all sessions say before the host hears them."""
_LOOP_TOKENS = 32
_LONGEST_LOOP = 64
_NUCLEUS_TOKENS = 256
_LEAST_NOISE = 1e-20

Keep = Callable[[Sequence[SelfPlayDialogue], torch.Tensor], None]
"""Takes dialogues that ended, with the states of all their tokens one behind the other, of a mean square of 1."""


@dataclass(slots=True)
class _Player:
    """A session and where it is in its script. `known` tokens of its row in the half's buffers are settled; those from
    `fed` on have not been fed."""

    number: int
    script: Script
    cost: int
    known: int = 0
    fed: int = 0
    turn: int = 0
    said: int = 0
    is_over: bool = False

    @property
    def speech(self) -> ChosenTokens | None:
        turn = self.script.turns[self.turn] if self.turn < len(self.script.turns) else None
        return turn if isinstance(turn, ChosenTokens) else None


@dataclass(slots=True)
class _Chance:
    """Which rows of a step are left to chance, and how: `(rows, temperature, top_p)` on the device."""

    plain: tuple[torch.Tensor, torch.Tensor] | None = None
    nucleus: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True)
class _Half:
    """Sessions that are computed together, by slot, and what they are about to say."""

    players: list[_Player | None]
    ids: NDArray[np.int32]
    origins: NDArray[np.uint8]
    states: torch.Tensor
    last: torch.Tensor
    """The token that each session has said and not been fed yet."""
    speakers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    words: torch.Tensor | None = None
    event: torch.cuda.Event | None = None


class SelfPlay:
    """Sessions under way; a finished one is replaced as soon as there is room in `kv_tokens`. Scripts must not end.

    What ended is handed to `keep`, from within `step` and `close`.
    """

    def __init__(
        self,
        executor: TorchExecutor,
        scripts: Iterator[Script],
        keep: Keep,
        *,
        sessions: int,
        context_length: int,
        kv_tokens: int,
        max_rows: int,
        hidden: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._executor = executor
        self._scripts = scripts
        self._keep = keep
        self._context_length = context_length
        self._room = kv_tokens
        self._max_rows = max_rows
        self._device = device
        self._random = torch.Generator(device).manual_seed(seed)
        self._opened = 0
        self._waiting: Script | None = None
        # Where the host itself computes there is nothing to wait for.
        first = sessions // 2 if device.type == "cuda" else 0
        counts = [count for count in (first, sessions - first) if count]
        self._halves = [self._new_half(count, hidden) for count in counts]
        self._next = 0

    @property
    def tokens(self) -> int:
        """Those of the sessions under way."""
        players = (player for half in self._halves for player in half.players if player is not None)
        return sum(player.known for player in players)

    def step(self) -> None:
        """Hear one half, replace what has ended and let the half go on."""
        half = self._halves[self._next]
        self._next = (self._next + 1) % len(self._halves)
        self._hear(half)
        self._open(half)
        with torch.inference_mode():
            self._read(half)
            self._speak(half)

    def close(self) -> None:
        """End all sessions; what was said in them so far is kept."""
        for half in self._halves:
            self._hear(half)
            for player in half.players:
                if player is not None:
                    player.is_over, player.known = True, player.fed
            self._end(half)

    def _new_half(self, slots: int, hidden: int) -> _Half:
        width = self._context_length + STEPS_AHEAD
        return _Half(
            [None] * slots,
            np.zeros((slots, width), np.int32),
            np.zeros((slots, width), np.uint8),
            torch.zeros((slots, width, hidden), dtype=torch.float16, device=self._device),
            torch.zeros(slots, dtype=torch.int64, device=self._device),
        )

    # What the host does between steps

    def _open(self, half: _Half) -> None:
        for slot, player in enumerate(half.players):
            if player is not None:
                continue
            script = self._waiting or next(self._scripts)
            tokens = min(script.most_tokens, self._context_length) + STEPS_AHEAD
            cost = -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
            if cost > self._room:
                self._waiting = script
                return
            self._waiting, self._opened = None, self._opened + 1
            self._room -= cost
            half.players[slot] = new = _Player(self._opened, script, cost)
            self._read_on(half, slot, new)

    def _read_on(self, half: _Half, slot: int, player: _Player) -> None:
        """Take what is given up to the next speech."""
        player.said = 0
        while player.turn < len(player.script.turns):
            turn = player.script.turns[player.turn]
            if isinstance(turn, ChosenTokens):
                break
            given = turn.ids[: self._context_length - player.known]
            end = player.known + len(given)
            half.ids[slot, player.known : end], half.origins[slot, player.known : end] = given, GIVEN
            player.known = end
            player.turn += 1
        is_unread = player.fed < player.known
        player.is_over = not is_unread and (player.speech is None or player.known >= self._context_length)

    def _hear(self, half: _Half) -> None:
        """What was said since the last time, up to a stop, the limit or the context's end."""
        if half.words is None:
            return
        if half.event is not None:
            half.event.synchronize()
        words = half.words.numpy().T
        half.words = None
        slots = half.speakers
        players = [half.players[slot] for slot in slots]
        speeches = [player.speech for player in players if player is not None]
        assert len(speeches) == len(slots)
        starts = np.asarray([player.known for player in players if player is not None])
        counts, is_stopped = _count_words(words, speeches)
        rows, columns = slots[:, None], starts[:, None] + np.arange(words.shape[1])
        half.ids[rows, columns] = words
        greedy = np.asarray([speech is not None and speech.temperature == 0 for speech in speeches])
        half.origins[rows, columns] = np.where(greedy, GREEDY, DRAWN)[:, None]
        looping = find_loops(half.ids, slots, starts + counts)
        for index, (slot, player) in enumerate(zip(slots.tolist(), players, strict=True)):
            if player is not None:
                self._follow(
                    half, slot, player, int(counts[index]), bool(is_stopped[index]), bool(looping[index])
                )
        self._end(half)

    def _follow(
        self, half: _Half, slot: int, player: _Player, count: int, is_stopped: bool, is_looping: bool
    ) -> None:
        speech = player.speech
        if speech is None:  # it was only read
            player.is_over = True
            return
        count = min(count, speech.limit - player.said, self._context_length - player.known)
        is_final = player.turn + 1 == len(player.script.turns)
        at_stop = is_stopped and count > 0 and int(half.ids[slot, player.known + count - 1]) in speech.stops
        if at_stop and not is_final:
            count -= 1
        player.known += count
        player.said += count
        player.fed = player.known
        if is_looping or player.known >= self._context_length:
            player.is_over = True
        elif at_stop or player.said >= speech.limit:
            player.turn += 1
            self._read_on(half, slot, player)

    def _end(self, half: _Half) -> None:
        """Hand over what has ended, and free its slots."""
        ended, dialogues = [], []
        for slot, player in enumerate(half.players):
            if player is None or not player.is_over:
                continue
            ids, origins = half.ids[slot, : player.known].copy(), half.origins[slot, : player.known].copy()
            ended.append((slot, player.known))
            dialogues.append(SelfPlayDialogue(player.script.kind, ids, origins))
            self._executor.close_session(player.number)
            self._room += player.cost
            half.players[slot] = None
        if not ended:
            return
        counts = np.asarray([count for _, count in ended])
        slots = np.repeat(np.asarray([slot for slot, _ in ended]), counts)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        width = half.states.shape[1]
        rows = self._upload(slots * width + places)
        self._keep(dialogues, half.states.flatten(0, 1)[rows])

    # What the device does

    def _read(self, half: _Half) -> None:
        """Feed what is given and not fed yet, in steps of at most `max_rows` rows."""
        group: list[tuple[int, _Player]] = []
        rows = 0
        for slot, player in enumerate(half.players):
            if player is None or player.fed == player.known:
                continue
            count = player.known - player.fed
            if group and rows + count > self._max_rows:
                self._read_step(half, group)
                group, rows = [], 0
            group.append((slot, player))
            rows += count
        if group:
            self._read_step(half, group)

    def _read_step(self, half: _Half, group: Sequence[tuple[int, _Player]]) -> None:
        segments = [Segment(each.number, each.fed, each.known - each.fed, 1) for _, each in group]
        ids = np.concatenate([half.ids[slot, each.fed : each.known] for slot, each in group])
        places = np.concatenate(
            [slot * half.states.shape[1] + np.arange(each.fed, each.known) for slot, each in group]
        )
        for _, player in group:
            player.fed = player.known
        logits = self._executor.step_tensor(segments, self._upload(ids.astype(np.int64)), keeps_hidden=True)
        half.states.flatten(0, 1)[self._upload(places)] = _scaled(self._executor.final_tensor())
        chance = self._chance([player.speech for _, player in group])
        slots = self._upload(np.asarray([slot for slot, _ in group]))
        half.last[slots] = self._choose(logits, chance)

    def _speak(self, half: _Half) -> None:
        """Let all go on for some steps."""
        speaking = [(slot, player) for slot, player in enumerate(half.players) if player is not None]
        if not speaking:  # all memory is taken by the other half
            return
        half.speakers = np.asarray([slot for slot, _ in speaking], dtype=np.int64)
        slots = self._upload(half.speakers)
        starts = [(player.number, player.known) for _, player in speaking]
        chance = self._chance([player.speech for _, player in speaking])
        places = slots * half.states.shape[1] + self._upload(np.asarray([start for _, start in starts]))
        states, said = half.states.flatten(0, 1), [half.last[slots]]

        def choose(logits: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
            states[places + (len(said) - 1)] = _scaled(final)
            said.append(self._choose(logits, chance))
            return said[-1]

        self._executor.continue_tensor(starts, said[0], STEPS_AHEAD, choose)
        half.last[slots] = said.pop()
        words = torch.stack(said).int()
        if self._device.type != "cuda":
            half.words = words.cpu()
            return
        half.words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        half.words.copy_(words, non_blocking=True)
        half.event = torch.cuda.Event()
        half.event.record()

    def _upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        return upload(torch.from_numpy(values), self._device)

    # Choosing tokens

    def _chance(self, speeches: Sequence[ChosenTokens | None]) -> _Chance:
        drawn = [
            (row, each) for row, each in enumerate(speeches) if each is not None and each.temperature > 0
        ]
        chance = _Chance()
        for is_nucleus in (False, True):
            chosen = [(row, each) for row, each in drawn if (each.top_p < 1) is is_nucleus]
            if not chosen:
                continue
            rows = self._upload(np.asarray([row for row, _ in chosen]))
            heat = torch.tensor([[each.temperature, each.top_p] for _, each in chosen]).to(self._device)
            if is_nucleus:
                chance.nucleus = rows, heat[:, :1], heat[:, 1:]
            else:
                chance.plain = rows, heat[:, :1]
        return chance

    def _choose(self, logits: torch.Tensor, chance: _Chance) -> torch.Tensor:
        """A token for every row: the likeliest, or one by chance where there is a temperature."""
        chosen = logits.argmax(-1)
        if chance.plain is not None:
            rows, heat = chance.plain
            chosen[rows] = self._draw(logits[rows] / heat)
        if chance.nucleus is not None:
            rows, heat, top_p = chance.nucleus
            chosen[rows] = self._draw_nucleus(logits[rows] / heat, top_p)
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


def _scaled(states: torch.Tensor) -> torch.Tensor:
    """Rows with a mean square of 1: a draft head looks at nothing else, and 16 bits hold them."""
    states = states.float()
    return (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-12)).half()


def _count_words(
    words: NDArray[np.int32], speeches: Sequence[ChosenTokens | None]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """How many of each row's words count, the stop among them, and whether there is one."""
    sets: dict[frozenset[int], int] = {}
    which = np.asarray([sets.setdefault(each.stops if each else frozenset(), len(sets)) for each in speeches])
    is_stop = np.zeros(words.shape, dtype=bool)
    for stops, number in sets.items():
        if stops:
            is_stop |= (which == number)[:, None] & np.isin(words, list(stops))
    is_stopped = np.asarray(is_stop.any(axis=1))
    return np.where(is_stopped, is_stop.argmax(axis=1) + 1, words.shape[1]), is_stopped


def find_loops(
    ids: NDArray[np.int32], slots: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whose last tokens repeat those shortly before: such text goes on for ever and teaches nothing."""
    found = np.zeros(len(slots), dtype=bool)
    looked = np.flatnonzero(stops >= _LOOP_TOKENS + _LONGEST_LOOP)
    if not len(looked):
        return found
    columns = stops[looked, None] - (_LOOP_TOKENS + _LONGEST_LOOP) + np.arange(_LOOP_TOKENS + _LONGEST_LOOP)
    tails = ids[slots[looked, None], columns]
    last = tails[:, -_LOOP_TOKENS:]
    for step in range(1, _LONGEST_LOOP + 1):
        found[looked] |= (tails[:, -_LOOP_TOKENS - step : -step] == last).all(axis=1)
    return found
