"""`shardcompute draft-head …`: what lets a cluster's last machine draft tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import Model, draft_heads_folder
from shardcompute.cli.options.engine import Threads
from shardcompute.cli.progress import waiting
from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.reference import parse_reference

app = typer.Typer(
    help="Train what a cluster's last machine drafts tokens with.",
    no_args_is_help=True,
)


@app.callback()
def draft_head() -> None:
    """Train what a cluster's last machine drafts tokens with."""


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
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", min=1, max=4, help="Layers of the drafter.")
    ] = 2,
    width: Annotated[
        int | None,
        typer.Option(
            "--width",
            metavar="N",
            min=32,
            help="Width inside its layers, by default eight thirds of the model's.",
        ),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", metavar="N", min=16, help="Most tokens that it may draft.")
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
    is_fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what a run that was cut short has learned.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Train a drafter for a model's last machine, where all of the model fits into memory and torch is installed.

    The model talks to itself, and a small network learns to tell how it goes on. A GPU is a hundred times as fast
    at this as a CPU. A run that was cut short is gone on with by the next one. What was trained is compared, on text
    that was held out, with the drafter in use: where it is better it is kept in the data folder, where `up` finds it.
    """
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.sources.resolve import resolve

    screen, settings = open_screen(), load_settings()
    reference = parse_reference(model)
    with (
        waiting(screen, f"opening {reference}") as progress,
        open_checkpoint(resolve(reference, settings, progress)) as checkpoint,
    ):
        from shardcompute.backends.processor import default_threads
        from shardcompute.draft_training.train import TrainingOptions, train_draft_head
        from shardcompute.models.draft_head import decode_draft_head
        from shardcompute.node.weights.draft_heads import (
            draft_head_attachments,
            save_draft_head,
            training_file,
        )

        plan = TrainingOptions(
            minutes=minutes,
            tokens=tokens,
            epochs=epochs,
            layers=layers,
            width=width or 0,
            vocabulary=vocabulary,
            device=device,
            sessions=sessions or 0,
            threads=threads or settings.threads or default_threads(),
            seed=seed,
        )
        folder = draft_heads_folder(settings)
        unfinished = training_file(folder, checkpoint)
        if is_fresh:
            unfinished.unlink(missing_ok=True)
        in_use = [
            decode_draft_head(content, checkpoint.spec.hidden)
            for content in draft_head_attachments(checkpoint, folder)[0].values()
        ]
        trained = train_draft_head(
            checkpoint,
            plan,
            text="" if text is None else text.read_text(errors="replace"),
            in_use=in_use[0] if in_use else None,
            resumed=unfinished,
            progress=progress,
            say=screen.say,
        )
        unfinished.unlink(missing_ok=True)
        rounds = f"{trained.examination.score:.2f} tokens per round"
        if not trained.is_better:
            assert trained.in_use is not None
            screen.say(
                f"not taken into use: {rounds} are to be expected of it, and {trained.in_use.score:.2f} of the one in "
                "use; train longer with --minutes"
            )
            return
        path = save_draft_head(folder, checkpoint, trained.weights)
        screen.say(f"{path}: {rounds} are to be expected")
