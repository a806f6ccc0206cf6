"""`shardcompute show`: what a model is and what it would need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.completion import complete_fetched
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.output import Json
from shardcompute.cli.progress import waiting
from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.disk import format_bytes
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.cli.models.description import Description

_CPU = "onnx/cpu"


def show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model: smollm2, a folder, a .gguf file or org/repo.",
            autocompletion=complete_fetched,
        ),
    ] = "",
    json: Json = False,
) -> None:
    """What a model is, and the memory that it would need.

    Reads headers only: of a hub model that is not here, no weights are fetched. A model that cannot be run is
    described as far as possible, with the reason.
    """
    from shardcompute.cli.models.description import describe
    from shardcompute.weights.sources.resolve import resolve

    screen, settings = open_screen(), load_settings()
    reference = parse_reference(model)
    with (
        waiting(screen, f"reading {reference}", is_quiet=True) as progress,
        resolve(reference, settings, progress, fetch="lazy") as files,
    ):
        description = describe(files)
    if json:
        screen.write_json(asdict(description))
    else:
        screen.write_table((), list(_rows(description)))


def _rows(description: Description) -> Iterator[tuple[str, str]]:
    yield "name", description.name
    yield "reference", description.reference
    if description.problem is not None:
        yield "cannot run", description.problem
        yield "hint", description.hint
    if description.runs:
        yield "runs", description.runs
    yield "architecture", description.architecture
    yield from _shape_rows(description)
    if description.quantisation:
        yield "quantised by", description.quantisation
    for kind in description.weight_types:
        held = f"; on a CPU in {kind.held[_CPU]}" if _CPU in kind.held else ""
        yield "weights", f"{kind.name}: {kind.tensors} tensors, {format_bytes(kind.size_bytes)}{held}"
    if description.llamacpp:
        yield "llama.cpp", description.llamacpp
    yield "file size", format_bytes(description.size_bytes)
    yield "file", description.file
    if description.has_chat_template is not None:
        yield "chat template", "yes" if description.has_chat_template else "no"
    yield from _memory_rows(description)


def _shape_rows(description: Description) -> Iterator[tuple[str, str]]:
    shape = description.shape
    if shape is None:
        return
    yield "family", shape.family
    yield "parameters", f"{shape.parameters:,}"
    yield "layers", str(shape.layers)
    yield "hidden", str(shape.hidden)
    yield "heads", f"{shape.heads} of {shape.head_dim}, {shape.kv_heads} for keys and values"
    yield "context", f"{shape.context_length:,} tokens"
    yield "vocabulary", f"{shape.vocabulary:,}"
    for note in shape.notes:
        yield "note", note


def _memory_rows(description: Description) -> Iterator[tuple[str, str]]:
    memory = description.memory
    if memory is None:
        return
    total = memory.held_weights_bytes + memory.scratch_bytes + memory.kv_reserved_bytes
    yield (
        "memory",
        f"{format_bytes(total)} on a CPU: {format_bytes(memory.held_weights_bytes)} held weights, "
        f"{format_bytes(memory.scratch_bytes)} scratch, {format_bytes(memory.kv_reserved_bytes)} KV reserved "
        f"for a context of {memory.context:,} tokens ({format_bytes(memory.kv_bytes_per_token)} each)",
    )
