"""One run that teaches a draft head through a cluster: play, record, train, evaluate.

Nothing is taken into use here: whoever asked is told how it did, and how what is in use did on the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardcompute.core.errors import UsageError
from shardcompute.draft_training.scripts import ScriptWriter
from shardcompute.draft_training.swarm.play import PlayedDialogue, SwarmPlay
from shardcompute.draft_training.swarm.recording import StateRecording
from shardcompute.draft_training.swarm.taught_model import TaughtModel
from shardcompute.draft_training.train import (
    TrainedDraftHead,
    TrainingOptions,
    TrainingRun,
    check_plan,
    cut_passages,
)
from shardcompute.draft_training.training_rows import TrainingRows
from shardcompute.weights.sources.progress import NullProgress, Progress

_STREAMS = 8
_TALK_SHARE = 0.7
"""A swarm talks far slower than a device learns from what it said."""
_LONGEST = 512
_SHORTEST = 64
_REPORT_S = 5.0
_RECORDING = "recorded.states"
_TRAINING = "training.pt"


@dataclass(frozen=True, slots=True)
class TeachingFiles:
    """What runs that are cut short leave in a folder, for the next to go on from."""

    folder: Path

    @property
    def training(self) -> Path:
        return self.folder / _TRAINING

    @property
    def recording(self) -> Path:
        return self.folder / _RECORDING

    def clear(self) -> None:
        for file in (self.training, self.recording):
            file.unlink(missing_ok=True)


def teach_draft_head(
    model: TaughtModel,
    plan: TrainingOptions,
    files: TeachingFiles,
    *,
    text: str = "",
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> TrainedDraftHead:
    """Teach a draft head for a served model; `text` is read as well. `plan.sessions` dialogues go on at once."""
    check_plan(plan)
    context_length = min(plan.context_length or _LONGEST, model.most_tokens)
    if context_length < _SHORTEST:
        raise UsageError(
            f"sessions of {model.name} have {context_length} tokens here, too few to learn from",
            hint="start the cluster with a larger --context",
        )
    plan = replace(
        plan, context_length=context_length, sessions=plan.sessions or _STREAMS, talk_share=_TALK_SHARE
    )
    run = TrainingRun(model, plan, progress or NullProgress(), say, None, files.training)
    return run.learn(_Lessons(run, model, files).collect(text), model.draft_head())


class _Lessons:
    """The training rows of one run: what an earlier one has recorded, and what is played now."""

    def __init__(self, run: TrainingRun, model: TaughtModel, files: TeachingFiles) -> None:
        self._run = run
        self._model = model
        teacher, spec = run.teacher, model.spec
        self._rows = TrainingRows(teacher.capacity(run.plan.tokens), spec.hidden, teacher.device)
        self._recording = StateRecording(
            files.recording, weights=model.card.content, hidden=spec.hidden, vocab_size=spec.vocab_size
        )

    def collect(self, text: str) -> TrainingRows:
        run, rows = self._run, self._rows
        for played in self._recording.read():
            self._learn(played)
        if rows.rows:
            run.say(f"goes on with {rows.rows} tokens that an earlier run has recorded")
        if rows.is_full or run.has_enough(rows.rows):
            return rows
        run.progress.start(f"{self._model.name} talks to itself in its cluster", None)
        try:
            self._play(text)
        finally:
            run.progress.finish()
        return rows

    def _play(self, text: str) -> None:
        run, plan = self._run, self._run.plan
        tokenizer = self._model.tokenizer()
        passages = cut_passages(tokenizer.encode(text), plan.context_length) if text else []
        # What was recorded before is not said again.
        seed = plan.seed + self._rows.rows
        writer = ScriptWriter(tokenizer, plan.context_length, seed, texts=passages)
        started = said = time.monotonic()
        before = self._rows.rows

        def keep(played: PlayedDialogue) -> bool:
            nonlocal said
            self._recording.add(played)
            self._learn(played)
            writer.keep(played.dialogue)
            if time.monotonic() - said >= _REPORT_S:
                said = time.monotonic()
                run.report_play(self._rows.rows - before, said - started)
            is_full = self._rows.is_full or self._recording.is_full
            return not is_full and not run.has_enough(self._rows.rows)

        play = SwarmPlay(
            self._model,
            iter(writer),
            context_length=plan.context_length,
            streams=plan.sessions,
            seed=seed,
        )
        play.run(keep)
        run.report_play(self._rows.rows - before, time.monotonic() - started)

    def _learn(self, played: PlayedDialogue) -> None:
        self._rows.keep([played.dialogue], torch.from_numpy(played.states.copy()))
