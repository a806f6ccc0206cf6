"""Completion of names: what shells may offer for a word that is being typed.

Names come from this machine's disk and from the cluster that runs on it, never from further away: nobody waits for
Tab. Whatever goes wrong means that there is nothing to offer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardcompute.cli.cluster.access import ClusterLocation

if TYPE_CHECKING:
    from shardcompute.cluster_client import ClusterClient

_PATIENCE_S = 1.0


def complete_fetched(incomplete: str) -> list[str]:
    """Models on this machine's disk, the embedded one, and the names of the catalogue."""
    return _matching(incomplete, _fetched)


def complete_served(ctx: typer.Context, incomplete: str) -> list[str]:
    """Models that the cluster on this machine serves."""
    return _matching(incomplete, lambda: _ask(ctx, lambda client: client.models()))


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of nodes of the cluster on this machine; ids where names are not typed so far."""

    def names(client: ClusterClient) -> list[str]:
        there = [node for node in client.state().nodes if node.status != "gone"]
        by_name = [node.name for node in there]
        return (
            by_name if any(name.startswith(incomplete) for name in by_name) else [node.id for node in there]
        )

    return _matching(incomplete, lambda: _ask(ctx, names))


def _matching(incomplete: str, names: Callable[[], Iterable[str]]) -> list[str]:
    with contextlib.suppress(Exception):
        return sorted({name for name in names() if name.startswith(incomplete)})
    return []


def _fetched() -> list[str]:
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.cache import ModelCache
    from shardcompute.weights.sources.catalogue import known_models

    return [
        "smollm2",
        *(model.full_name for model in known_models()),
        *(str(entry.reference) for entry in ModelCache(load_settings().data_dir).list_entries()),
    ]


def _ask(ctx: typer.Context, question: Callable[[ClusterClient], list[str]]) -> list[str]:
    given: dict[str, Any] = ctx.params
    if given.get("url"):
        return []
    folder = given.get("data_dir")
    address = ClusterLocation(None, given.get("api_key_file"), Path(folder) if folder else None).find()
    if address is None:
        return []
    with address.connect(_PATIENCE_S) as client:
        return question(client)
