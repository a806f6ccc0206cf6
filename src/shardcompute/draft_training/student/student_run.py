"""One run that makes a student: its parent talks to itself, the student learns from it, and is kept where it is better.

What was taught is compared, on text that was held out, with what its layers do untaught and with the student that is in
its folder already.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.settings import Settings
from shardcompute.draft_training.student.shape import plan_student
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.served import weights_key
from shardcompute.weights.sources.disk import check_room
from shardcompute.weights.sources.progress import NullProgress, Progress
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve

if TYPE_CHECKING:
    import torch

    from shardcompute.draft_training.evaluation import Examination
    from shardcompute.draft_training.student.shape import StudentShape
    from shardcompute.draft_training.student.student_folder import StudentFolder
    from shardcompute.draft_training.student.student_net import StudentNet
    from shardcompute.draft_training.training_loop import FrozenWeights, LoopReport
    from shardcompute.draft_training.training_rows import Span, TrainingRows

Say = Callable[[str], None]
_TALK_SHARE = 0.4
_LAST_SHARE = 0.06
"""Of a run's time, left to evaluate."""
_FEWEST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StudentOptions:
    """How long to talk and to teach: `minutes` for both together, or `tokens` of self-play and `epochs` over them.

    `layers` are the parent's layers to begin with, or how many. Zeros stand for what suits the device.
    """

    minutes: float | None = 20.0
    tokens: int | None = None
    epochs: float = 4.0
    layers: int | tuple[int, ...] | None = None
    device: str = "auto"
    sessions: int = 0
    rows: int = 0
    soft: float = 0.7
    rate: float = 5e-4
    context_length: int = 0
    threads: int = 1
    seed: int = 1


@dataclass(frozen=True, slots=True)
class TaughtStudent:
    """A student, how it did on text that was held out, how its layers did untaught, and the one in its folder."""

    shape: StudentShape
    examination: Examination
    untaught: Examination
    in_use: Examination | None
    tokens: int
    loss: float

    @property
    def is_better(self) -> bool:
        others = [self.untaught, *([] if self.in_use is None else [self.in_use])]
        return all(self.examination.score > other.score for other in others)

    def describe(self) -> list[str]:
        """Lines for people."""
        lines = [f"learned from {self.tokens} tokens; loss {self.loss:.3f}", *self.examination.describe()]
        lines += [f"untaught: {line}" for line in self.untaught.describe()]
        if self.in_use is not None:
            lines += [f"in its folder until now: {line}" for line in self.in_use.describe()]
        return lines


