"""Opening of a model for a command, with progress for whoever waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardcompute.cli.console import Screen
from shardcompute.cli.progress import waiting
from shardcompute.core.settings import Settings
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.node.local.service import EngineOptions, LocalService


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that is ready; `load_s` is how long fetching and loading took."""

    service: LocalService
    load_s: float


def open_with_progress(
    reference: str, settings: Settings, options: EngineOptions, screen: Screen, *, is_quiet: bool
) -> OpenModel:
    """The caller closes the service. `is_quiet` as in `progress.waiting`."""
    name = parse_reference(reference)  # a wrong name is said before anything is imported
    from shardcompute.node.local.service import open_model

    started = time.monotonic()
    with waiting(screen, f"opening {name}", is_quiet=is_quiet) as progress:
        service = open_model(reference, settings, options, progress)
    if service.remark and not is_quiet:
        screen.say(service.remark)
    asked, given = options.context_length, service.models()[0].context_length
    if asked is not None and given < asked:
        screen.say(f"the context is {given} tokens, not {asked}: the model was made for no more", "yellow")
    return OpenModel(service, time.monotonic() - started)
