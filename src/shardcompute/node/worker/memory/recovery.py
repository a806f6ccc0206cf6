"""Recovery of a lowered memory offer: measures on a clock, as long as less than all is offered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class RecoveringOffer(Protocol):
    """Whoever owns the offer. Methods may be called from any thread."""

    def measure_in_s(self) -> float | None:
        """How long until free memory is to be measured; None while all is offered."""

    def measured(self, spare_bytes: int | None) -> bool:
        """So much is free besides what is held; True where more is offered for it."""


class OfferRecovery:
    """A thread that lives while an offer is lowered. `measure` may take as long as a device's driver likes: nobody
    waits for it. `on_raised` hears that more is offered."""

    def __init__(
        self, offer: RecoveringOffer, measure: Callable[[], int | None], on_raised: Callable[[], None]
    ) -> None:
        self._offer = offer
        self._measure = measure
        self._on_raised = on_raised
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """The offer was lowered."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="memory offer", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Measure no more. A measurement that does not end is left alone."""
        self._closing.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                wait_s = self._offer.measure_in_s()
                if wait_s is None:
                    self._thread = None
                    return
            if self._closing.wait(wait_s):
                return
            try:
                spare_bytes = self._measure()
            except Exception as error:
                # A driver may say anything; without its word the offer stays as it is.
                log.info("free memory could not be measured: %s", error)
                spare_bytes = None
            if not self._closing.is_set() and self._offer.measured(spare_bytes):
                self._on_raised()
