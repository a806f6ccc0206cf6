"""One training run of a draft head: self-play, training rows from it, the training loop, evaluation.

The model talks to itself, and the network learns from the states that it had meanwhile. What was trained is compared,
on text that was held out, with what is in use.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardcompute.core.errors import BackendError, UsageError
from shardcompute.models.draft_head import DraftHeadWeights, decode_draft_head, encode_draft_head
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.sources.progress import NullProgress, Progress

if TYPE_CHECKING:
    import torch

    from shardcompute.draft_training.dialogue import Script, SelfPlayDialogue
    from shardcompute.draft_training.draft_net import DraftNet
    from shardcompute.draft_training.evaluation import Examination
    from shardcompute.draft_training.scripts import ScriptWriter
    from shardcompute.draft_training.teacher import ModelEnds
    from shardcompute.draft_training.training_loop import LoopReport
    from shardcompute.draft_training.training_rows import Span, TrainingRows

Say = Callable[[str], None]
Save = Callable[[DraftHeadWeights], None]
_LAST_SHARE = 0.04
"""Of a run's time, left to evaluate."""
_FEWEST_TOKENS = 512
_PASSAGE_TOKENS = 384
_CHOSEN_COUNTS = 4
_REPORT_S = 5.0


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How long to talk and to train: `minutes` for both together, or `tokens` of self-play and `epochs` over them.

    Zeros stand for what suits the device (`sessions`, `rows` in a step, `context_length`) or the model (`width`).
    `LoopOptions` says what `soft` is.
    """

    minutes: float | None = 10.0
    tokens: int | None = None
    epochs: float = 4.0
    layers: int = 2
    width: int = 0
    vocabulary: int = 16_384
    device: str = "auto"
    sessions: int = 0
    rows: int = 0
    soft: float = 0.5
    rate: float = 1.5e-3
    context_length: int = 0
    threads: int = 1
    seed: int = 1
    talk_share: float = 0.4
    """Of `minutes`, the rest being for training."""


@dataclass(frozen=True, slots=True)
class TrainedDraftHead:
    """Trained weights, how they did on conversations that were held out, and how what is in use did on the same."""

    weights: DraftHeadWeights
    examination: Examination
    in_use: Examination | None
    tokens: int
    loss: float

    @property
    def is_better(self) -> bool:
        """Than what is in use, or there is nothing in use."""
        return self.in_use is None or self.examination.score > self.in_use.score

    def describe(self) -> list[str]:
        """Lines for people."""
        lines = [
            f"learned from {self.tokens} tokens; loss {self.loss:.3f}; "
            f"{self.examination.seen.covered:.1%} of tokens are among the {len(self.weights.ids)} known ones",
            *self.examination.describe(),
        ]
        if self.in_use is not None:
            lines += [f"in use until now: {line}" for line in self.in_use.describe()]
        return lines


def train_draft_head(
    checkpoint: Checkpoint,
    plan: TrainingOptions,
    *,
    text: str = "",
    in_use: DraftHeadWeights | None = None,
    resumed: Path | None = None,
    progress: Progress | None = None,
    say: Say = lambda _: None,
    save: Save | None = None,
) -> TrainedDraftHead:
    """Self-play, train, evaluate. `progress` shows what is under way, `say` gets figures every few seconds and `save`
    what was learned so far, once a minute. A run that was cut short goes on from what it left in the file `resumed`."""
    check_plan(plan)
    from shardcompute.draft_training.teacher import CheckpointEnds

    ends = CheckpointEnds(checkpoint)
    run = TrainingRun(ends, plan, progress or NullProgress(), say, save, resumed)
    return run.learn(_LocalPlay(run, checkpoint).collect(text), in_use)


def check_plan(plan: TrainingOptions) -> None:
    """BackendError where nothing can be trained here, UsageError where nothing says for how long."""
    if importlib.util.find_spec("torch") is None:
        raise BackendError("a draft head is trained with torch", hint="pip install 'shardcompute[torch]'")
    if plan.minutes is None and plan.tokens is None:
        raise UsageError(
            "nothing says how long to train", hint="give a time with --minutes or an amount with --tokens"
        )


class TrainingRun:
    """One run: what all its parts need to know, wherever its training rows come from."""

    def __init__(
        self,
        ends: ModelEnds,
        plan: TrainingOptions,
        progress: Progress,
        say: Say,
        save: Save | None,
        resumed: Path | None,
    ) -> None:
        from shardcompute.draft_training.teacher import Teacher

        self._started = time.monotonic()
        self.plan = plan
        self.progress = progress
        self.say = say
        self._save = save
        self._file = resumed
        self.teacher = Teacher(
            ends,
            plan.device,
            context_length=plan.context_length,
            sessions=plan.sessions,
            threads=plan.threads,
        )
        self._rows = plan.rows or (16_384 if self.teacher.is_cuda else 1024)

    def learn(self, dataset: TrainingRows, in_use: DraftHeadWeights | None) -> TrainedDraftHead:
        """Train on these rows, but for those that are held out, and evaluate on those."""
        if dataset.rows < _FEWEST_TOKENS or not dataset.spans:
            raise UsageError(
                f"the model said {dataset.rows} tokens, too few to learn from (at least {_FEWEST_TOKENS})",
                hint="give it longer with --minutes or --tokens",
            )
        learned, held_out = dataset.split()
        before = None if in_use is None else self._examine(in_use, dataset, held_out, "in use")
        weights, last = self._train(dataset, learned)
        # What was kept is evaluated, with all its rounding.
        kept = decode_draft_head(encode_draft_head(weights), self.teacher.spec.hidden)
        found = self._examine(kept, dataset, held_out, "trained")
        trained = TrainedDraftHead(kept, found, before, dataset.rows, last.loss)
        for line in trained.describe():
            self.say(line)
        return trained

    def report_play(self, tokens: int, elapsed_s: float) -> None:
        self.say(
            f"talked: {tokens} tokens in {elapsed_s:.0f} s, {tokens / max(elapsed_s, 1e-3):.0f} per second"
        )

    def has_enough(self, tokens: int) -> bool:
        if self.plan.tokens is not None:
            return tokens >= self.plan.tokens
        return self._elapsed_share() >= self.plan.talk_share

    def _elapsed_share(self) -> float:
        return (time.monotonic() - self._started) / (60 * (self.plan.minutes or 1e-6))

    def _train(self, dataset: TrainingRows, learned: Sequence[Span]) -> tuple[DraftHeadWeights, LoopReport]:
        from shardcompute.draft_training.draft_net import pack
        from shardcompute.draft_training.training_loop import LoopOptions, TrainingLoop

        plan, teacher = self.plan, self.teacher
        net, ids = self._begin(dataset)
        seconds = None
        if plan.tokens is None and plan.minutes is not None:
            seconds = max(1.0, 60 * plan.minutes * (1 - _LAST_SHARE - self._elapsed_share()))
        options = LoopOptions(
            self._rows, plan.soft, plan.rate, epochs=None if seconds else plan.epochs, seconds=seconds
        )
        loop = TrainingLoop(net, dataset, teacher.frozen_weights(ids), options, seed=plan.seed)

        def report(last: LoopReport) -> None:
            likely = " ".join(f"{each:.3f}" for each in last.likely)
            self.say(f"trained: {last.share:.0%}, {last.rows} rows, loss {last.loss:.3f}, right {likely}")

        def save(share: float, weights: dict[str, torch.Tensor]) -> None:
            if self._save is not None:
                self._save(pack(net, weights, ids))
            if self._file is not None:
                from shardcompute.draft_training.resumption import write_resumption

                write_resumption(self._file, net.shape, weights, ids)

        self.progress.start(f"Training a draft head of {teacher.ends.name}", None)
        try:
            last = loop.run(learned, report, save)
        finally:
            self.progress.finish()
        return pack(net, loop.weights, ids), last

    def _begin(self, dataset: TrainingRows) -> tuple[DraftNet, NDArray[np.int32]]:
        """A new net, or one that a run before this left, and the tokens that it knows."""
        import torch

        from shardcompute.draft_training.draft_net import new_net
        from shardcompute.draft_training.resumption import read_resumption

        teacher = self.teacher
        shape = teacher.shape(self.plan.layers, self.plan.width)
        if self._file is not None:
            left = read_resumption(self._file, shape, teacher.device)
            if left is not None:
                self.say(f"goes on from what an earlier run left in {self._file}")
                return left
        random = torch.Generator(teacher.device).manual_seed(self.plan.seed)
        return new_net(shape, teacher.last_norm(), random), self._choose_vocabulary(dataset)

    def _examine(
        self, weights: DraftHeadWeights, dataset: TrainingRows, held_out: Sequence[Span], what: str
    ) -> Examination:
        from shardcompute.draft_training.draft_net import load_net
        from shardcompute.draft_training.evaluation import examine

        teacher = self.teacher
        net = load_net(weights, teacher.spec.norm_eps, teacher.device)
        found = examine(net, dataset, held_out, teacher.frozen_weights(weights.ids), self._rows)
        for line in found.describe_kinds():
            self.say(f"{what}: {line}")
        return found

    def _choose_vocabulary(self, dataset: TrainingRows) -> NDArray[np.int32]:
        """The tokens that were said or read most often, and those that end an answer, in rising order."""
        import torch

        from shardcompute.draft_training.dialogue import GIVEN

        spec = self.teacher.spec
        tokens, origins = dataset.tokens[: dataset.rows], dataset.origins[: dataset.rows]
        counts = torch.bincount(tokens, minlength=spec.vocab_size)
        counts += _CHOSEN_COUNTS * torch.bincount(tokens[origins != GIVEN], minlength=spec.vocab_size)
        ends = [i for i in self.teacher.ends.tokenizer().eos_ids if i < len(counts)]
        if ends:
            counts[ends] = counts.max() + 1
        seen = counts.cpu().numpy()
        order = seen.argsort(kind="stable")[::-1][: self.plan.vocabulary]
        return np.sort(order[seen[order] > 0]).astype(np.int32)


class _LocalPlay:
    """The training rows of a model that talks on the device that trains."""

    def __init__(self, run: TrainingRun, checkpoint: Checkpoint) -> None:
        self._run = run
        self._checkpoint = checkpoint

    def collect(self, text: str) -> TrainingRows:
        """The training rows: have the model talk to itself and read."""
        from shardcompute.draft_training.scripts import ScriptsAhead, ScriptWriter
        from shardcompute.draft_training.training_rows import TrainingRows

        run, teacher = self._run, self._run.teacher
        tokenizer = teacher.ends.tokenizer()
        run.progress.start(f"{teacher.ends.name} talks to itself", None)
        try:
            dataset = TrainingRows(teacher.capacity(run.plan.tokens), teacher.spec.hidden, teacher.device)
            passages = cut_passages(tokenizer.encode(text), teacher.context_length) if text else []
            writer = ScriptWriter(tokenizer, teacher.context_length, run.plan.seed, texts=passages)
            # Where a GPU waits a thread writes ahead; elsewhere the same seed gives the same text.
            ahead = ScriptsAhead(writer) if teacher.is_cuda else None
            try:
                self._play(ahead or iter(writer), writer, dataset)
            finally:
                if ahead is not None:
                    ahead.close()
            return dataset
        finally:
            run.progress.finish()

    def _play(self, scripts: Iterator[Script], writer: ScriptWriter, dataset: TrainingRows) -> None:
        """Until there is enough: let the model talk, and keep what it said."""

        def keep(dialogues: Sequence[SelfPlayDialogue], states: torch.Tensor) -> None:
            dataset.keep(dialogues, states)
            for dialogue in dialogues:
                writer.keep(dialogue)

        run, teacher = self._run, self._run.teacher
        executor = teacher.open(self._checkpoint)
        play = teacher.play(executor, scripts, keep, run.plan.seed)
        started = said = time.monotonic()
        while not dataset.is_full and not run.has_enough(dataset.rows + play.tokens):
            play.step()
            if time.monotonic() - said >= _REPORT_S:
                said = time.monotonic()
                run.report_play(dataset.rows + play.tokens, said - started)
        play.close()
        executor.close()
        run.report_play(dataset.rows, time.monotonic() - started)


def cut_passages(ids: Sequence[int], context_length: int) -> list[Sequence[int]]:
    length = min(_PASSAGE_TOKENS, context_length)
    return [ids[at : at + length] for at in range(0, len(ids), length)]
