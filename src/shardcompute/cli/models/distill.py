"""`shardcompute distill`: a student of a model, a small one of its vocabulary that drafts for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import Model
from shardcompute.cli.options.engine import Threads
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.reference import parse_reference

_KEY_LETTERS = 12

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Where to keep it; by default in the data folder."),
]
KeptLayers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="N|I,J,…",
        help="How many of the model's layers it begins with, or which (from 0); by default one in eight, the "
        "first and the last among them.",
    ),
]
Minutes = Annotated[
    float,
    typer.Option("--minutes", metavar="M", min=0.1, help="How long to talk and to teach, both together."),
]
TaughtTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=1024,
        help="Instead: talk for so many tokens and teach for --epochs over them, however long it takes.",
    ),
]
Epochs = Annotated[
    float,
    typer.Option("--epochs", metavar="E", min=0.1, help="With --tokens: how often each is learned from."),
]
TeachingDevice = Annotated[
    str, typer.Option("--device", metavar="NAME", help="What to compute on: auto, cpu, cuda, cuda:1 or mps.")
]
SessionCount = Annotated[
    int | None,
    typer.Option(
        "--sessions", metavar="N", min=1, help="Conversations side by side, if not what suits the device."
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Begins what is left to chance.")]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Text like that which the model will meet, to be read as well.",
    ),
]
IsFresh = Annotated[
    bool, typer.Option("--fresh", help="Begin anew, whatever a run that was cut short has left.")
]


def distill(
    model: Model = "",
    out: Out = None,
    layers: KeptLayers = None,
    minutes: Minutes = 20.0,
    tokens: TaughtTokens = None,
    epochs: Epochs = 4.0,
    device: TeachingDevice = "auto",
    sessions: SessionCount = None,
    seed: Seed = 1,
    text: TextFile = None,
    is_fresh: IsFresh = False,
    threads: Threads = None,
) -> None:
    """Make a student: a small model of a model's own vocabulary and layers, which drafts for it.

    The model talks to itself, and some of its layers learn to say the same. That needs torch, memory for all of the
    model, and better a GPU than a CPU. A run that was cut short is gone on with by the next. On text that was held out
    the student is compared with its untaught layers and with the one in its folder; the best is kept, as an ordinary
    checkpoint folder for `--draft-model`.
    """
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.sources.resolve import resolve

    screen, settings = open_screen(), load_settings()
    reference, kept = parse_reference(model), _parse_layers(layers)
    with (
        waiting(screen, f"opening {reference}") as progress,
        open_checkpoint(resolve(reference, settings, progress)) as parent,
    ):
        from shardcompute.backends.processor import default_threads
        from shardcompute.draft_training.student.student_run import StudentOptions, teach_student
        from shardcompute.weights.served import weights_key

        folder = (
            out
            or settings.data_dir / "students" / f"{_slug(parent.name)}-{weights_key(parent)[:_KEY_LETTERS]}"
        )
        options = StudentOptions(
            minutes=minutes,
            tokens=tokens,
            epochs=epochs,
            layers=kept,
            device=device,
            sessions=sessions or 0,
            threads=threads or settings.threads or default_threads(),
            seed=seed,
        )
        content = "" if text is None else text.read_text(errors="replace")
        taught = teach_student(
            parent,
            options,
            folder.absolute(),
            settings,
            text=content,
            is_fresh=is_fresh,
            progress=progress,
            say=screen.say,
        )
    rounds = f"{taught.examination.score:.2f} tokens per round"
    if not taught.is_better:
        others = [taught.untaught, *([] if taught.in_use is None else [taught.in_use])]
        best = max(other.score for other in others)
        screen.say(
            f"not kept: {rounds} are to be expected of it, and {best:.2f} of what was there before; teach longer with "
            "--minutes"
        )
        return
    screen.say(f"{rounds} are to be expected; draft with it: --draft-model {folder.absolute()}")


def _parse_layers(text: str | None) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--layers is {text!r}", hint="give a number of layers, or which ones: --layers 0,10,20,29"
        ) from error
    return numbers if "," in text else numbers[0]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip("-.") or "model"
