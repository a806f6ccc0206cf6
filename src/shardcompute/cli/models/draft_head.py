"""`shardcompute draft-head …`: what lets a cluster's first or last machine guess tokens ahead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import Model, draft_heads_folder
from shardcompute.cli.options.engine import Threads, WeightForm, Weights
from shardcompute.cli.progress import waiting
from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.weights.checkpoint import Checkpoint

app = typer.Typer(
    help="Fit what a cluster's machines need to guess tokens ahead.",
    no_args_is_help=True,
)
_TOKENS = 12_000
_KV_TOKENS = 16 * 256


@app.callback()
def draft_head() -> None:
    """Fit what a cluster's machines need to guess tokens ahead."""


@app.command()
def fit(
    model: Model = "",
    layer: Annotated[
        list[int] | None,
        typer.Option(
            "--layer",
            metavar="N",
            min=1,
            help="Where the first machine's layers end, as `plan` shows it; may be repeated. By default behind each.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option("--tokens", metavar="N", min=256, help="Tokens of the model's own answers to fit on."),
    ] = _TOKENS,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A file of text like that which the model will read and write, to fit on as well.",
        ),
    ] = None,
    weights: Weights = WeightForm.NATIVE,
    threads: Threads = None,
) -> None:
    """Fit draft heads for a model, where all of it fits into memory.

    The model answers some questions, and one linear map behind each layer learns to foresee what the other layers
    will make of its output. What is fitted lies in the data folder, where `up --self-draft` finds it.
    """
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.sources.resolve import resolve

    screen, settings = open_screen(), load_settings()
    reference = parse_reference(model)
    with (
        waiting(screen, f"opening {reference}") as progress,
        open_checkpoint(resolve(reference, settings, progress)) as checkpoint,
    ):
        from shardcompute.backends.executor import ExecutorOptions
        from shardcompute.draft_training.lens_fit import fit_lenses
        from shardcompute.node.local.service import default_threads
        from shardcompute.node.weights.draft_heads import DraftHeadStore

        spec = checkpoint.spec
        kv_bytes = _KV_TOKENS * spec.kv_bytes_per_token_and_layer * spec.layer_count
        engine = ExecutorOptions(
            kv_bytes=kv_bytes, context_length=256, threads=threads or settings.threads or default_threads()
        )
        lenses = fit_lenses(
            checkpoint,
            layer or range(1, spec.layer_count),
            engine,
            tokens=tokens,
            form=weights.value,
            text="" if text is None else text.read_text(errors="replace"),
            progress=progress,
        )
        folder = DraftHeadStore(draft_heads_folder(settings)).save(checkpoint, lenses)
        screen.say(f"{len(lenses)} draft heads of {checkpoint.name} lie in {folder}")


@app.command()
def train(
    model: Model = "",
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="M", min=0.1, help="How long it may take, all in all.")
    ] = 10.0,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=1024,
            help="Talk for so many tokens and train for --epochs over them, however long that takes.",
        ),
    ] = None,
    epochs: Annotated[
        float,
        typer.Option("--epochs", metavar="E", min=0.1, help="With --tokens: how often to learn from each."),
    ] = 4.0,
    blocks: Annotated[
        int, typer.Option("--blocks", metavar="N", min=0, max=16, help="Layers of the drafter.")
    ] = 2,
    width: Annotated[
        int | None,
        typer.Option(
            "--width", metavar="N", min=32, help="Width of its layers, by default four times the model's."
        ),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", metavar="N", min=16, help="Most tokens that it may guess.")
    ] = 16_384,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")
    ] = "auto",
    sessions: Annotated[
        int | None,
        typer.Option(
            "--sessions",
            metavar="N",
            min=1,
            help="Conversations side by side; by default what suits the device.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="What chance begins with.")] = 1,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A file of text like that which the model will read and write, to learn from as well.",
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Train a drafter for a model's last machine, where all of the model fits into memory and torch is installed.

    The model talks to itself, and a small network learns to foresee how it goes on. A GPU is a hundred times as fast
    at this as a CPU. What was trained lies in the data folder, where `up` finds it.
    """
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.sources.resolve import resolve

    screen, settings = open_screen(), load_settings()
    reference = parse_reference(model)
    with (
        waiting(screen, f"opening {reference}") as progress,
        open_checkpoint(resolve(reference, settings, progress)) as checkpoint,
    ):
        from shardcompute.draft_training.fit import FitPlan, fit_ahead
        from shardcompute.node.local.service import default_threads
        from shardcompute.node.weights.draft_heads import DraftHeadStore

        plan = FitPlan(
            minutes=minutes,
            tokens=tokens,
            epochs=epochs,
            blocks=blocks,
            width=width or 0,
            vocabulary=vocabulary,
            device=device,
            sessions=sessions or 0,
            threads=threads or settings.threads or default_threads(),
            seed=seed,
        )
        content = "" if text is None else text.read_text(errors="replace")
        fit = fit_ahead(checkpoint, plan, text=content, progress=progress, say=screen.say)
        path = DraftHeadStore(draft_heads_folder(settings)).save_ahead(checkpoint, fit.weights)
        screen.say(f"{path}: {1 + fit.accepted:.2f} tokens per round are to be expected")


def check_fitted(checkpoint: Checkpoint, folder: Path | None, model: str) -> None:
    """Raises UsageError where drafts are wanted and nothing was fitted for the model."""
    from shardcompute.core.errors import UsageError
    from shardcompute.node.weights.draft_heads import DraftHeadStore

    if folder is not None and not DraftHeadStore(folder).attachments(checkpoint):
        raise UsageError(
            f"no draft heads have been fitted for {checkpoint.name}, so nothing can be drafted with --self-draft",
            hint=f"fit them once: shardcompute draft-head fit {model}".rstrip(),
        )
