"""Fine-tuning on a worker: who may open a run here, one at a time, and with what memory.

Orders come over the driver's link and are carried out by its thread, one after the other; activations and gradients
come over links of their own, whose threads only put them where the stage looks for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator

from shardcompute.core.errors import BackendError, LinkError, ShardComputeError, UsageError
from shardcompute.core.fields import shorten
from shardcompute.finetune.estimate import estimate_run
from shardcompute.finetune.swarm.frames import JOINS_BEHIND, Failure, OpenStage, in_flight, read_facts
from shardcompute.finetune.swarm.validation import check_opening, check_stage
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.finetuning.stage_run import StageRun, answer
from shardcompute.node.worker.shard_loader import ShardLoader
from shardcompute.security.certificates import read_peer
from shardcompute.security.names import Role
from shardcompute.weights.served import shard_source
from shardcompute.wire import Link, Message, TrainingFrame

log = logging.getLogger(__name__)


class FinetuneHost:
    """At most one run at a time. `dial` opens a link to another stage's worker."""

    def __init__(self, loader: ShardLoader, dial: Callable[[Peer], Link], device: str, threads: int) -> None:
        self._loader = loader
        self._dial = dial
        self._device = device
        self._threads = threads
        self._lock = threading.Lock()
        self._run: StageRun | None = None

    def serve(self, link: Link) -> None:
        """A driver's link, that of the stage before or of another copy, until it ends."""
        frame, _ = _receive(link)
        if frame.kind in ("join", "meet"):
            with self._lock:
                run = self._run
            if run is None or run.name != frame.run:
                raise LinkError(f"there is no run {frame.run!r} here")
            if frame.kind == "join":
                run.serve_next(link, frame) if frame.number == JOINS_BEHIND else run.serve_previous(link)
            else:
                run.serve_copy(link)
        elif frame.kind == "open":
            self._serve_driver(link, frame)
        else:
            raise LinkError(f"a run does not begin with {frame.kind!r}", hint="run one release on all nodes")

    def close(self) -> None:
        with self._lock:
            run = self._run
        if run is not None:
            run.end("the worker is going")

    def _serve_driver(self, link: Link, frame: TrainingFrame) -> None:
        try:
            with contextlib.ExitStack() as stack:
                run = stack.enter_context(self._opened(link, frame))
                answer(link, frame, "opened", run.opened())
                while True:
                    frame, body = _receive(link)
                    run.carry_out(link, frame, body)
        except ShardComputeError as error:
            log.info("the run %s ends here: %s", frame.run, error)
            _answer_failure(link, frame, error)
        except Exception as error:  # the driver is told of whatever torch could not do
            log.exception("the run %s ends here", frame.run)
            _answer_failure(link, frame, BackendError(f"{type(error).__name__}: {error}"))

    @contextlib.contextmanager
    def _opened(self, link: Link, frame: TrainingFrame) -> Iterator[StageRun]:
        order = check_opening(read_facts(frame, OpenStage))
        if Role.WORKER in read_peer(link.certificate).roles:
            raise UsageError("workers do not open runs", hint="open it from a driver")
        if importlib.util.find_spec("torch") is None:
            raise BackendError("this worker has no torch", hint="pip install 'shardcompute[torch]' there")
        run = StageRun(frame.run, order, self._dial)
        with self._lock:
            if self._run is not None:
                raise BackendError("this worker is in another run already", hint="wait until that is over")
            self._run = run
        try:
            with self._loaded(run):
                yield run
        finally:
            run.end("the run is over")
            with self._lock:
                self._run = None

    @contextlib.contextmanager
    def _loaded(self, run: StageRun) -> Iterator[None]:
        """With its weights, in memory that is its own."""
        order = run.order
        with contextlib.ExitStack() as stack:
            with self._loader.tensors_of(Peer(order.origin.node, order.origin.url), order.model) as (
                card,
                tensors,
            ):
                stage = check_stage(order, card.spec, card.layout)
                need = estimate_run(
                    card.spec,
                    card.layout,
                    [stage],
                    order.plan,
                    mean_tokens=order.mean_tokens,
                    modules=order.modules,
                    recomputes=order.recomputes,
                    in_flight=in_flight(order.place, order.stages, order.plan.micro_batches, order.ahead),
                )
                what = f"teaching layers {stage.start} to {stage.stop}"
                stack.enter_context(self._loader.reserved(need.total_bytes, what))
                tensors.prefetch(stage, None)
                run.load(card, stage, shard_source(card, tensors, stage), self._device, self._threads)
            yield


def _receive(link: Link) -> tuple[TrainingFrame, memoryview]:
    message: Message
    message, body = link.receive()
    if not isinstance(message, TrainingFrame):
        raise LinkError(f"{link.peer} sent {type(message).__name__} in a run")
    return message, body


def _answer_failure(link: Link, frame: TrainingFrame, error: ShardComputeError) -> None:
    with contextlib.suppress(LinkError):
        failure = Failure(type(error).__name__, shorten(error.message), shorten(error.hint))
        answer(link, frame, "failed", failure)
