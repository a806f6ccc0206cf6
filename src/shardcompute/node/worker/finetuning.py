"""Fine-tuning on a worker: one stage of a run, opened by its driver and gone with the driver's link.

Orders come over that link and are carried out by its thread, one after the other; activations and gradients come over
links of their own, whose threads only put them where the stage looks for them. Nothing of torch is imported before a
run is opened.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import BackendError, LinkError, ShardComputeError, UsageError
from shardcompute.finetune.estimate import estimate_run
from shardcompute.finetune.plan import check_finetune_plan
from shardcompute.finetune.swarm.frames import (
    ApplyStep,
    Failure,
    LearnStep,
    NoFacts,
    OpenStage,
    RowFacts,
    TensorNames,
    make_frame,
    pack_rows,
    pack_state,
    read_facts,
    unpack_batch,
    unpack_rows,
    unpack_state,
)
from shardcompute.models.spec import Stage
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.shard_loader import ShardLoader
from shardcompute.security.certificates import read_peer
from shardcompute.security.names import Role
from shardcompute.weights.served import shard_source
from shardcompute.wire import Link, Message, TrainingFrame

if TYPE_CHECKING:
    from shardcompute.finetune.swarm.stage_runner import Mailbox, StageRunner
    from shardcompute.models.decoder import TensorSource
    from shardcompute.weights.card import Card

log = logging.getLogger(__name__)
_MOST_STAGES = 1024


class FinetuneHost:
    """At most one run at a time. `dial` opens a link to another stage's worker."""

    def __init__(self, loader: ShardLoader, dial: Callable[[Peer], Link], device: str, threads: int) -> None:
        self._loader = loader
        self._dial = dial
        self._device = device
        self._threads = threads
        self._lock = threading.Lock()
        self._run: _StageRun | None = None

    def serve(self, link: Link) -> None:
        """A driver's link, or that of the stage before, until it ends."""
        frame, _ = _receive(link)
        if frame.kind == "join":
            with self._lock:
                run = self._run
            if run is None or run.name != frame.run:
                raise LinkError(f"there is no run {frame.run!r} here")
            run.serve_previous(link)
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
                _answer(link, frame, "opened", NoFacts())
                while True:
                    frame, body = _receive(link)
                    run.carry_out(link, frame, body)
        except ShardComputeError as error:
            log.info("the run %s ends here: %s", frame.run, error)
            with contextlib.suppress(LinkError):
                failure = Failure(type(error).__name__, error.message, error.hint)
                _answer(link, frame, "failed", failure)

    @contextlib.contextmanager
    def _opened(self, link: Link, frame: TrainingFrame) -> Iterator[_StageRun]:
        order = read_facts(frame, OpenStage)
        if Role.WORKER in read_peer(link.certificate).roles:
            raise UsageError("workers do not open runs", hint="open it from a driver")
        if importlib.util.find_spec("torch") is None:
            raise BackendError("this worker has no torch", hint="pip install 'shardcompute[torch]' there")
        check_finetune_plan(order.plan)
        run = _StageRun(frame.run, order, self._dial)
        with self._lock:
            if self._run is not None:
                raise BackendError("this worker is in another run already", hint="wait until that is over")
            self._run = run
        try:
            with self._loader.tensors_of(Peer(order.origin.node, order.origin.url), order.model) as (
                card,
                tensors,
            ):
                stage = Stage(order.start, order.stop, card.spec.layer_count)
                need = estimate_run(
                    card.spec,
                    card.layout,
                    [stage],
                    order.plan,
                    mean_tokens=order.mean_tokens,
                    modules=order.modules,
                    recomputes=order.recomputes,
                    in_flight=min(order.plan.micro_batches, order.stages - order.place),
                )
                reserved = self._loader.reserved(
                    need.total_bytes, f"teaching layers {stage.start} to {stage.stop}"
                )
                with contextlib.ExitStack() as stack:
                    stack.enter_context(reserved)
                    tensors.prefetch(stage, None)
                    run.load(card, stage, shard_source(card, tensors, stage), self._device, self._threads)
                    held = stack.pop_all()
            with held:
                yield run
        finally:
            run.end("the run is over")
            with self._lock:
                self._run = None


