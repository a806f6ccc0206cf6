"""A running cluster's first machine: its parts wired to the coordinator, the drivers and the network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from shardcompute.control import ClusterState, PlacementPolicy
from shardcompute.control.events import LayoutKept, ModelDropped, ModelRequested, NodeDrained, NodePardoned
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.rank_groups import check_ranks
from shardcompute.control.sizes import describe_card
from shardcompute.core.errors import LinkError
from shardcompute.core.fields import shorten
from shardcompute.core.generation import GenerationRequest
from shardcompute.core.kv_types import KvType
from shardcompute.node.accounts import ClusterAccounts, CountUsage
from shardcompute.node.cluster.access import ClusterAccess
from shardcompute.node.cluster.attested import AttestedNodes
from shardcompute.node.cluster.audits.auditor import Auditor, AuditRecord
from shardcompute.node.cluster.audits.recomputation import Recomputations
from shardcompute.node.cluster.canaries.runner import CanaryRunner
from shardcompute.node.cluster.demand import see_demand
from shardcompute.node.cluster.ledger.keeper import LedgerKeeper
from shardcompute.node.cluster.ledger.meters import MeterReadings, steps_of, stored_bytes_of
from shardcompute.node.cluster.ledger.opening import draw_secret, open_ledger
from shardcompute.node.cluster.network import ClusterNetwork
from shardcompute.node.cluster.options import ClusterOptions
from shardcompute.node.cluster.orders import OrderBook, ServedOrder
from shardcompute.node.cluster.preparation import (
    PreparedModel,
    choose_backend,
    offered,
    pool_model,
    prepare_model,
)
from shardcompute.node.cluster.record import ClusterNotes, create_authority, open_record
from shardcompute.node.cluster.served_files import ServedFiles
from shardcompute.node.cluster.strangers import StrangerDesk, expelled, forgotten, with_checks
from shardcompute.node.cluster.teaching import DraftHeadTeaching
from shardcompute.node.coordinator.coordinator import Coordinator
from shardcompute.node.coordinator.driver_attachments import Brief
from shardcompute.node.coordinator.journal import RecordStatus, bind_journal
from shardcompute.node.coordinator.node_registry import await_answer
from shardcompute.node.coordinator.shared import KnownCoordinator, Leadership
from shardcompute.node.discovery.dht.records import SignedRecord, Whereabout, sign_record
from shardcompute.node.driver.command_executor import InProcessDriver
from shardcompute.node.driver.hosted_client import HostedDrivers
from shardcompute.node.driver.pool import DriverPool
from shardcompute.node.rpc.commands import MeetNode, Peer
from shardcompute.node.rpc.endpoint import receive_all
from shardcompute.node.rpc.link_probe import answer_probes
from shardcompute.node.telemetry.quota import QuotaLedger
from shardcompute.relay.server import RelayView
from shardcompute.security import (
    Revocations,
)
from shardcompute.trust.pools import PoolPolicy
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.sources.progress import Progress
from shardcompute.wire import Message
from shardcompute.wire.codecs.mode import check_wire

_CERTIFICATES_EVERY_S = 3600.0
_PASS_EVERY_S = 1800.0
_ACCOUNTS_EVERY_S = 2.0
_DEMAND_EVERY_S = 1.0
_COORDINATORS_EVERY_S = 5.0


class Cluster:
    """A running cluster's first machine. Leaving the block (or `close`) stops it; workers wait for its return."""

    def __init__(self, options: ClusterOptions, leadership: Leadership | None = None) -> None:
        """With a `leadership`, which this coordinator holds, the journal is the one that it shares with others."""
        self.options = options
        self.leadership = leadership
        self._draw_secret = draw_secret() if options.has_audits else b""
        # The journal comes first: where there is an authority there has been one.
        authority, self._journal = open_record(options, leadership)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._journal.close)
            self._authority = authority or create_authority(options.folder, options.name)
            self._open_books()
            self._network = self._open_network()
            self._endpoint = self._network.endpoint
            on_error.callback(self._endpoint.close)
            self.node = self._endpoint.node
            self.pool = self._open_pool()
            self.quota = QuotaLedger(
                own=f"{self.node}:{self.pool.session_namespace}",
                read=lambda name: self._notes.read(name, bytes, None),
                write=self._notes.keep,
            )
            """What API keys with limits have used, at all servers of the cluster together."""
            self._accounts = ClusterAccounts(self.quota, lambda: self.access.key_book)
            self.ledger = self._open_ledger()
            on_error.callback(self.ledger.close)
            self.coordinator = self._open_coordinator()
            self.coordinator.listen(self.ledger.saw)
            self._recomputations = Recomputations(
                Peer(self.node, self._endpoint.url), self.coordinator, self._endpoint.dialler("driver")
            )
            self.auditor = self._open_auditor()
            self._open_pool_of_strangers()
            self.canaries = self._open_canaries()
            self.draft_heads = DraftHeadTeaching(
                self._files,
                self.pool,
                self.coordinator,
                Peer(self.node, self._endpoint.url),
                options.draft_heads,
            )
            self._network.open_doors(leadership, self._meet)
            on_error.callback(self._network.close_doors)
            self._start()
            on_error.pop_all()

    def _open_books(self) -> None:
        """What the journal holds besides events, and what models are served from."""
        options = self.options
        bind_journal(self._journal, self._authority.fingerprint)
        self._notes = ClusterNotes(
            self._journal, lambda: self.coordinator.record, recovers=options.recovers_journal
        )
        self.access = ClusterAccess(
            self._authority,
            options.folder,
            self._notes,
            join_addresses=lambda: self._network.addresses.join_addresses(),
            on_keys=lambda: self.coordinator.introduce(),
            recovers=options.recovers_journal,
            attested=AttestedNodes(options.attestation, self._notes),
        )
        self._orders = OrderBook(self._notes)
        self._files = ServedFiles(options.folder / "served")

    def _open_network(self) -> ClusterNetwork:
        return ClusterNetwork(
            self.options,
            self._authority,
            self.access,
            {
                "control": lambda link: self.coordinator.serve_control(link),
                "weights": self._files.weights.serve,
                "probe": answer_probes,
                "stage": lambda link: receive_all(link, self._take),
            },
        )

    def _open_pool(self) -> DriverPool:
        return DriverPool(
            self._endpoint.dialler("driver"),
            self._endpoint.url,
            lambda node: self.coordinator.lost_link(node),
            patience_s=self.options.patience_s,
            quiet_s=self.options.quiet_s,
            hosted=HostedDrivers(
                self._endpoint.dialler("generations"),
                lambda chain, node: self.coordinator.lost_host(chain, node),
            ),
            on_overdue=lambda overdue: self.coordinator.step_overdue(overdue),
            on_ring=lambda *timed: self.coordinator.ring_timed(*timed),
            credentials=lambda: self._endpoint.credentials,
            prepare=self._prepare,
            on_asked=self._asked,
            on_receipt=self._made_receipt,
        )

    def _asked(self, request: GenerationRequest) -> None:
        """An answer is to have a receipt."""
        for each in (self.ledger, self.auditor):
            if each is not None:
                each.asked(request)

    def _made_receipt(self, receipt: str, packed: bytes) -> None:
        for each in (self.ledger, self.auditor):
            if each is not None:
                each.made(receipt, packed)

    def _open_ledger(self) -> LedgerKeeper:
        return open_ledger(
            self.options.folder,
            self._authority,
            self.node,
            lambda: self.access.revocations.node_ids,
            self._read_meters,
            self._draw_secret,
        )

    def _read_meters(self) -> MeterReadings:
        relayed = self.relay_view()
        return MeterReadings(
            steps=steps_of(self.pool.load().stages),
            stored_bytes=stored_bytes_of(self.coordinator.state),
            seeded_bytes={self.node: sum(self.weights_sent_bytes().values())},
            relayed_bytes={} if relayed is None else {self.node: relayed.spliced_bytes},
        )

    def _open_auditor(self) -> Auditor | None:
        if not self.options.has_audits:
            return None
        return Auditor(
            self.options.audit_rate,
            self._authority.certificate_pem,
            self.coordinator,
            self._recomputations,
            self._audited,
            secret=self._draw_secret,
        )

    def _audited(self, record: AuditRecord) -> None:
        """In the auditor's thread."""
        self.ledger.audited(record)
        self.pool.receipts.mark(record.receipt, record.judgement.outcome)
        if any(each.finding == "failed" for each in record.judgement.blames):
            # What was found is applied before this has its turn.
            self.coordinator.later(lambda: self.coordinator.background(self._throw_out_expelled))

    def _open_pool_of_strangers(self) -> None:
        """Whoever came without a token is a stranger still, whether or not others may come now."""
        for event in forgotten(self._notes, self.coordinator.state.pool):
            self.coordinator.post(event)
        if self.options.pool is not None:
            self.access.open_pool(
                StrangerDesk(
                    self.options.pool,
                    self._notes,
                    lambda: self.coordinator.state,
                    self.coordinator.post,
                    self.access.has_admitted,
                )
            )

    def _open_canaries(self) -> CanaryRunner | None:
        every_s = self.options.canaries_every_s
        if every_s <= 0.0:
            return None
        return CanaryRunner(
            every_s,
            self.options.folder / "canaries.json",
            self.pool,
            lambda: self.coordinator.state,
            has_receipts=self.options.has_receipts,
        )

    def _throw_out_expelled(self) -> None:
        """Their certificates are refused everywhere from now on; in any thread."""
        for node in expelled(self.coordinator.state.pool):
            if node not in self.access.revocations.node_ids:
                self.revoke_node(node)

    def _prepare(self, chain: str, request: GenerationRequest) -> GenerationRequest:
        """Every request, before it goes to its chain; in any thread."""
        if self.canaries is not None:
            self.canaries.placed(chain, request)
        return with_checks(self.coordinator.state, chain, request)

    def _take(self, message: Message, body: memoryview, sender: str) -> None:
        """What stages send: of chains that are served, and of what is computed again."""
        if not self._recomputations.take(message, body, sender):
            self.pool.take(message, body, sender)

    def _open_coordinator(self) -> Coordinator:
        options = self.options
        return Coordinator(
            self.node,
            self._endpoint.url,
            self._journal,
            InProcessDriver(self.node, self.pool),
            dial=lambda url, node: self._endpoint.dial(url, "probe", node, only_direct=True),
            initial=ClusterState(
                driver=self.node,
                placing=options.placing or PlacementPolicy(),
                pooling=options.pool or PoolPolicy(),
            ),
            revocations=lambda: self.access.revocations.to_bytes(),
            sign=self._network.issuer.renew,
            grant=lambda peer: self._network.relays.grant(peer),
            answer=self._network.answer_meeting,
            brief=self._brief,
            accounts=self._accounts,
            lead=lambda: self._network.addresses.lead(),
            ledger=self.ledger,
            standing=self.access.standing_of,
            wire=check_wire(options.wire),
        )

    def _start(self) -> None:
        if self.leadership is not None:
            self.coordinator.after(_COORDINATORS_EVERY_S, self._look_for_coordinators)
        self.coordinator.start()
        self._endpoint.start()
        self._renew_pass()
        self._check_certificates()
        self._write_accounts()
        if self.coordinator.state.placing.most_chains > 1:
            self._see_demand()
        self._network.attend()
        self.coordinator.background(self._throw_out_expelled)
        if self.canaries is not None:
            self.canaries.start()

    # What is done now and then, in the coordinator's thread

    def _write_accounts(self) -> None:
        self.coordinator.after(_ACCOUNTS_EVERY_S, self._write_accounts)
        self.quota.flush()

    def _see_demand(self) -> None:
        self.coordinator.after(_DEMAND_EVERY_S, self._see_demand)
        see_demand(self.coordinator, self.pool)

    def _renew_pass(self) -> None:
        if self._network.renew_pass():
            self.coordinator.after(_PASS_EVERY_S, self._renew_pass)

    def _check_certificates(self) -> None:
        self.coordinator.after(_CERTIFICATES_EVERY_S, self._check_certificates)
        self._network.check_certificates()

    def _look_for_coordinators(self) -> None:
        self.coordinator.after(_COORDINATORS_EVERY_S, self._look_for_coordinators)
        self.coordinator.background(self._refresh_list)

    def _refresh_list(self) -> None:
        """In any thread."""
        if self._network.addresses.refresh():
            self.coordinator.later(self.coordinator.control_server.tell_all)

    # What others ask of this machine

    def _meet(self, node: str, offer: bytes) -> bytes:
        asked = self.coordinator.registry.ask(node, MeetNode(self.node, offer))
        return await_answer(node, asked)

    def _brief(self) -> Brief:
        return Brief([offered(model) for model in self.pool.all_models()], self.access.key_book.to_bytes())

    # What it is, and how it goes

    @property
    def name(self) -> str:
        return self._authority.name

    @property
    def fingerprint(self) -> str:
        """Of the authority's certificate."""
        return self._authority.fingerprint

    @property
    def url(self) -> str:
        return self._endpoint.url

    @property
    def urls(self) -> tuple[str, ...]:
        """Where members dial this cluster's coordinators."""
        return self._network.addresses.control_urls()

    @property
    def join_port(self) -> int:
        return self._network.join_server.port

    @property
    def relay_doors(self) -> Sequence[str]:
        """By which this process is reached where it cannot be dialled: from networks that let only the web out, and
        through relays elsewhere."""
        return self._network.relays.doors

    def relay_urls(self) -> tuple[str, ...]:
        """The door of each relay that is to be preferred."""
        return tuple(doors[0] for doors in self._network.relays.urls if doors)

    def relay_view(self) -> RelayView | None:
        """What passes through the relay in this process; None where there is none."""
        return self._network.relays.view()

    def sign_whereabout(self, whereabout: Whereabout, sequence: int) -> SignedRecord:
        """A record for the hash table (see `discovery.dht`), by which members find this cluster again."""
        return sign_record(self._authority.private_key, whereabout, sequence=sequence)

    def coordinators(self) -> tuple[KnownCoordinator, ...]:
        """Where several share a store: who leads, waits and is away."""
        return self._network.addresses.known()

    @property
    def is_deposed(self) -> bool:
        """Whether another coordinator leads: this one is to be closed."""
        return self.leadership is not None and self.leadership.is_deposed

    @property
    def record_status(self) -> RecordStatus:
        """Whether all that has happened is on record."""
        return self.coordinator.record.status

    def watch_record(self, listener: Callable[[RecordStatus], None]) -> None:
        """Call `listener`, from any thread, when the record falls behind and when it has caught up."""
        self.coordinator.record.listen(listener)

    def listen_to_usage(self, count: CountUsage) -> None:
        """Take what drivers in processes of their own report of their use."""
        self._accounts.listen(count)

    def weights_sent_bytes(self) -> dict[str, int]:
        """What workers have fetched from this machine, by node."""
        return self._files.weights.sent_bytes()

    # Models

    def serve(
        self,
        checkpoint: Checkpoint,
        *,
        form: str,
        chains: int = 1,
        parallel: Parallelism | None = None,
        kv_type: KvType | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Serve a model from whatever workers there are and will be, cut like this (None: as was asked for before),
        with KV of this type (None: the cluster's)."""
        prepared = self.prepare(checkpoint, form, progress)
        self.serve_prepared(prepared, chains=chains, parallel=parallel, kv_type=kv_type)

    def prepare(self, checkpoint: Checkpoint, form: str, progress: Progress | None = None) -> PreparedModel:
        """Make ready what serving a model takes; nobody hears of it yet."""
        return prepare_model(self.options, checkpoint, form, progress)

    def serve_prepared(
        self,
        prepared: PreparedModel,
        *,
        chains: int = 1,
        parallel: Parallelism | None = None,
        kv_type: KvType | None = None,
    ) -> None:
        """See `serve`."""
        options, checkpoint = self.options, prepared.checkpoint
        context = min(options.context_length, checkpoint.spec.context_length)
        model = describe_card(
            prepared.served.card,
            kv_tokens=options.kv_tokens,
            kv_type=kv_type or options.kv_type,
            context_length=context,
        )
        check_ranks(model, parallel)
        self._files.hold(prepared)
        self.pool.add_model(pool_model(prepared, context, options.speculation))
        choice = choose_backend(
            options.choose_backend, self.coordinator.state, checkpoint, model.weight_form, parallel
        )
        model = replace(model, backend=choice.backend, backend_reason=shorten(choice.reason))
        self.coordinator.introduce()
        self.coordinator.post(
            ModelRequested(model, chains, has_draft_model=bool(prepared.drafters), parallel=parallel)
        )

    def remember(self, order: ServedOrder) -> None:
        """Serve this again after a restart; until it is dropped."""
        self._orders.remember(order)

    def remembered(self) -> tuple[ServedOrder, ...]:
        return self._orders.all()

    def files_of(self, model: str) -> Checkpoint | None:
        """What a model that is served was opened from."""
        return self._files.checkpoint_of(model)

    def drop(self, model: str) -> None:
        self._orders.forget(model)
        self.coordinator.post(ModelDropped(model))
        self.pool.remove_model(model)
        self.coordinator.introduce()
        self._files.close(model)

    def keep_layout(self, model: str, is_kept: bool) -> None:
        self.coordinator.post(LayoutKept(model, is_kept))

    # Nodes

    def drain(self, node: str) -> None:
        self.coordinator.post(NodeDrained(node))

    def pardon(self, node: str) -> None:
        """Let a node work again that audits have put in quarantine."""
        self.coordinator.post(NodePardoned(node))

    def revoke_node(self, node: str) -> bool:
        """Throw a node out for good: its certificate is refused everywhere from now on, and so are the tokens that it
        joined with, as it knows them. Whether that is on record; otherwise it will be once the disk has room."""

        def act(revocations: Revocations) -> None:
            self._endpoint.revocations = revocations
            self.coordinator.revoke(node)
            self._endpoint.heed(revocations)

        return self.access.revoke_node(node, act)

    # The end

    def close(self) -> None:
        self.ledger.flush()
        self._network.close_doors()
        if self.canaries is not None:
            self.canaries.close()
        if self.auditor is not None:
            self.auditor.close()
        self.quota.flush()
        self.coordinator.close()
        self.ledger.close()
        self.pool.close()
        self._endpoint.close()
        self._files.close_all()
        self._journal.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(LinkError):
            self.close()
