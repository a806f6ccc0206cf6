"""Downloads: models that people asked for, on their way to being served: found, fetched, opened, each in a thread.

What is being served leaves the list; what failed stays in it, with the reason, until it is asked for again or
dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.core.errors import CancelledError, ShardComputeError, UsageError
from shardcompute.core.kv_types import KvType
from shardcompute.core.settings import Settings
from shardcompute.node.admin.views import FetchView
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.formats.quantise import WEIGHT_FORMS
from shardcompute.weights.sources.reference import (
    EmbeddedReference,
    FolderReference,
    GgufReference,
    ModelReference,
    parse_reference,
)
from shardcompute.weights.sources.resolve import Fetch, resolve
from shardcompute.weights.sources.wheel import SMOLLM2

if TYPE_CHECKING:
    from shardcompute.weights.sources.progress import Progress

log = logging.getLogger(__name__)
Open = Callable[[ModelReference, Settings, "Progress", Fetch], Checkpoint]
Serve = Callable[[Checkpoint, str, int, "Progress"], None]
"""With a form and a number of chains. Takes over the checkpoint; if it raises, the checkpoint is still the caller's."""


def served_name(reference: ModelReference) -> str:
    """What a model is called once it is served."""
    match reference:
        case EmbeddedReference():
            return SMOLLM2.name
        case FolderReference(path):
            return path.name
        case GgufReference(path):
            return path.stem
        case _:
            return reference.repo


def check_order(form: str, chains: int) -> None:
    if form not in WEIGHT_FORMS:
        raise UsageError(f"there is no weight form {form!r}", hint=f"use one of {', '.join(WEIGHT_FORMS)}")
    if chains < 1:
        raise UsageError("a model is served by at least one chain", hint="ask for 1 or more")


def open_model(reference: ModelReference, settings: Settings, progress: Progress, fetch: Fetch) -> Checkpoint:
    return open_checkpoint(resolve(reference, settings, progress, fetch=fetch))


class _Fetch:
    """One model on its way; also the progress that the weights room reports to."""

    def __init__(self, view: FetchView, changed: Callable[[], None]) -> None:
        self.view = view
        self.is_cancelled = False
        self.thread: threading.Thread | None = None
        self._changed = changed

    def tell(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]
        self._changed()

    def start(self, label: str, total_bytes: int | None) -> None:
        self._check()
        self.tell(doing=label, done_bytes=0, total_bytes=total_bytes)

    def advance(self, count_bytes: int) -> None:
        self._check()
        self.tell(done_bytes=max(0, self.view.done_bytes + count_bytes))

    def finish(self) -> None:
        """What is done next says so itself."""

    def _check(self) -> None:
        if self.is_cancelled:
            raise CancelledError(f"{self.view.model} is not wanted any more")


