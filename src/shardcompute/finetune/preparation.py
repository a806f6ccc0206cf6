"""Preparation of a run: files read and checked, examples made, and the plan worked out, before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardcompute.core.errors import UsageError
from shardcompute.finetune.data.batches import steps_of
from shardcompute.finetune.data.dataset import read_dataset
from shardcompute.finetune.data.examples import ChatTokenizer, ExampleSet, TrainingUnit, make_examples
from shardcompute.finetune.plan import FinetunePlan, check_finetune_plan
from shardcompute.weights.sources.disk import check_room
from shardcompute.weights.sources.resolve import ModelFiles

RESUME_FOLDER = "resume"
_ADAPTER = "adapter_model.safetensors"
_CARD_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that can begin. `plan` has its number of steps."""

    plan: FinetunePlan
    taught: ExampleSet
    held_out: tuple[TrainingUnit, ...]
    data: Path
    sha256: str

    @property
    def mean_tokens(self) -> float:
        return self.taught.tokens / len(self.taught.examples)


def prepare_run(
    data: Path,
    held_out: Path | None,
    tokenizer: ChatTokenizer,
    plan: FinetunePlan,
    *,
    epochs: float,
    context_length: int,
    vocab_size: int,
) -> PreparedRun:
    """Read files and make examples; of a plan without steps, so many epochs are taken."""
    longest = min(plan.longest, context_length)
    has_preferences = plan.loss.kind == "dpo"
    dataset = read_dataset(data, has_preferences=has_preferences)
    watched = None if held_out is None else read_dataset(held_out, has_preferences=has_preferences)
    taught = make_examples(dataset, tokenizer, longest)
    _check_ids(taught.examples, vocab_size)
    examples = () if watched is None else make_examples(watched, tokenizer, longest).examples
    _check_ids(examples, vocab_size)
    batch = min(plan.batch, len(taught.examples))
    steps = plan.steps or steps_of(len(taught.examples), batch, epochs)
    changed = replace(
        plan,
        steps=steps,
        batch=batch,
        micro_batches=min(plan.micro_batches, batch),
        longest=longest,
    )
    return PreparedRun(check_finetune_plan(changed), taught, examples, data, dataset.sha256)


def prepare_folder(out: Path, needed_bytes: int, *, is_fresh: bool) -> Path:
    """The folder for checkpoints of a run whose result goes to `out`; there is room for both."""
    if (out / _ADAPTER).exists() and not is_fresh:
        raise UsageError(f"{out} has an adapter already", hint="choose another --out, or use --fresh")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hint="choose a folder for --out")
    resume = out / RESUME_FOLDER
    try:
        resume.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{resume} cannot be made: {error.strerror or error}", hint="choose another --out"
        ) from error
    check_room(out, needed_bytes, "a run with its checkpoints")
    if is_fresh:
        clear_resume(out)
    return resume


def clear_resume(out: Path) -> None:
    """Forget what a run has left to go on from."""
    for file in (out / RESUME_FOLDER).glob("*"):
        file.unlink(missing_ok=True)


def licence_of(files: ModelFiles) -> str:
    """What the base's own card says, "unknown" where it says nothing."""
    text = (files.read_text("README.md") or "")[:_CARD_CHARS] if files.kind != "gguf" else ""
    head = text.split("---")[1] if text.startswith("---") and text.count("---") > 1 else ""
    for line in head.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return value.strip().strip("\"'")[:80]
    return "unknown"


def _check_ids(units: tuple[TrainingUnit, ...], vocab_size: int) -> None:
    for example in (each for unit in units for each in unit.sequences):
        if int(example.ids.max()) >= vocab_size:
            raise UsageError(
                f"the tokenizer makes token {int(example.ids.max())}, and the model knows {vocab_size}",
                hint="tokenizer and weights are not of one model",
            )