def teach_student(
    parent: Checkpoint,
    options: StudentOptions,
    folder: Path,
    settings: Settings,
    *,
    text: str = "",
    is_fresh: bool = False,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> TaughtStudent:
    """Make a student of the parent in a folder, unless what is there is better. Figures go to `say` every few seconds.
    A run that was cut short left its text and its weights beside the folder; it is gone on with, if not `is_fresh`."""
    if importlib.util.find_spec("torch") is None:
        raise BackendError("a student is taught with torch", hint="pip install 'shardcompute[torch]'")
    if options.minutes is None and options.tokens is None:
        raise UsageError(
            "nothing says how long to teach", hint="give a time with --minutes or an amount with --tokens"
        )
    shape = plan_student(parent.spec, options.layers)
    from shardcompute.draft_training.student.student_folder import StudentFolder, student_bytes

    place = StudentFolder(folder)
    has_one = place.check_owner(parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_room(folder.parent, 2 * student_bytes(shape), "a student")
    if is_fresh:
        place.forget()
    run = _StudentRun(parent, options, shape, place, progress or NullProgress(), say)
    taught = run.run(text, settings if has_one else None)
    place.forget()
    return taught


class _StudentRun:
    """One run: what all its parts need to know."""

    def __init__(
        self,
        parent: Checkpoint,
        options: StudentOptions,
        shape: StudentShape,
        place: StudentFolder,
        progress: Progress,
        say: Say,
    ) -> None:
        from shardcompute.draft_training.teacher import CheckpointEnds, Teacher

        self._started = time.monotonic()
        self._parent = parent
        self._options = options
        self._shape = shape
        self._place = place
        self._progress = progress
        self._say = say
        self._teacher = Teacher(
            CheckpointEnds(parent),
            options.device,
            context_length=options.context_length,
            sessions=options.sessions,
            threads=options.threads,
        )
        self._rows = options.rows or (16_384 if self._teacher.is_cuda else 512)

    def run(self, text: str, settings: Settings | None) -> TaughtStudent:
        """With `settings` there is a student in the folder, to be opened with them."""
        from shardcompute.draft_training.student.student_folder import round_student
        from shardcompute.draft_training.student.student_net import new_student

        dataset = self._collect(text)
        learned, held_out = dataset.split()
        frozen = self._frozen_weights()

        def examine(net: StudentNet, what: str) -> Examination:
            return self._examine(net, dataset, held_out, frozen, what)

        untaught = examine(new_student(self._shape, self._parent, self._teacher.device), "untaught")
        in_use = None if settings is None else examine(self._open_student(settings), "in its folder")
        net, last = self._teach(dataset, learned, frozen)
        # What is kept is evaluated, with all its rounding.
        kept = round_student(net)
        taught = TaughtStudent(
            self._shape, examine(kept, "taught"), untaught, in_use, dataset.rows, last.loss
        )
        for line in taught.describe():
            self._say(line)
        if taught.is_better:
            self._place.write(kept, frozen, self._parent, _told(taught))
        return taught

    def _collect(self, text: str) -> TrainingRows:
        from shardcompute.draft_training.student.text_collection import TextCollection

        teacher, options = self._teacher, self._options
        self._progress.start(f"{self._parent.name} talks to itself", None)
        try:
            collection = TextCollection(
                teacher,
                self._parent,
                self._place.text_file,
                capacity=teacher.capacity(options.tokens),
                seed=options.seed,
                say=self._say,
            )
            dataset = collection.collect(text, self._is_enough)
        finally:
            self._progress.finish()
        if dataset.rows < _FEWEST_TOKENS or not dataset.spans:
            raise UsageError(
                f"the model said {dataset.rows} tokens, too few to learn from (at least {_FEWEST_TOKENS})",
                hint="give it longer with --minutes or --tokens",
            )
        return dataset

    def _is_enough(self, tokens: int) -> bool:
        if self._options.tokens is not None:
            return tokens >= self._options.tokens
        return self._elapsed_share() >= _TALK_SHARE

    def _elapsed_share(self) -> float:
        return (time.monotonic() - self._started) / (60 * (self._options.minutes or 1e-6))

    def _frozen_weights(self) -> FrozenWeights:
        import numpy as np

        return self._teacher.frozen_weights(np.arange(self._parent.spec.vocab_size, dtype=np.int32))

    def _teach(
        self, dataset: TrainingRows, learned: Sequence[Span], frozen: FrozenWeights
    ) -> tuple[StudentNet, LoopReport]:
        from shardcompute.draft_training.student.student_loop import StudentLoop
        from shardcompute.draft_training.student.student_net import StudentNet
        from shardcompute.draft_training.training_loop import LoopOptions

        options = self._options
        seconds = None
        if options.tokens is None and options.minutes is not None:
            seconds = max(1.0, 60 * options.minutes * (1 - _LAST_SHARE - self._elapsed_share()))
        net = self._begin()
        loop_options = LoopOptions(
            self._rows,
            options.soft,
            options.rate,
            epochs=None if seconds else options.epochs,
            seconds=seconds,
        )
        loop = StudentLoop(net, dataset, frozen, loop_options, seed=options.seed)

        def report(last: LoopReport) -> None:
            likely = " ".join(f"{each:.3f}" for each in last.likely)
            self._say(f"taught: {last.share:.0%}, {last.rows} rows, loss {last.loss:.3f}, right {likely}")

        self._progress.start(f"Teaching a student of {self._parent.name}", None)
        try:
            last = loop.run(learned, report, lambda _, weights: self._leave(weights))
        except KeyboardInterrupt:
            self._leave(loop.weights)
            raise
        finally:
            self._progress.finish()
        return StudentNet(self._shape, loop.weights), last

    def _begin(self) -> StudentNet:
        """The parent's layers, or what a run before this left of the same ones."""
        from shardcompute.draft_training.kept_tensors import read_kept
        from shardcompute.draft_training.student.student_net import StudentNet, new_student

        kept = read_kept(self._place.weights_file, self._teacher.device)
        net = new_student(self._shape, self._parent, self._teacher.device)
        if kept is None or kept.facts.get("of") != self._identity():
            return net
        weights = {name: each.float().requires_grad_() for name, each in kept.tensors.items()}
        self._say(f"goes on from what an earlier run left in {self._place.weights_file}")
        return StudentNet(self._shape, weights)

    def _leave(self, weights: dict[str, torch.Tensor]) -> None:
        from shardcompute.draft_training.kept_tensors import write_kept

        write_kept(self._place.weights_file, weights, {"of": self._identity()})

    def _identity(self) -> list[Any]:
        return [weights_key(self._parent), *self._shape.kept]

    def _open_student(self, settings: Settings) -> StudentNet:
        """The one in the folder, whose layers may be others."""
        from shardcompute.draft_training.student.shape import StudentShape
        from shardcompute.draft_training.student.student_net import new_student

        with open_checkpoint(resolve(parse_reference(str(self._place.path)), settings)) as student:
            kept = tuple(range(student.spec.layer_count))
            shape = StudentShape(self._shape.family, kept, student.spec)
            return new_student(shape, student, self._teacher.device)

    def _examine(
        self,
        net: StudentNet,
        dataset: TrainingRows,
        held_out: Sequence[Span],
        frozen: FrozenWeights,
        what: str,
    ) -> Examination:
        from shardcompute.draft_training.student.student_evaluation import examine_student

        found = examine_student(net, dataset, held_out, frozen, self._rows)
        self._say(f"{what}: {found.score:.2f} tokens per round")
        return found


def _told(taught: TaughtStudent) -> dict[str, Any]:
    examination = taught.examination
    return {
        "taught_tokens": taught.tokens,
        "tokens_per_round": round(examination.score, 3),
        "held_out": asdict(examination.seen),
        "unseen_kinds": asdict(examination.unseen),
    }