class _StageRun:
    """One stage of a run, with the links to its neighbours."""

    def __init__(self, name: str, order: OpenStage, dial: Callable[[Peer], Link]) -> None:
        if not 0 <= order.place < order.stages <= _MOST_STAGES:
            raise UsageError(
                f"there is no stage {order.place} of {order.stages}", hint="run one release on all nodes"
            )
        from shardcompute.finetune.swarm.stage_runner import Mailbox

        self.name = name
        self._order = order
        self._dial = dial
        self._mailbox: Mailbox = Mailbox()
        self._runner: StageRunner | None = None
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._vocab_size = 0
        self._taken: dict[str, Float32] = {}

    def load(self, card: Card, stage: Stage, source: TensorSource, device: str, threads: int) -> None:
        import torch

        from shardcompute.finetune.stage import FinetuneStage, StageOptions
        from shardcompute.finetune.swarm.stage_runner import StageRunner

        torch.set_num_threads(threads)
        order = self._order
        self._vocab_size = card.spec.vocab_size
        how = StageOptions(device, torch.float32, order.recomputes)
        learning = FinetuneStage(
            card.spec, card.layout, stage, source, order.plan, how, modules=order.modules
        )
        self._runner = StageRunner(learning, order.place, order.stages, self, self._mailbox, order.share)

    # Neighbours

    def serve_previous(self, link: Link) -> None:
        """Take activations of the stage before, from its node alone."""
        if link.peer != self._order.previous:
            raise LinkError(f"{link.peer} is not the stage before this one")
        self._attach("previous", link)
        self._read_all(link)

    def send(self, kind: str, call: int, number: int, values: Float32) -> int:
        with self._lock:
            link = self._links.get("previous" if kind == "gradient" else "next")
        if link is None:
            raise LinkError("a neighbour has not connected", hint="the run goes on from its last checkpoint")
        facts, body = pack_rows(values, self._order.codec)
        frame, parts = make_frame(self.name, kind, facts, body, call=call, number=number)
        link.send(frame, parts)
        return frame.size

    def _connect(self) -> None:
        following = self._order.next
        if following is None:
            return
        link = self._dial(Peer(following.node, following.url))
        self._attach("next", link)
        link.send(*make_frame(self.name, "join", NoFacts()))
        threading.Thread(target=self._read_next, args=(link,), name="finetune gradients", daemon=True).start()

    def _attach(self, which: str, link: Link) -> None:
        with self._lock:
            self._links[which] = link

    def _read_next(self, link: Link) -> None:
        with contextlib.suppress(LinkError):
            self._read_all(link)

    def _read_all(self, link: Link) -> None:
        try:
            while True:
                frame, body = _receive(link)
                values = unpack_rows(read_facts(frame, RowFacts), body)
                self._mailbox.put(frame.kind, frame.call, frame.number, values)
        except LinkError as error:
            self._mailbox.fail(f"the link with the stage of {link.peer} ended: {error.message}")
            raise

    def end(self, why: str) -> None:
        """Free what it holds, and let neighbours know."""
        self._mailbox.fail(why)
        with self._lock:
            links = list(self._links.values())
        for link in links:
            with contextlib.suppress(LinkError):
                link.close()
        self._runner = None

    # Orders

    def carry_out(self, link: Link, frame: TrainingFrame, body: memoryview) -> None:
        runner = self._runner
        assert runner is not None
        if frame.kind == "connect":
            self._connect()
            _answer(link, frame, "connected", NoFacts())
        elif frame.kind in ("learn", "evaluate"):
            batches = [unpack_batch(each, self._vocab_size) for each in read_facts(frame, LearnStep).batches]
            work = runner.learn if frame.kind == "learn" else runner.evaluate
            _answer(link, frame, "sums", work(frame.call, batches))
        elif frame.kind == "apply":
            facts = read_facts(frame, ApplyStep)
            runner.stage.apply_gradients(facts.step, facts.scale)
            _answer(link, frame, "applied", NoFacts())
        elif frame.kind == "state":
            for names, content in pack_state(runner.stage.state()):
                link.send(*make_frame(self.name, "state", names, content, call=frame.call))
        elif frame.kind == "load":
            names = read_facts(frame, TensorNames)
            self._taken |= unpack_state(names, body)
            if names.is_last:
                runner.stage.load_state(self._taken)
                self._taken = {}
                _answer(link, frame, "loaded", NoFacts())
        else:
            raise LinkError(f"{frame.kind!r} is no order of a run", hint="run one release on all nodes")


def _receive(link: Link) -> tuple[TrainingFrame, memoryview]:
    message: Message
    message, body = link.receive()
    if not isinstance(message, TrainingFrame):
        raise LinkError(f"{link.peer} sent {type(message).__name__} in a run")
    return message, body


def _answer(link: Link, frame: TrainingFrame, kind: str, facts: msgspec.Struct) -> None:
    link.send(*make_frame(frame.run, kind, facts, call=frame.call))
