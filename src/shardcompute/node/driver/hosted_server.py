"""A host's side of generations that the coordinator hands over: one link, many requests, deltas back in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.core.generation import Delta
from shardcompute.node.driver.driver import Driver
from shardcompute.node.rpc.outbox import Outbox
from shardcompute.wire import Link, Message
from shardcompute.wire.generations import (
    RELEASED,
    Begun,
    CancelGeneration,
    Generate,
    Generated,
    GenerationFailed,
    HostLoad,
    StepTimed,
    pack_delta,
    unpack_request,
)

log = logging.getLogger(__name__)
_REPORT_S = 1.0
FindDriver = Callable[[str], Driver]
"""The driver of a chain that is hosted here. Raises LinkError where there is none."""


@dataclass(slots=True)
class _Course:
    """One generation under way. Drivers emit under their lock, so nothing of ours is locked there."""

    chain: str
    driver: Driver
    session: int = 0
    is_over: bool = False
    """Nothing more is said of it."""


class HostedDriverServer:
    """Serves one link until it ends; then everything that was asked over it is cancelled."""

    def __init__(self, link: Link, find_driver: FindDriver) -> None:
        self._find_driver = find_driver
        self._courses: dict[int, _Course] = {}
        self._reported: dict[str, HostLoad] = {}
        self._ended = threading.Event()
        self._outbox = Outbox(link, self._take, lambda error: self._ended.set())

    def serve(self) -> None:
        """Blocks until the link ends."""
        self._outbox.start()
        while not self._ended.wait(_REPORT_S):
            self._report()
        self._outbox.close()
        for course in list(self._courses.values()):
            course.is_over = True
            course.driver.cancel(course.session)
        self._courses.clear()

    def release(self, chain: str) -> None:
        """This chain's driver is about to go: give its generations back unfinished."""
        for number, course in list(self._courses.items()):
            if course.chain == chain and not course.is_over:
                course.is_over = True
                self._courses.pop(number, None)
                self._outbox.put(GenerationFailed(number, RELEASED, "the driver moves elsewhere"))

    def timed(self, chain: str, packed: bytes) -> None:
        """A step of a chain is done; told to whoever has generations there."""
        if any(course.chain == chain for course in list(self._courses.values())):
            self._outbox.put(StepTimed(chain, packed))

    def _report(self) -> None:
        """Tell how busy the drivers are, where that is another thing than last time."""
        drivers = {course.chain: course.driver for course in list(self._courses.values())}
        for chain in drivers.keys() | self._reported.keys():
            try:
                driver = drivers.get(chain) or self._find_driver(chain)
            except LinkError:
                self._reported.pop(chain, None)
                continue
            load = driver.load()
            report = HostLoad(
                chain,
                load.running,
                load.waiting,
                load.used_tokens,
                load.capacity_tokens,
                dict(driver.speculation()),
            )
            if self._reported.get(chain) != report:
                self._reported[chain] = report
                self._outbox.put(report)

    def close(self) -> None:
        self._outbox.close()
        self._ended.set()

    def _take(self, message: Message) -> None:
        if isinstance(message, Generate):
            self._begin(message)
        elif isinstance(message, CancelGeneration):
            course = self._courses.pop(message.number, None)
            if course is not None:
                course.is_over = True
                course.driver.cancel(course.session)
        else:
            raise LinkError(f"{type(message).__name__} came on a link for generations")

    def _begin(self, message: Generate) -> None:
        number = message.number
        try:
            course = _Course(message.chain, self._find_driver(message.chain))
            request = unpack_request(message.request)
        except LinkError as error:
            # The coordinator knows what it asked for, and can compute it itself.
            self._outbox.put(GenerationFailed(number, RELEASED, error.message))
            return
        self._courses[number] = course
        try:
            course.session = course.driver.submit(request, lambda said: self._say(number, course, said))
        except ShardComputeError as error:
            course.is_over = True
            self._outbox.put(_failed(number, error))
        else:
            self._outbox.put(Begun(number, course.session))
        if course.is_over:
            # It ended before it could be cancelled, or was released meanwhile.
            self._courses.pop(number, None)
            course.driver.cancel(course.session)

    def _say(self, number: int, course: _Course, said: Delta | ShardComputeError) -> None:
        if course.is_over:
            return
        if isinstance(said, Delta):
            course.is_over = said.finish is not None
            self._outbox.put(Generated(number, pack_delta(said)))
        else:
            course.is_over = True
            self._outbox.put(_failed(number, said))
        if course.is_over:
            self._courses.pop(number, None)


def _failed(number: int, error: ShardComputeError) -> GenerationFailed:
    return GenerationFailed(number, type(error).__name__, error.message, error.hint)
