"""One generation, wherever it is computed: on the worker that hosts the chain's driver, and here if that one fails.

Sampling depends on seed and position alone, so the driver here goes on from the tokens that have arrived, and the
answer is the one that it would have been.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.generation import Delta, GenerationRequest, TokenChoice
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.generation import Emit
from shardcompute.node.driver.hosted_client import HostedDriverClient, OnSession

log = logging.getLogger(__name__)


class ResumableGeneration:
    """Methods may be called from any thread. `emit` gets deltas in order, or at last an error."""

    def __init__(
        self, chain: str, request: GenerationRequest, home: Driver, emit: Emit, on_session: OnSession
    ) -> None:
        self._chain = chain
        self._request = request
        self._home = home
        self._emit = emit
        self._on_session = on_session
        self._lock = threading.Lock()
        self._far: HostedDriverClient | None = None
        self._number = 0
        self._session: int | None = None
        self._is_over = False
        self._received: list[TokenChoice] = []
        self._asked_s = time.monotonic()
        self._first_token_s = 0.0

    def start(self, far: HostedDriverClient | None) -> None:
        """Raises what `Driver.submit` does."""
        with self._lock:
            if far is not None:
                try:
                    self._number = far.submit(self._chain, self._request, self._take, self._begun)
                except LinkError as error:
                    log.info("a generation stays here: %s", error.message, extra=self._log_fields())
                else:
                    self._far = far
                    return
            self._begun(self._home.submit(self._request, self._emit))

    def has_started(self) -> bool:
        """Whether the chain works on it yet; what a host has taken counts as such."""
        with self._lock:
            session, is_here = self._session, self._far is None
        return session is not None and (not is_here or self._home.has_started(session))

    def cancel(self) -> None:
        """Stop it and free its memory; nothing more is emitted."""
        with self._lock:
            self._is_over = True
            if self._far is not None:
                self._far.cancel(self._number)
            elif self._session is not None:
                self._home.cancel(self._session)

    def _take(self, said: Delta | ShardComputeError | None) -> None:
        """From the host's link; None: it says nothing more."""
        with self._lock:
            if self._is_over or self._far is None:
                return
            if said is None:
                self._take_over()
                return
            if isinstance(said, Delta):
                self._received.extend(said.tokens)
                self._first_token_s = self._first_token_s or time.monotonic()
                self._is_over = said.finish is not None
            else:
                self._is_over = True
            self._emit(said)

    def _begun(self, session: int) -> None:
        self._session = session
        self._on_session(session)

    def _log_fields(self) -> dict[str, object]:
        return {"request": self._request.request_id or None, "chain": self._chain}

    def _take_over(self) -> None:
        known = len(self._received)
        log.info(
            "a generation of %s goes on here after %d tokens", self._chain, known, extra=self._log_fields()
        )
        self._far = None
        try:
            self._begun(self._home.submit(self._request, self._go_on, self._received))
        except ShardComputeError as error:
            self._is_over = True
            self._emit(error)

    def _go_on(self, said: Delta | ShardComputeError) -> None:
        """Called under the driver's lock, so ours is not taken."""
        if isinstance(said, Delta) and said.timings is not None and self._received:
            # The driver here has seen the end of it only.
            timings = replace(
                said.timings,
                queue_s=0.0,
                prefill_s=self._first_token_s - self._asked_s,
                decode_s=time.monotonic() - self._first_token_s,
            )
            said = replace(said, timings=timings)
        self._emit(said)
