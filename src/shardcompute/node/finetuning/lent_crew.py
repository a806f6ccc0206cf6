"""Layers of a crew between stages that are kept here: `finetune.split.LentStages` over links to its workers.

Rows go to the first worker and come from the last, gradients the other way, on two links that this end opens. An order
to learn is under way on the crew's own links meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardcompute.backends.matrix import Float32
from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkError, ShardComputeError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.swarm.frames import (
    JOINS_BEHIND,
    ApplyStep,
    LearnStep,
    NoFacts,
    RowFacts,
    StepSums,
    make_frame,
    pack_batch,
    pack_rows,
    read_facts,
    unpack_rows,
)
from shardcompute.node.finetuning.crew import Crew, RunOrder
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link, TrainingFrame

if TYPE_CHECKING:
    import torch

    from shardcompute.finetune.split.split_pipeline import SplitPipeline
    from shardcompute.finetune.stage import FinetuneStage

_FORWARD, _BACKWARD = "rows", "gradient"
_PATIENCE_S = 300.0


class LentCrew(Closing):
    """`wire_bytes` is what went to, between and from its workers so far."""

    def __init__(
        self, crew: Crew, order: RunOrder, dial: Callable[[Peer], Link], workers: Sequence[Peer]
    ) -> None:
        from shardcompute.finetune.swarm.stage_runner import Mailbox

        self._crew, self._order = crew, order
        self._mailbox = Mailbox()
        self._call = 0
        self._order_thread: threading.Thread | None = None
        self._sums: list[StepSums] = []
        self._error: ShardComputeError | None = None
        self._links: list[Link] = []
        self.wire_bytes = 0
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            for worker, number in ((workers[0], 0), (workers[-1], JOINS_BEHIND)):
                link = dial(worker)
                self._links.append(link)
                link.send(*make_frame(crew.name, "join", NoFacts(), number=number))
                if number == JOINS_BEHIND:
                    _hear_joined(link)
                reader = threading.Thread(target=self._read, args=(link,), name="finetune rows", daemon=True)
                reader.start()
            on_error.pop_all()

    @property
    def depth(self) -> int:
        return len(self._crew.stages)

    def begin(self, batches: Sequence[MicroBatch], *, learns: bool) -> None:
        self._call = self._crew.next_call
        self._sums, self._error = [], None
        facts = LearnStep([pack_batch(batch) for batch in batches])
        kind = "learn" if learns else "evaluate"
        self._order_thread = threading.Thread(
            target=self._give, args=(kind, facts), name="finetune order", daemon=True
        )
        self._order_thread.start()

    def send_rows(self, number: int, rows: torch.Tensor) -> None:
        self._send(self._links[0], _FORWARD, number, rows)

    def take_rows(self, number: int) -> torch.Tensor:
        return self._take(_FORWARD, number)

    def send_gradient(self, number: int, gradient: torch.Tensor) -> None:
        self._send(self._links[1], _BACKWARD, number, gradient)

    def take_gradient(self, number: int) -> torch.Tensor:
        return self._take(_BACKWARD, number)

    def finish(self) -> list[float]:
        thread = self._order_thread
        assert thread is not None, "nothing was begun"
        thread.join(_PATIENCE_S)
        if self._error is not None:
            raise self._error
        if thread.is_alive():
            raise LinkError(
                "the stages did not end their step", hint="the run goes on from its last checkpoint"
            )
        self.wire_bytes += sum(part.sent_bytes for part in self._sums)
        return [each for part in self._sums for each in part.squares]

    def apply_gradients(self, step: int, scale: float) -> None:
        self._crew.ask_all("apply", ApplyStep(step, scale), "applied", NoFacts)

    def state(self) -> dict[str, Float32]:
        return self._crew.state()

    def load_state(self, state: Mapping[str, Float32]) -> None:
        self._crew.load_state(state, self._order.modules)

    def close(self) -> None:
        for link in self._links:
            with contextlib.suppress(LinkError):
                link.close()

    def _give(self, kind: str, facts: LearnStep) -> None:
        try:
            self._sums = self._crew.ask_all(kind, facts, "sums", StepSums)
        except ShardComputeError as error:  # is raised again by whoever waits
            self._error = error
            self._mailbox.fail(error.message)

    def _send(self, link: Link, kind: str, number: int, values: torch.Tensor) -> None:
        facts, body = pack_rows(values.detach().float().cpu().numpy(), self._order.codec)
        frame, parts = make_frame(self._crew.name, kind, facts, body, call=self._call, number=number)
        try:
            link.send(frame, parts)
        except LinkError as error:
            raise (self._error or error) from error
        self.wire_bytes += frame.size

    def _take(self, kind: str, number: int) -> torch.Tensor:
        import torch

        try:
            return torch.from_numpy(self._mailbox.take(kind, self._call, number))
        except LinkError as error:
            # What a stage has said of itself tells more than that it sends nothing.
            raise (self._error or error) from error

    def _read(self, link: Link) -> None:
        try:
            while True:
                message, body = link.receive()
                if not isinstance(message, TrainingFrame):
                    raise LinkError(f"{link.peer} sent what is no word of a run")
                values = unpack_rows(read_facts(message, RowFacts), body)
                self._mailbox.put(message.kind, message.call, message.number, values)
        except LinkError as error:
            self._mailbox.fail(f"the link with the stage of {link.peer} ended: {error.message}")


def _hear_joined(link: Link) -> None:
    try:
        message, _ = link.receive(_PATIENCE_S)
    except TimeoutError:
        raise LinkError(f"{link.peer} does not take the last layers' side of the run") from None
    if not isinstance(message, TrainingFrame) or message.kind != "joined":
        raise LinkError(f"{link.peer} answered otherwise than a run expects")


@contextlib.contextmanager
def open_owners_pipeline(
    ends: tuple[FinetuneStage, FinetuneStage],
    order: RunOrder,
    dial: Callable[[Peer], Link],
    crew: Crew,
    workers: Sequence[Peer],
) -> Iterator[SplitPipeline]:
    """The stages that are kept here around those of a crew."""
    from shardcompute.finetune.split.split_pipeline import SplitPipeline

    with LentCrew(crew, order, dial, workers) as lent:
        yield SplitPipeline(ends[0], lent, ends[1])
