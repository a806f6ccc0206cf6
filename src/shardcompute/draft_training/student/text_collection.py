"""Text that a student learns from: what its parent says to itself, with the states that it had, kept between runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from shardcompute.draft_training.dialogue import Script, SelfPlayDialogue
from shardcompute.draft_training.kept_tensors import read_kept, write_kept
from shardcompute.draft_training.scripts import ScriptsAhead, ScriptWriter
from shardcompute.draft_training.teacher import Teacher
from shardcompute.draft_training.train import cut_passages
from shardcompute.draft_training.training_rows import Span, TrainingRows
from shardcompute.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)
_REPORT_S = 5.0
_SAVE_S = 60.0
_MOST_KEPT_BYTES = 2 << 30
_COLUMNS = ("states", "tokens", "origins")


class TextCollection:
    """Self-play of `teacher`, told along with `say`. What was said is left in `file`, with which a later run begins."""

    def __init__(
        self,
        teacher: Teacher,
        parent: Checkpoint,
        file: Path,
        *,
        capacity: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self._teacher = teacher
        self._parent = parent
        self._file = file
        self._say = say
        self.rows = TrainingRows(capacity, teacher.spec.hidden, teacher.device)
        self._row_bytes = 2 * teacher.spec.hidden + 5
        self._load()
        # With another seed it says other things than those that are kept.
        self._seed = seed + self.rows.rows

    def collect(self, text: str, is_enough: Callable[[int], bool]) -> TrainingRows:
        """Go on until there are enough tokens, or no more fit."""
        teacher = self._teacher
        if self.rows.rows and is_enough(self.rows.rows):
            return self.rows
        tokenizer = self._parent.tokenizer()
        passages = cut_passages(tokenizer.encode(text), teacher.context_length) if text else []
        writer = ScriptWriter(tokenizer, teacher.context_length, self._seed, texts=passages)
        # Where a GPU waits a thread writes ahead; elsewhere the same seed gives the same text.
        ahead = ScriptsAhead(writer) if teacher.is_cuda else None
        try:
            self._play(ahead or iter(writer), writer, is_enough)
        finally:
            if ahead is not None:
                ahead.close()
            self._save()
        return self.rows

    def _play(
        self, scripts: Iterator[Script], writer: ScriptWriter, is_enough: Callable[[int], bool]
    ) -> None:
        def keep(dialogues: Sequence[SelfPlayDialogue], states: torch.Tensor) -> None:
            self.rows.keep(dialogues, states)
            for dialogue in dialogues:
                writer.keep(dialogue)

        executor = self._teacher.open(self._parent)
        play = self._teacher.play(executor, scripts, keep, self._seed)
        said = saved = time.monotonic()
        try:  # What is cut short in the middle of a step keeps the conversations that have ended.
            while not self.rows.is_full and not is_enough(self.rows.rows + play.tokens):
                play.step()
                now = time.monotonic()
                if now - said >= _REPORT_S:
                    said = now
                    self._say(f"talked: {self.rows.rows + play.tokens} tokens")
                if now - saved >= _SAVE_S:
                    self._save()
                    saved = time.monotonic()
            play.close()
        finally:
            executor.close()
        self._say(f"talked: {self.rows.rows} tokens")

    def _load(self) -> None:
        kept = read_kept(self._file, self._teacher.device)
        if kept is None or kept.tensors["states"].shape[1] != self.rows.states.shape[1]:
            return
        count = min(len(kept.tensors["states"]), self.rows.capacity)
        for name in _COLUMNS:
            getattr(self.rows, name)[:count] = kept.tensors[name][:count]
        self.rows.spans = [Span(*each) for each in kept.facts["spans"] if each[1] <= count]
        self.rows.rows = count
        self._say(f"goes on with {count} tokens that the model has said before")

    def _save(self) -> None:
        count = self.rows.rows
        if count * self._row_bytes > _MOST_KEPT_BYTES:
            return  # It takes longer to write than to say again: so much comes of a GPU alone.
        kept = {name: getattr(self.rows, name)[:count] for name in _COLUMNS}
        spans = [(span.start, span.stop, span.kind) for span in self.rows.spans]
        write_kept(self._file, kept, {"spans": spans})
