"""`shardcompute show`: what a model is and what it would need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.cluster.completion import complete_fetched
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options.output import Json
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import ShardComputeError
from shardcompute.core.settings import Settings, load_settings
from shardcompute.weights.sources.disk import format_bytes
from shardcompute.weights.sources.reference import ModelReference, parse_reference

if TYPE_CHECKING:
    from shardcompute.cli.models.description import Description

_CPU = "onnx/cpu"


def show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model: smollm2, a name like qwen3:8b, a folder, a .gguf file or org/repo.",
            autocompletion=complete_fetched,
        ),
    ] = "",
    json: Json = False,
) -> None:
    """What a model is, the memory that it would need, and whether it fits now: on this machine, and in the cluster that
    runs here.

    Reads headers only: of a hub model that is not here, no weights are fetched, and of one that `list --catalogue`
    names nothing at all. A model that cannot be run is described as far as possible, with the reason.
    """
    from shardcompute.cli.models.fit import fit_here

    screen, settings = open_screen(), load_settings()
    description = _describe(screen, settings, parse_reference(model))
    fit = (
        None
        if description.sized is None or description.runs
        else fit_here(description.sized, settings.data_dir)
    )
    cluster = _cluster_fit(model) if description.problem is None else None
    if json:
        told = {
            name: value for name, value in asdict(replace(description, sized=None)).items() if name != "sized"
        }
        here = None if fit is None else {**asdict(fit), "missing_bytes": fit.missing_bytes}
        screen.write_json({**told, "fit": here, "fit_in_cluster": cluster})
        return
    rows = list(_rows(description))
    rows += [("this machine", fit.words)] if fit is not None else []
    rows += [("cluster", cluster)] if cluster is not None else []
    screen.write_table((), rows)


def _describe(screen: Screen, settings: Settings, reference: ModelReference) -> Description:
    from shardcompute.cli.models.description import describe, describe_known
    from shardcompute.node.admin.dry_run import unfetched
    from shardcompute.weights.sources.resolve import resolve

    known = unfetched(reference, settings)
    if known is not None:
        return describe_known(known)
    with (
        waiting(screen, f"reading {reference}", is_quiet=True) as progress,
        resolve(reference, settings, progress, fetch="lazy") as files,
    ):
        return describe(files)


def _cluster_fit(model: str) -> str | None:
    """What the cluster on this machine says; None where none runs."""
    from shardcompute.cli.cluster.load import name_for
    from shardcompute.cli.cluster.text import describe_fit

    address = ClusterLocation().find()
    if address is None:
        return None
    try:
        with address.connect() as client:
            return describe_fit(client.plan(name_for(address, model)))
    except ShardComputeError as error:
        return f"does not say: {error.message}"


def _rows(description: Description) -> Iterator[tuple[str, str]]:
    yield "name", description.name
    yield "reference", description.reference
    if description.problem is not None:
        yield "cannot run", description.problem
        yield "hint", description.hint
    if description.runs:
        yield "runs", description.runs
    if not description.is_fetched:
        yield "not here", "this is what the catalogue says of it; nothing was fetched"
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
    if description.file:
        yield "file", description.file
    if description.licence:
        yield "licence", description.licence
    if description.abilities:
        yield "made for", ", ".join(description.abilities)
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
