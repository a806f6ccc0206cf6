"""`shardcompute draft-head …`: what lets a cluster's last machine draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.cluster.completion import complete_served
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import Model, draft_heads_folder
from shardcompute.cli.options.engine import Threads
from shardcompute.cli.options.records import with_options
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import Settings, load_settings
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient
    from shardcompute.draft_training.train import TrainedDraftHead, TrainingOptions

app = typer.Typer(
    help="Train what a cluster's last machine drafts tokens with.",
    no_args_is_help=True,
)

Minutes = Annotated[
    float, typer.Option("--minutes", metavar="M", min=0.1, help="How long it may take, all in all.")
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=1024,
        help="Talk for so many tokens and train for --epochs over them, however long that takes.",
    ),
]
Epochs = Annotated[
    float, typer.Option("--epochs", metavar="E", min=0.1, help="With --tokens: how often to learn from each.")
]
Layers = Annotated[int, typer.Option("--layers", metavar="N", min=1, max=4, help="Layers of the drafter.")]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        min=32,
        help="Width inside its layers, by default eight thirds of the model's.",
    ),
]
Vocabulary = Annotated[
    int, typer.Option("--vocabulary", metavar="N", min=16, help="Most tokens that it may draft.")
]
TrainingDevice = Annotated[
    str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")
]
Conversations = Annotated[
    int | None,
    typer.Option(
        "--sessions",
        metavar="N",
        min=1,
        help="Conversations side by side; by default what suits the device, or eight through a cluster.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="What chance begins with.")]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="A file of text like that which the model will read and write, to learn from as well.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what a run that was cut short has left.")]


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """How a drafter is trained, wherever its text comes from."""

    minutes: Minutes = 10.0
    tokens: Tokens = None
    epochs: Epochs = 4.0
    layers: Layers = 2
    width: Width = None
    vocabulary: Vocabulary = 16_384
    device: TrainingDevice = "auto"
    sessions: Conversations = None
    seed: Seed = 1
    text: TextFile = None
    is_fresh: Fresh = False
    threads: Threads = None

    def plan(self, settings: Settings) -> TrainingOptions:
        from shardcompute.backends.processor import default_threads
        from shardcompute.draft_training.train import TrainingOptions

        return TrainingOptions(
            minutes=self.minutes,
            tokens=self.tokens,
            epochs=self.epochs,
            layers=self.layers,
            width=self.width or 0,
            vocabulary=self.vocabulary,
            device=self.device,
            sessions=self.sessions or 0,
            threads=self.threads or settings.threads or default_threads(),
            seed=self.seed,
        )

    def read_text(self) -> str:
        return "" if self.text is None else self.text.read_text(errors="replace")


@app.callback()
def draft_head() -> None:
    """Train what a cluster's last machine drafts tokens with."""


@app.command()
@with_options
def train(*, model: Model = "", training: TrainingChoice) -> None:
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
        from shardcompute.draft_training.train import train_draft_head
        from shardcompute.models.draft_head import decode_draft_head
        from shardcompute.node.weights.draft_heads import (
            draft_head_attachments,
            save_draft_head,
            training_file,
        )

        folder = draft_heads_folder(settings)
        unfinished = training_file(folder, checkpoint)
        if training.is_fresh:
            unfinished.unlink(missing_ok=True)
        in_use = [
            decode_draft_head(content, checkpoint.spec.hidden)
            for content in draft_head_attachments(checkpoint, folder)[0].values()
        ]
        trained = train_draft_head(
            checkpoint,
            training.plan(settings),
            text=training.read_text(),
            in_use=in_use[0] if in_use else None,
            resumed=unfinished,
            progress=progress,
            say=screen.say,
        )
        unfinished.unlink(missing_ok=True)
        if not trained.is_better:
            screen.say(_refusal(trained))
            return
        path = save_draft_head(folder, checkpoint, trained.weights)
        screen.say(f"{path}: {_rounds(trained)} are to be expected")


@app.command()
@with_options
def teach(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Its name as `status` tells it; may be left out where one is served.",
            autocompletion=complete_served,
        ),
    ] = "",
    training: TrainingChoice,
    at: ClusterLocation,
) -> None:
    """Teach a drafter for a model that a cluster serves, which no machine needs to hold whole.

    The model talks to itself through the cluster, in sessions like any other's, and this machine, which needs torch,
    learns from the states that its last stage had meanwhile. A run that was cut short is gone on with by the next one.
    What was taught is compared, on text that was held out, with the drafter in use: where it is better, the cluster
    keeps it and its last machines draft with it at once.
    """
    screen, settings = open_screen(), load_settings()
    with at.connect() as client, waiting(screen, "asking the cluster") as progress:
        name = model or _only_model(client)
        from shardcompute.draft_training.train import check_plan

        plan = training.plan(settings)
        check_plan(plan)
        from shardcompute.draft_training.swarm.taught_model import TaughtModel
        from shardcompute.draft_training.swarm.teach import TeachingFiles, teach_draft_head
        from shardcompute.models.draft_head import encode_draft_head

        remote = TaughtModel(client, name)
        files = TeachingFiles(settings.data_dir / "teaching" / remote.card.content)
        if training.is_fresh:
            files.clear()
        trained = teach_draft_head(
            remote, plan, files, text=training.read_text(), progress=progress, say=screen.say
        )
        files.training.unlink(missing_ok=True)
        if not trained.is_better:
            screen.say(f"{_refusal(trained)}: what was said is kept, and a longer run begins with it")
            return
        taken = client.take_draft_head(name, encode_draft_head(trained.weights))
        files.clear()
    screen.say(f"{taken.path}: {_rounds(trained)} are to be expected; in use by {taken.in_use} of its chains")
    for problem in taken.problems:
        screen.say(f"not yet, but from the next load on: {problem}", "yellow")


def _only_model(client: ClusterClient) -> str:
    served = client.models()
    if len(served) != 1:
        raise UsageError(
            f"{len(served)} models are served", hint=f"name one of them: {', '.join(served) or 'load one'}"
        )
    return served[0]


def _rounds(trained: TrainedDraftHead) -> str:
    return f"{trained.examination.score:.2f} tokens per round"


def _refusal(trained: TrainedDraftHead) -> str:
    assert trained.in_use is not None
    return (
        f"not taken into use: {_rounds(trained)} are to be expected of it, and {trained.in_use.score:.2f} "
        "of the one in use; train longer with --minutes"
    )
