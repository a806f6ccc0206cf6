"""A crew: links to the workers of a run, each with a stage that is open and connected to the next."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from shardcompute.backends.matrix import Float32
from shardcompute.core.closing import Closing
from shardcompute.core.errors import LinkError, rebuild_error
from shardcompute.core.fields import shorten
from shardcompute.finetune.modules import AdaptedMap
from shardcompute.finetune.plan import FinetunePlan
from shardcompute.finetune.split.ownership import lend_openings, lent_stages
from shardcompute.finetune.swarm.balance import balance_stages
from shardcompute.finetune.swarm.frames import (
    Failure,
    NoFacts,
    OpenStage,
    PeerAddress,
    StageOpened,
    TensorNames,
    make_frame,
    pack_state,
    read_facts,
    unpack_state,
)
from shardcompute.models.spec import Stage
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link, TrainingFrame

_OPEN_S = 600.0
_ANSWER_S = 600.0
Facts = TypeVar("Facts", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RunOrder:
    """What the stages of a run are opened with."""

    model: str
    origin: Peer
    layers: int
    plan: FinetunePlan
    modules: tuple[AdaptedMap, ...]
    mean_tokens: float
    codec: str = "exact"
    share: float = 1.0
    recomputes: bool = False
    copies: int = 1
    """Of each stage, as far as there are workers and micro-batches for them."""
    ahead: int = 1
    """Micro-batches more than need be that are under way, so that stages have work while rows are on the line."""
    costs: tuple[float, ...] = ()
    """Of layers, relative to each other; none: all alike."""
    head_cost: float = 0.0
    kept: int = 0
    """Layers at each end that stay with the owner of the data, who drives the run."""
    owner: str = ""
    """That node, where some do."""


def cut_workers(order: RunOrder, workers: int) -> tuple[list[Stage], int]:
    """The stages for so many workers, and how many copies there are of each."""
    if order.kept:
        return list(lent_stages(order.layers, order.kept, min(workers, order.layers - 2 * order.kept))), 1
    copies = max(1, min(order.copies, workers, order.plan.micro_batches))
    costs = order.costs or (1.0,) * order.layers
    return balance_stages(costs, order.head_cost, min(workers // copies, order.layers)), copies


class Crew(Closing):
    """Workers in the order of their stages, copy by copy. Not for several threads; a LinkError ends it."""

    def __init__(self, dial: Callable[[Peer], Link], workers: Sequence[Peer], order: RunOrder) -> None:
        self._name = f"run-{secrets.token_hex(6)}"
        self._links: list[Link] = []
        self._call = 0
        self.stages, self.copies = cut_workers(order, len(workers))
        self.workers = list(workers)[: len(self.stages) * self.copies]
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            for worker in self.workers:
                self._links.append(dial(worker))
            openings = [
                self._opening(place, copy, order)
                for copy in range(self.copies)
                for place in range(len(self.stages))
            ]
            self._tell_each("open", lend_openings(openings, order.owner) if order.kept else openings)
            self.opened = self._hear_all("opened", StageOpened, _OPEN_S)
            self.ask_all("connect", NoFacts(), "connected", NoFacts)
            on_error.pop_all()

    def _worker(self, place: int, copy: int) -> PeerAddress:
        found = self.workers[copy * len(self.stages) + place]
        return PeerAddress(found.node, found.url)

    def _opening(self, place: int, copy: int, order: RunOrder) -> OpenStage:
        stage, count = self.stages[place], len(self.stages)
        copies = [self._worker(place, each) for each in range(self.copies)]
        return OpenStage(
            model=order.model,
            origin=PeerAddress(order.origin.node, order.origin.url),
            start=stage.start,
            stop=stage.stop,
            stages=count,
            place=place,
            plan=order.plan,
            modules=[each for each in order.modules if stage.start <= each.layer < stage.stop],
            mean_tokens=order.mean_tokens,
            recomputes=order.recomputes,
            codec=order.codec,
            share=order.share,
            previous=self._worker(place - 1, copy).node if place else "",
            next=self._worker(place + 1, copy) if place + 1 < count else None,
            ahead=order.ahead,
            copy=copy,
            copies=copies if self.copies > 1 else [],
        )

    def ask_all(self, kind: str, facts: msgspec.Struct, answer: str, expected: type[Facts]) -> list[Facts]:
        """Give all stages an order; what each answers."""
        return self.ask_copies(kind, [facts] * self.copies, answer, expected)

    def ask_copies(
        self, kind: str, facts: Sequence[msgspec.Struct], answer: str, expected: type[Facts]
    ) -> list[Facts]:
        """Give the stages of each copy an order of its own; what each answers, copy by copy."""
        self._call += 1
        self._tell_each(kind, [each for each in facts for _ in self.stages])
        return self._hear_all(answer, expected, _ANSWER_S)

    def state(self) -> dict[str, Float32]:
        found: dict[str, Float32] = {}
        self._call += 1
        self._tell_each("state", [NoFacts()] * len(self._links))
        for link in self._links:
            is_last = False
            while not is_last:
                frame, body = self._receive(link, "state", _ANSWER_S)
                names = read_facts(frame, TensorNames)
                found |= unpack_state(names, body)
                is_last = names.is_last
        return found

    def load_state(self, state: Mapping[str, Float32], modules: Sequence[AdaptedMap]) -> None:
        """Each stage gets what is its own."""
        self._call += 1
        for link, stage in zip(self._links, self.stages * self.copies, strict=True):
            names = tuple(f"{each.name}." for each in modules if stage.start <= each.layer < stage.stop)
            own = {name: values for name, values in state.items() if any(each in name for each in names)}
            for facts, body in pack_state(own):
                link.send(*make_frame(self._name, "load", facts, body, call=self._call))
        self._hear_all("loaded", NoFacts, _ANSWER_S)

    @property
    def name(self) -> str:
        """What stages know the run by."""
        return self._name

    @property
    def next_call(self) -> int:
        """By what the frames of the next order are known."""
        return self._call + 1

    def close(self) -> None:
        for link in self._links:
            with contextlib.suppress(LinkError):
                link.close()

    def _tell_each(self, kind: str, facts: Sequence[msgspec.Struct]) -> None:
        for link, each in zip(self._links, facts, strict=True):
            link.send(*make_frame(self._name, kind, each, call=self._call))

    def _hear_all(self, kind: str, expected: type[Facts], patience_s: float) -> list[Facts]:
        """Of several that fail, the one is heard whose error is no consequence of another's."""
        answers: list[Facts | None] = [None] * len(self._links)
        errors: list[Exception] = []
        failed = threading.Event()

        def hear(place: int, link: Link) -> None:
            try:
                frame, _ = self._receive(link, kind, patience_s)
                answers[place] = read_facts(frame, expected)
            except Exception as error:  # is raised again by whoever asked
                errors.append(error)
                failed.set()

        threads = [
            threading.Thread(target=hear, args=(place, link), daemon=True)
            for place, link in enumerate(self._links)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not failed.is_set():
                thread.join(0.05)
        if failed.is_set():
            # The others may wait for the one that failed: none of them has anything more to say.
            for thread in threads:
                thread.join(1.0)
            self.close()
            raise next((error for error in errors if not isinstance(error, LinkError)), errors[0])
        return [answer for answer in answers if answer is not None]

    def _receive(self, link: Link, kind: str, patience_s: float) -> tuple[TrainingFrame, memoryview]:
        try:
            message, body = link.receive(patience_s)
        except TimeoutError:
            raise LinkError(
                f"{link.peer} has not answered for {patience_s:g} s", hint="see `shardcompute status`"
            ) from None
        if isinstance(message, TrainingFrame) and message.kind == "failed":
            failure = read_facts(message, Failure)
            text, hint = shorten(failure.message), shorten(failure.hint)
            raise rebuild_error(failure.code, f"{link.peer}: {text}", hint)
        if not isinstance(message, TrainingFrame) or message.kind != kind or message.call != self._call:
            raise LinkError(f"{link.peer} answered otherwise than a run expects")
        return message, body
