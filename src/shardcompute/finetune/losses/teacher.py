"""A teacher for distillation: a whole model in this process, whose log-probabilities a student is to come near to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.nn import functional

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.data.examples import TrainingUnit
from shardcompute.finetune.pipeline import LearningPipeline, StepOutcome
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.stage import FinetuneStage, StageOptions
from shardcompute.models.spec import Stage
from shardcompute.weights.checkpoint import Checkpoint

_COMPARED = 32


class LocalTeacher:
    """A frozen model. Its log-probabilities are those of the plan's temperature."""

    def __init__(self, checkpoint: Checkpoint, plan: FinetunePlan, options: StageOptions) -> None:
        self._temperature = plan.loss.temperature
        whole = Stage(0, checkpoint.spec.layer_count, checkpoint.spec.layer_count)
        source = checkpoint.source(whole)
        self._stage = FinetuneStage(
            checkpoint.spec, checkpoint.layout, whole, source, plan, options, modules=()
        )

    def log_probs(self, batch: MicroBatch) -> Float32:
        logits = self._stage.predict(batch, is_taught=False)
        found: Float32 = functional.log_softmax(logits / self._temperature, dim=-1).cpu().numpy()
        return found

    def with_words(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Batches with what it says of them."""
        return [replace(batch, teacher=self.log_probs(batch)) for batch in batches]


class DistillingPipeline:
    """A pipeline each of whose batches comes with what a teacher says of it."""

    def __init__(self, inner: LearningPipeline, teacher: LocalTeacher) -> None:
        self._inner, self._teacher = inner, teacher

    def learn(self, step: int, batches: Sequence[MicroBatch]) -> StepOutcome:
        return self._inner.learn(step, self._teacher.with_words(batches))

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        # One at a time: a teacher's words take more room than all else of a batch.
        counts = [len(batch.targets) for batch in batches]
        losses = [self._inner.evaluate(self._teacher.with_words([batch])) for batch in batches]
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)

    def state(self) -> dict[str, Float32]:
        return self._inner.state()

    def load_state(self, state: Mapping[str, Float32]) -> None:
        self._inner.load_state(state)

    @property
    def wire_bytes(self) -> int:
        """What went between the stages, where these are on several machines."""
        return int(getattr(self._inner, "wire_bytes", 0))


def check_teacher(
    student: Checkpoint, teacher: Checkpoint, examples: Sequence[TrainingUnit], longest: int
) -> None:
    """UsageError where a teacher does not speak of the student's tokens."""
    if teacher.spec.vocab_size != student.spec.vocab_size:
        raise UsageError(
            f"{teacher.name} knows {teacher.spec.vocab_size} tokens, and {student.name} {student.spec.vocab_size}",
            hint="choose a teacher of the same family, with the same tokenizer",
        )
    if teacher.spec.context_length < longest:
        raise UsageError(
            f"{teacher.name} reads {teacher.spec.context_length} tokens at most, and examples have up to {longest}",
            hint="lower --max-length",
        )
    ours, theirs = student.tokenizer(), teacher.tokenizer()
    for example in examples[:_COMPARED]:
        ids = [int(each) for each in example.sequences[0].ids]
        if ours.decode(ids) != theirs.decode(ids):
            raise UsageError(
                f"{teacher.name} and {student.name} have different tokenizers",
                hint="choose a teacher of the same family",
            )
