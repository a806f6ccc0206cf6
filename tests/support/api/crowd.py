"""A cluster that is only seen: any number of machines and requests, made up, behind the real routes.

Has what the routes need of a `node.admin.admin.ClusterAdmin`; news go through the real feed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from shardcompute.core.errors import WouldReplaceError
from shardcompute.node.admin.catalogue import CatalogueEntry
from shardcompute.node.admin.feed import Feed, Subscription
from shardcompute.node.admin.history import HistoryPage
from shardcompute.node.admin.qr import qr_svg
from shardcompute.node.admin.views import (
    ChainView,
    ClusterView,
    FetchView,
    HeldLayers,
    KeyView,
    LinkView,
    LoadingLayers,
    LoadView,
    MemoryParts,
    ModelView,
    NewKey,
    NewPairing,
    NewToken,
    NodeView,
    PlannedChain,
    PlannedStage,
    PlanView,
    StageView,
    TokenView,
)
from shardcompute.node.cluster.ledger.views import LedgerView
from shardcompute.node.finetuning.curves import CurveBoard
from shardcompute.node.telemetry.audit import AuditLog
from shardcompute.node.telemetry.history_store import EventTone, EventView, HistoryRange, HistoryStore
from shardcompute.node.telemetry.quota import QuotaLedger
from shardcompute.node.telemetry.request_log import RequestView, StageShare
from shardcompute.node.telemetry.usage import UsageCounter, UsageReport, UsageView


class EmptyLedger:
    """Nothing was ever written."""

    def newest_view(self) -> LedgerView:
        return LedgerView()


class KeptHistory:
    """What was told is kept, in memory."""

    def __init__(self) -> None:
        self.store = HistoryStore(None)

    def events(self, wanted: HistoryRange) -> HistoryPage[EventView]:
        found = self.store.events(wanted)
        return HistoryPage(data=tuple(found), next=found[-1].number if len(found) == wanted.limit else None)

    def requests(self, wanted: HistoryRange) -> HistoryPage[RequestView]:
        found = self.store.requests(wanted)
        is_full = len(found) == wanted.limit
        return HistoryPage(data=tuple(view for _, view in found), next=found[-1][0] if is_full else None)

    def usage(self, wanted: HistoryRange, span_s: int) -> HistoryPage[UsageView]:
        return HistoryPage(data=tuple(self.store.usage(wanted, span_s)))


MIB = 1 << 20
MODEL = "org/tiny"
CHAIN = f"{MODEL}#1"
START_S = 1_800_000_000.0


class Crowd:
    """So many machines, the first `stages` of which serve one model, and so many requests that ended."""

    def __init__(self, nodes: int = 64, requests: int = 1000, *, stages: int = 8) -> None:
        self._random = random.Random(7)
        self.view = self._make_view(nodes, stages)
        self.ended = [self._make_request(number, stages) for number in range(requests, 0, -1)]
        self.live: list[RequestView] = []
        clock = [START_S]
        self._usage = UsageCounter(wall_clock=lambda: clock[0])
        for request in reversed(self.ended):
            clock[0] = request.started_at_s
            self._usage.add(
                request.key,
                request.model,
                requests=1,
                prompt_tokens=request.prompt_tokens,
                generated_tokens=request.generated_tokens,
            )
        self._feed = Feed(lambda: self.view, pause_s=0.02)
        self.history = KeptHistory()
        self.finetuning = CurveBoard()
        self.ledger = EmptyLedger()
        self.quota = QuotaLedger()
        self.audit = AuditLog(None)
        self.orders: list[tuple[str, bool]] = []
        """Models that were to be loaded, and whether others may give way."""
        self.in_the_way = ""
        """What is served, and would have to."""

    def __enter__(self) -> Self:
        self._feed.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.close()

    # What happens

    def change(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)
        self._feed.poke()

    def change_node(self, index: int, **changes: Any) -> None:
        nodes = list(self.view.nodes)
        nodes[index] = replace(nodes[index], **changes)
        self.change(nodes=tuple(nodes))

    def tell(self, text: str, tone: EventTone = "plain") -> None:
        """Something happened."""
        number = len(self.view.events) + 1
        event = EventView(number=number, at_s=START_S + number, kind="node", tone=tone, text=text)
        self.history.store.write([event], [], [])
        self.change(events=(*self.view.events, event))

    def stir(self) -> None:
        """Everything moves a little, as it does in a busy cluster."""
        nodes = tuple(
            replace(
                node,
                used_bytes=self._random.randrange(node.parts.total_bytes, node.memory_bytes),
                loading=(
                    LoadingLayers(chain=CHAIN, start=0, stop=4, fraction=round(self._random.random(), 3)),
                )
                if index >= len(self.view.chains[0].stages)
                else (),
            )
            for index, node in enumerate(self.view.nodes)
        )
        load = LoadView(
            running=self._random.randrange(60),
            waiting=self._random.randrange(9),
            tokens_per_s=self._random.random() * 900,
        )
        self.change(nodes=nodes, load=load)

    # What the routes ask

    def state(self) -> ClusterView:
        return self.view

    def subscribe(self, wake: Callable[[], None]) -> Subscription:
        return self._feed.subscribe(wake)

    def unsubscribe(self, reader: Subscription) -> None:
        self._feed.unsubscribe(reader)

    def requests_after(self, ended: int) -> tuple[tuple[RequestView, ...], int]:
        total = len(self.ended)
        return (*self.live, *self.ended[: total - min(ended, total)]), total

    def usage(self) -> UsageReport:
        return self._usage.report()

    def spent_tokens(self, key: str, since_s: float) -> int:
        return 0

    def catalogue(self) -> tuple[CatalogueEntry, ...]:
        return (CatalogueEntry(model="smollm2", name="SmolLM2", size_bytes=98 * MIB, is_here=True),)

    def plan(
        self,
        model: str,
        form: str,
        chains: int,
        *,
        kv_type: str | None = None,
        parallel: object = None,
        price_per_kwh: float | None = None,
        what_if: object = None,
    ) -> PlanView:
        stage = PlannedStage(
            node="n00", name="machine-00", start=0, stop=32, memory_bytes=MIB, predicted_s=0.01
        )
        chain = PlannedChain(
            is_possible=True,
            reasons=("score: one machine is fastest",),
            stages=(stage,),
            predicted_tokens_per_s_one_stream=80.0,
            predicted_tokens_per_s_many=200.0,
            bottleneck="bottleneck: machine-00, which does everything",
        )
        return PlanView(
            model=model, form=form, layer_count=32, memory_bytes=MIB, text="", chains=(chain,) * chains
        )

    def load_model(
        self,
        model: str,
        form: str,
        chains: int,
        *,
        replaces: bool = False,
        via_coordinator: bool = False,
        kv_type: str | None = None,
        adapters: object = None,
        parallel: object = None,
    ) -> FetchView:
        self.orders.append((model, replaces))
        if self.in_the_way and not replaces:
            raise WouldReplaceError(
                f"serving {model} would replace {self.in_the_way}, which is answering 2 requests"
            )
        return FetchView(model=model, name=model, form=form, chains=chains, status="fetching")

    def create_token(
        self, *, life_s: float, max_uses: int | None, role: object = None, origin: str | None = None
    ) -> NewToken:
        link = f"{origin}/#/join/sc1.secret"
        return NewToken(
            id="t1",
            token="sc1.secret",
            expires_at_s=START_S + life_s,
            max_uses=max_uses,
            link=link,
            qr=qr_svg(link),
        )

    def open_pairing(self) -> NewPairing:
        return NewPairing(code="1234 5678", life_s=300.0, join_port=7421)

    def tokens(self) -> tuple[TokenView, ...]:
        return ()

    def create_key(self, label: str, **options: Any) -> NewKey:
        return NewKey(id="sk-sc-12345678", key="sk-sc-12345678secret", label=label)

    def keys(self) -> tuple[KeyView, ...]:
        return (KeyView(id="sk-sc-abcdefgh", label="laptop", created_at_s=START_S, is_revoked=False),)

    # Making it up

    def _make_view(self, count: int, stages: int) -> ClusterView:
        bounds = [index * 32 // stages for index in range(stages + 1)]
        held = [
            HeldLayers(
                chain=CHAIN,
                model=MODEL,
                start=start,
                stop=stop,
                size_bytes=(stop - start) * 40 * MIB,
                parts=MemoryParts(
                    held_weights_bytes=(stop - start) * 30 * MIB,
                    scratch_bytes=(stop - start) * 2 * MIB,
                    kv_reserved_bytes=(stop - start) * 8 * MIB,
                ),
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        ids = [f"n{number:02}" for number in range(count)]
        chain = ChainView(
            id=CHAIN,
            model=MODEL,
            epoch=1,
            status="ready",
            reason="",
            missing_bytes=0,
            stages=tuple(
                StageView(
                    node=node, start=each.start, stop=each.stop, memory_bytes=each.size_bytes, fraction=1.0
                )
                for node, each in zip(ids, held, strict=False)
            ),
            predicted_tokens_per_s_one_stream=31.0,
            predicted_tokens_per_s_many=240.0,
            bottleneck="bottleneck: machine-03, 9 ms of 30 ms of computing a token",
        )
        model = ModelView(
            name=MODEL,
            status="serving",
            weight_form="int8",
            layer_count=32,
            context_length=8192,
            kv_tokens=16384,
            memory_bytes=1400 * MIB,
            ready_chains=1,
            wanted_chains=1,
            missing_bytes=0,
        )
        nodes = tuple(self._make_node(id, held[i : i + 1]) for i, id in enumerate(ids))
        return ClusterView(
            name="crowd",
            version="0.1.0",
            url="tcp://10.0.0.1:7420",
            driver="head",
            nodes=nodes,
            links=tuple(self._make_link(a, b) for a in ["head", *ids] for b in ids if a < b),
            models=(model,),
            chains=(chain,),
        )

    def _make_node(self, id: str, layers: list[HeldLayers]) -> NodeView:
        return NodeView(
            id=id,
            name=f"machine-{id[1:]}",
            status="ready",
            status_reason="",
            role="worker",
            device=self._random.choice(("cpu", "cuda:0", "mps")),
            threads=self._random.choice((2, 4, 8, 16)),
            version="0.1.0",
            address=f"tcp://10.0.0.{int(id[1:]) + 2}:7420",
            memory_bytes=self._random.choice((2, 4, 8, 24)) * 1024 * MIB,
            used_bytes=sum(each.size_bytes for each in layers),
            parts=MemoryParts(
                held_weights_bytes=sum(each.parts.held_weights_bytes for each in layers),
                scratch_bytes=sum(each.parts.scratch_bytes for each in layers),
                kv_reserved_bytes=sum(each.parts.kv_reserved_bytes for each in layers),
            ),
            is_draining=False,
            is_standby=not layers,
            layers=tuple(layers),
        )

    def _make_link(self, a: str, b: str) -> LinkView:
        return LinkView(
            a=a,
            b=b,
            rtt_s=self._random.uniform(2e-4, 4e-2),
            bytes_per_s=self._random.uniform(1e6, 1e9),
            is_open=True,
        )

    def _make_request(self, number: int, stages: int) -> RequestView:
        prefill_s, decode_s = self._random.uniform(0.05, 0.8), self._random.uniform(0.3, 9.0)
        share = decode_s / stages * 0.7
        return RequestView(
            id=str(number),
            model=MODEL,
            chain=CHAIN,
            state="done",
            prompt_tokens=self._random.randrange(10, 900),
            generated_tokens=self._random.randrange(5, 300),
            started_at_s=START_S + number * 3,
            elapsed_s=0.02 + prefill_s + decode_s,
            queue_s=0.02,
            prefill_s=prefill_s,
            decode_s=decode_s,
            tokens_per_s=self._random.uniform(8, 60),
            finish="stop",
            key=self._random.choice(("sk-sc-abcdefgh", "")),
            stages=tuple(
                StageShare(
                    node=f"n{i:02}", steps=20, queue_s=share * 0.1, compute_s=share, codec_s=share * 0.02
                )
                for i in range(stages)
            ),
        )