class Fetches:
    """Methods may be called from any thread. `changed` is called, often, when there is something new to see."""

    def __init__(
        self, settings: Settings, serve: Serve, changed: Callable[[], None], *, open: Open = open_model
    ) -> None:
        self._settings = settings
        self._serve = serve
        self._changed = changed
        self._open = open
        self._lock = threading.Lock()
        self._fetches: dict[str, _Fetch] = {}

    def start(
        self,
        model: str,
        form: str,
        chains: int,
        *,
        replaces: bool = False,
        via_coordinator: bool = False,
        kv_type: KvType | None = None,
        adapters: Mapping[str, str] | None = None,
        parallel: Parallelism | None = None,
    ) -> FetchView:
        """Begin, or say how far the same order has come. UsageError for an order that cannot be meant. What lies at a
        hub stays there, unless it is to be sent from here."""
        check_order(form, chains)
        reference = parse_reference(model)
        return self._start(
            reference,
            replace(
                _first_view(reference, form, chains),
                replaces=replaces,
                via_coordinator=via_coordinator,
                kv_type=kv_type,
                adapters=dict(adapters or {}),
                parallel="" if parallel is None else str(parallel),
            ),
        )

    def pull(self, model: str) -> FetchView:
        """Begin to fetch what is not to be served: `chains` of its view is 0."""
        reference = parse_reference(model)
        return self._start(reference, _first_view(reference, "native", 0))

    def _start(self, reference: ModelReference, view: FetchView) -> FetchView:
        with self._lock:
            known = self._fetches.get(view.model)
            if known is not None and known.view.status == "fetching":
                _check_same(known.view, view)
                return known.view
            fetch = self._fetches[view.model] = _Fetch(view, self._changed)
            fetch.thread = threading.Thread(
                target=self._run, args=(fetch, reference), name=f"fetch {reference}", daemon=True
            )
            fetch.thread.start()
        self._changed()
        return view

    def cancel(self, model: str) -> bool:
        """Stop fetching what is known by this reference or name, or forget that it failed; whether there was any."""
        with self._lock:
            found = [key for key, fetch in self._fetches.items() if model in (key, fetch.view.name)]
            for key in found:
                self._fetches.pop(key).is_cancelled = True
        self._changed()
        return bool(found)

    def views(self) -> tuple[FetchView, ...]:
        with self._lock:
            return tuple(self._fetches[key].view for key in sorted(self._fetches))

    def join(self) -> None:
        """Wait for what is under way."""
        for thread in self._threads():
            thread.join()

    def close(self) -> None:
        threads = self._threads()
        with self._lock:
            for fetch in self._fetches.values():
                fetch.is_cancelled = True
        for thread in threads:
            thread.join()

    def _threads(self) -> list[threading.Thread]:
        with self._lock:
            return [fetch.thread for fetch in self._fetches.values() if fetch.thread is not None]

    def _run(self, fetch: _Fetch, reference: ModelReference) -> None:
        try:
            self._provide(fetch, reference)
        except CancelledError:
            self._forget(fetch)
        except ShardComputeError as error:
            fetch.tell(status="failed", error=str(error), error_kind=type(error).__name__)
        except Exception as error:
            log.exception("%s could not be opened", reference)
            fetch.tell(status="failed", error=f"something unforeseen: {type(error).__name__}")
        else:
            self._forget(fetch)

    def _provide(self, fetch: _Fetch, reference: ModelReference) -> None:
        is_kept = fetch.view.chains == 0 or fetch.view.via_coordinator
        checkpoint = self._open(reference, self._settings, fetch, "full" if is_kept else "lazy")
        with contextlib.ExitStack() as on_error:
            on_error.callback(checkpoint.close)
            if fetch.view.chains == 0:
                return
            folders = {name: Path(folder) for name, folder in fetch.view.adapters.items()}
            checkpoint = checkpoint.with_adapters(folders) if folders else checkpoint
            fetch.start(f"preparing {reference}", None)
            self._serve(checkpoint, fetch.view.form, fetch.view.chains, fetch)
            on_error.pop_all()

    def _forget(self, fetch: _Fetch) -> None:
        with self._lock:
            if self._fetches.get(fetch.view.model) is fetch:
                del self._fetches[fetch.view.model]
        self._changed()


def _first_view(reference: ModelReference, form: str, chains: int) -> FetchView:
    return FetchView(
        model=str(reference),
        name=served_name(reference),
        form=form,
        chains=chains,
        status="fetching",
        doing=f"looking for {reference}",
    )


def _check_same(known: FetchView, asked: FetchView) -> None:
    if (known.form, known.chains, known.kv_type, known.adapters, known.parallel) != (
        asked.form,
        asked.chains,
        asked.kv_type,
        asked.adapters,
        asked.parallel,
    ):
        kept = f" with KV in {known.kv_type}" if known.kv_type else ""
        kept += f" with adapters {', '.join(known.adapters)}" if known.adapters else ""
        kept += f" cut as {known.parallel}" if known.parallel else ""
        raise UsageError(
            f"{known.model} is already being fetched as {known.form} for {known.chains} chains{kept}",
            hint="wait until it is served, or drop it first",
        )
