"""One stage of a run on this worker: loaded once, then order after order of its driver, until the run ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import LinkError
from shardcompute.finetune.swarm.frames import (
    ApplyStep,
    LearnStep,
    NoFacts,
    OpenStage,
    StageOpened,
    TensorNames,
    make_frame,
    pack_state,
    read_facts,
    unpack_state,
)
from shardcompute.finetune.swarm.validation import check_apply, check_taken, unpack_step
from shardcompute.models.spec import Stage
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.worker.finetuning.copies import CopyMeeting
from shardcompute.node.worker.finetuning.neighbours import NeighbourLinks
from shardcompute.wire import Link, TrainingFrame

if TYPE_CHECKING:
    from shardcompute.finetune.swarm.stage_runner import Mailbox, StageRunner
    from shardcompute.models.decoder import TensorSource
    from shardcompute.weights.card import Card

_JOIN_S = 60.0
"""So long a neighbour may be ahead of this stage's own loading."""


class StageRun:
    """Orders come from one thread, links of neighbours from others."""

    def __init__(self, name: str, order: OpenStage, dial: Callable[[Peer], Link]) -> None:
        from shardcompute.finetune.swarm.stage_runner import Mailbox

        self.name = name
        self.order = order
        self._dial = dial
        self._mailbox: Mailbox = Mailbox()
        self._runner: StageRunner | None = None
        self._neighbours: NeighbourLinks | None = None
        self._is_loaded = threading.Event()
        self._copies = CopyMeeting(name, order.place, order.copy, order.copies)
        self._vocab_size = 0
        self._has_gathered = False
        self._taken: dict[str, Float32] = {}

    def load(self, card: Card, stage: Stage, source: TensorSource, device: str, threads: int) -> None:
        import torch

        from shardcompute.finetune.stage import FinetuneStage, StageOptions
        from shardcompute.finetune.swarm.stage_runner import StageRunner

        torch.set_num_threads(threads)
        order = self.order
        self._vocab_size = card.spec.vocab_size
        how = StageOptions(device, torch.float32, order.recomputes)
        learning = FinetuneStage(
            card.spec,
            card.layout,
            stage,
            source,
            order.plan,
            how,
            self._copies if order.copies else None,
            modules=order.modules,
        )
        neighbours = NeighbourLinks(self.name, order.codec, self._mailbox, card.spec.hidden, order.plan)
        self._neighbours = neighbours
        self._runner = StageRunner(
            learning, order.place, order.stages, neighbours, self._mailbox, order.share, order.ahead
        )
        self._is_loaded.set()

    def opened(self) -> StageOpened:
        assert self._runner is not None
        stage = self._runner.stage
        return StageOpened(stage.optimizer_bytes)

    # Neighbours

    def serve_copy(self, link: Link) -> None:
        """Another copy of this stage."""
        self._copies.serve(link)

    def serve_previous(self, link: Link) -> None:
        """Take activations of the stage before, from its node alone."""
        if link.peer != self.order.previous:
            raise LinkError(f"{link.peer} is not the stage before this one")
        neighbours = self._ready_neighbours()
        neighbours.attach("gradient", link)
        neighbours.read(link, "rows")

    def serve_next(self, link: Link, frame: TrainingFrame) -> None:
        """Take gradients of an owner of data who keeps the last layers, and joins by itself."""
        following = self.order.next
        if following is None or following.url or link.peer != following.node:
            raise LinkError(f"{link.peer} is not the stage behind this one")
        neighbours = self._ready_neighbours()
        neighbours.attach("rows", link)
        # Rows go out on it as soon as there are some: whoever joins waits until that can be.
        answer(link, frame, "joined", NoFacts())
        neighbours.read(link, "gradient")

    def _ready_neighbours(self) -> NeighbourLinks:
        neighbours = self._neighbours if self._is_loaded.wait(_JOIN_S) else None
        if neighbours is None:
            raise LinkError("this stage is not ready")
        return neighbours

    def _connect(self, neighbours: NeighbourLinks) -> None:
        self._copies.meet(self._dial)
        following = self.order.next
        if following is None or not following.url:
            return
        link = self._dial(Peer(following.node, following.url))
        link.send(*make_frame(self.name, "join", NoFacts()))
        neighbours.attach("rows", link)

        def read() -> None:
            with contextlib.suppress(LinkError):
                neighbours.read(link, "gradient")

        threading.Thread(target=read, name="finetune gradients", daemon=True).start()

    def end(self, why: str) -> None:
        """Free what it holds, and let neighbours know."""
        self._mailbox.fail(why)
        self._is_loaded.set()
        self._copies.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._runner = None

    # Orders

    def carry_out(self, link: Link, frame: TrainingFrame, body: memoryview) -> None:
        runner, neighbours = self._runner, self._neighbours
        assert runner is not None
        assert neighbours is not None
        if frame.kind == "connect":
            self._connect(neighbours)
            answer(link, frame, "connected", NoFacts())
        elif frame.kind in ("learn", "evaluate"):
            is_learned = frame.kind == "learn"
            batches = unpack_step(
                read_facts(frame, LearnStep), self.order.plan, self._vocab_size, is_learned=is_learned
            )
            work = runner.learn if is_learned else runner.evaluate
            answer(link, frame, "sums", work(frame.call, batches))
            self._has_gathered = is_learned
        elif frame.kind == "apply":
            facts = check_apply(read_facts(frame, ApplyStep), self.order.plan)
            if not self._has_gathered:
                raise LinkError("gradients are to be applied that are not there")
            self._has_gathered = False
            runner.stage.apply_gradients(facts.step, facts.scale)
            answer(link, frame, "applied", NoFacts())
        elif frame.kind == "state":
            # All copies take part in joining it; one tells it.
            state = runner.stage.state()
            for names, content in pack_state(state if self.order.copy == 0 else {}):
                link.send(*make_frame(self.name, "state", names, content, call=frame.call))
        elif frame.kind == "load":
            self._take_state(link, frame, body, runner)
        else:
            raise LinkError(f"{frame.kind!r} is no order of a run", hint="run one release on all nodes")

    def _take_state(self, link: Link, frame: TrainingFrame, body: memoryview, runner: StageRunner) -> None:
        names = read_facts(frame, TensorNames)
        self._taken |= unpack_state(names, body)
        check_taken(self._taken, runner.stage.learned_numbers)
        if names.is_last:
            runner.stage.load_state(self._taken)
            self._taken = {}
            answer(link, frame, "loaded", NoFacts())


def answer(link: Link, frame: TrainingFrame, kind: str, facts: msgspec.Struct) -> None:
    link.send(*make_frame(frame.run, kind, facts, call=frame.call))
