"""`shardcompute draft-head …`: what lets a cluster's first machine guess tokens ahead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli import options, swarm_options
from shardcompute.cli.console import open_screen
from shardcompute.cli.options import WeightForm
from shardcompute.cli.progress import waiting
from shardcompute.core.settings import load_settings
from shardcompute.weights.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.weights.checkpoint import Checkpoint

app = typer.Typer(
    help="Fit what a cluster's first machine needs to guess tokens ahead (`up --self-draft`).",
    no_args_is_help=True,
)
_TOKENS = 12_000
_KV_TOKENS = 16 * 256


@app.callback()
def draft_head() -> None:
    """Fit what a cluster's first machine needs to guess tokens ahead (`up --self-draft`)."""


@app.command()
def fit(
    model: swarm_options.Model = "",
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
    weights: options.Weights = WeightForm.NATIVE,
    threads: options.Threads = None,
) -> None:
    """Fit draft heads for a model, where all of it fits into memory.

    The model answers some questions, and one linear map behind each layer learns to foresee what the other layers
    will make of its output. What is fitted lies in the data folder, where `up --self-draft` finds it.
    """
    from shardcompute.weights.checkpoint import open_checkpoint
    from shardcompute.weights.sources import resolve

    screen, settings = open_screen(), load_settings()
    reference = parse_reference(model)
    with (
        waiting(screen, f"opening {reference}") as progress,
        open_checkpoint(resolve(reference, settings, progress)) as checkpoint,
    ):
        from shardcompute.backends.executor import ExecutorOptions
        from shardcompute.node.draft_heads import DraftHeadStore
        from shardcompute.node.local_service import default_threads
        from shardcompute.runtime.lens_fit import fit_lenses

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
        folder = DraftHeadStore(swarm_options.draft_heads_folder(settings)).save(checkpoint, lenses)
        screen.say(f"{len(lenses)} draft heads of {checkpoint.name} lie in {folder}")


def check_fitted(checkpoint: Checkpoint, folder: Path | None, model: str) -> None:
    """Raises UsageError where drafts are wanted and nothing was fitted for the model."""
    from shardcompute.core.errors import UsageError
    from shardcompute.node.draft_heads import DraftHeadStore

    if folder is not None and not DraftHeadStore(folder).attachments(checkpoint):
        raise UsageError(
            f"no draft heads have been fitted for {checkpoint.name}, so nothing can be drafted with --self-draft",
            hint=f"fit them once: shardcompute draft-head fit {model}".rstrip(),
        )
