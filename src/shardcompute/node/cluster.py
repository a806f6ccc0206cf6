"""The first machine of a cluster: coordinator, join server, weights and drivers in one process.

A cluster lives in a folder: its authority, its journal, its tokens and keys. Starting again with the same folder
finds the same cluster; workers come back by themselves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from shardcompute.backends.cpu_choice import ONNX, CpuBackendChoice
from shardcompute.control import ClusterState, PlacementPolicy
from shardcompute.control.events import ModelDropped, ModelRequested, NodeDrained
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.placement.rank_groups import check_ranks
from shardcompute.control.sizes import describe_card
from shardcompute.core.errors import JournalError, LinkError, SourceError, StoreError, UsageError
from shardcompute.core.fields import shorten
from shardcompute.core.generation import Speculation
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.decoding.drafting import Drafter
from shardcompute.models.families import is_fallback
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.accounts import ClusterAccounts, CountUsage
from shardcompute.node.coordinator.control_server import Lead
from shardcompute.node.coordinator.coordinator import Coordinator
from shardcompute.node.coordinator.driver_attachments import Brief
from shardcompute.node.coordinator.journal import JournalStore, RecordStatus, bind_journal, open_journal
from shardcompute.node.coordinator.node_registry import await_answer
from shardcompute.node.coordinator.shared import (
    Candidate,
    CoordinatorList,
    Leadership,
    SharedJournal,
    check_owner,
    register_candidate,
)
from shardcompute.node.discovery.dht.records import SignedRecord, Whereabout, sign_record
from shardcompute.node.driver.command_executor import InProcessDriver
from shardcompute.node.driver.hosted_client import HostedDrivers
from shardcompute.node.driver.pool import PATIENCE_S, DriverPool, PoolModel
from shardcompute.node.driver.repair_wait import QUIET_S
from shardcompute.node.enrolment.admission import Admission, Application, Companion
from shardcompute.node.enrolment.certificate_issuer import CertificateIssuer
from shardcompute.node.enrolment.join_server import JoinServer
from shardcompute.node.enrolment.pairing_server import PairingServer
from shardcompute.node.reach.cluster_relays import ClusterRelays, RelayOptions
from shardcompute.node.rpc.commands import MeetNode, OfferedModel
from shardcompute.node.rpc.endpoint import NEAR_HOSTS, Endpoint, receive_all
from shardcompute.node.rpc.link_probe import answer_probes
from shardcompute.node.telemetry.quota import QuotaLedger
from shardcompute.node.weights.draft_heads import draft_head_attachments
from shardcompute.node.weights.originals import note_original
from shardcompute.node.weights.pinned_hashes import PinnedHashes
from shardcompute.node.weights.server import WeightsServer
from shardcompute.relay.client import RelayPass
from shardcompute.relay.server import RelayView
from shardcompute.runtime.fallback import check_form, config_attachment, speculation_for
from shardcompute.security import (
    ClusterAuthority,
    KeyBook,
    KeyLimits,
    KeyRole,
    KeySummary,
    Revocations,
    Role,
    TokenBook,
    join_server_context,
)
from shardcompute.security.api_keys import NO_LIMITS
from shardcompute.security.pairing.codes import PairingCode, PairingDesk
from shardcompute.security.private_files import open_private_folder
from shardcompute.security.revocations import load_revocations, save_revocations
from shardcompute.security.token_book import TokenSummary
from shardcompute.weights.adapter_pack import adapter_attachments
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.gguf_stage import header_attachment
from shardcompute.weights.served import ServedWeights, attachments_of, content_of, prepare_served
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.tokenizer_pack import TOKENIZER, pack_tokenizer
from shardcompute.wire import Link, Transports, default_transports, join_address
from shardcompute.wire.codecs.mode import EXACT, check_wire

log = logging.getLogger(__name__)
_CERTIFICATES_EVERY_S = 3600.0
_PAIRED_LIFE_S = 600.0
_PASS_EVERY_S = 1800.0
_ACCOUNTS_EVERY_S = 2.0
_COORDINATORS_EVERY_S = 5.0
Book = TypeVar("Book")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where a cluster lives and listens. Port 0: any free one. `advertise` is the host that others dial."""

    folder: Path
    name: str = "home"
    host: str = "127.0.0.1"
    port: int = 7420
    join_port: int = 7421
    advertise: str = ""
    kv_tokens: int = 16_384
    kv_type: KvType = DEFAULT_KV_TYPE
    """What every CPU stage of a model rounds keys and values to, where its order does not say: the same in all of them,
    so that tokens do not depend on where it is cut."""
    context_length: int = 8192
    placing: PlacementPolicy | None = None
    wire: str = EXACT
    """How activations travel between stages, see `codec_choice`."""
    speculation: Speculation = field(default_factory=Speculation)
    patience_s: float = PATIENCE_S
    """So long streams wait for a model that no machines can serve any more."""
    quiet_s: float = QUIET_S
    """So long streams wait for a chain whose repair comes no further; as long as it does, they wait."""
    open_drafters: Callable[[Tokenizer, int], Sequence[Drafter]] = lambda tokenizer, vocab_size: ()
    """Opens what drafts for a model, given its tokenizer and vocabulary's size."""
    transports: Transports = field(default_factory=default_transports)
    """How links are made, by the scheme of their URLs."""
    draft_heads: Path | None = None
    """Where draft heads lie, besides those that come with the package."""
    choose_backend: Callable[[Checkpoint, str], CpuBackendChoice] | None = None
    """What computes a model in a form on CPUs whose owners left that open; None: each by its own backend."""
    relays: RelayOptions = field(default_factory=RelayOptions)
    """Where nodes meet that cannot dial each other."""
    recovers_journal: bool = False
    """Go on with what is left of a journal that is missing or damaged."""


class ServedOrder(msgspec.Struct, frozen=True):
    """A model that somebody asked a running cluster to serve, and where it comes from."""

    name: str
    reference: str
    form: str
    chains: int
    via_coordinator: bool = False
    kv_type: KvType | None = None
    """None: what the cluster is started with."""
    adapters: dict[str, str] = {}
    """Folders of the adapters beside it, by name."""
    parallel: Parallelism | None = None
    """How it is to be cut; None: nobody has said."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that can be served: its files opened, and whatever travels beside its weights made."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    served: ServedWeights
    drafters: Sequence[Drafter]
    has_draft_head: bool


class Cluster:
    """A running cluster's first machine. Leaving the block (or `close`) stops it; workers wait for its return."""

    def __init__(self, options: ClusterOptions, leadership: Leadership | None = None) -> None:
        """With a `leadership`, which this coordinator holds, the journal is the one that it shares with others."""
        self.options = options
        self.leadership = leadership
        self._lock = threading.Lock()
        self._on_joined: Callable[[str, str, str], None] = lambda node, role, token_id: None
        # The journal comes first: where there is an authority there has been one.
        authority, self._journal = _open_record(options, leadership)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._journal.close)
            self._authority = authority or create_authority(options.folder, options.name)
            self._open(options, on_error)
            on_error.pop_all()

    def _open(self, options: ClusterOptions, on_error: contextlib.ExitStack) -> None:
        self._open_books()
        self._pairing = PairingDesk()
        self._on_pairing: Callable[[str, bool], None] = lambda machine, is_right: None
        self._issuer = CertificateIssuer(
            self._authority, options.folder / "coordinator", lambda: self._revocations
        )
        credentials = self._issuer.own()
        credentials.save()
        self._served: dict[str, ServedWeights] = {}
        self._notes: dict[str, Path | None] = {}
        """For workers of this machine, where models lie that are served."""
        self._weights = WeightsServer(self._served, pinned=PinnedHashes(options.folder / "served"))
        self._checkpoints: dict[str, Checkpoint] = {}
        self._drafters: dict[str, Sequence[Drafter]] = {}
        self._endpoint = Endpoint(
            credentials,
            join_address(options.host, options.port),
            {
                "control": self._serve_control,
                "weights": self._weights.serve,
                "probe": answer_probes,
                "stage": lambda link: receive_all(link, self.pool.take),
            },
            advertise=options.advertise,
            transports=options.transports,
        )
        on_error.callback(self._endpoint.close)
        self._endpoint.revocations = self._revocations
        self.node = self._endpoint.node
        self.pool = DriverPool(
            self._endpoint.dialler("driver"),
            self._endpoint.url,
            self._driver_lost_link,
            patience_s=options.patience_s,
            quiet_s=options.quiet_s,
            hosted=HostedDrivers(
                self._endpoint.dialler("generations"),
                lambda chain, node: self.coordinator.lost_host(chain, node),
            ),
            on_overdue=lambda overdue: self.coordinator.step_overdue(overdue),
        )
        self.quota = QuotaLedger(
            own=f"{self.node}:{self.pool.session_namespace}",
            read=lambda name: self._read_book(name, bytes, None),
            write=self._keep_note,
        )
        """What API keys with limits have used, at all servers of the cluster together."""
        self._accounts = ClusterAccounts(self.quota, lambda: self._keys)
        self.coordinator = Coordinator(
            self.node,
            self._endpoint.url,
            self._journal,
            InProcessDriver(self.node, self.pool),
            dial=lambda url, node: self._endpoint.dial(url, "probe", node, only_direct=True),
            initial=ClusterState(driver=self.node, placing=options.placing or PlacementPolicy()),
            revocations=lambda: self._revocations.to_bytes(),
            sign=self._issuer.renew,
            grant=lambda peer: self._relays.grant(peer),
            answer=self._answer_meeting,
            brief=self._brief,
            accounts=self._accounts,
            lead=self._lead,
            wire=check_wire(options.wire),
        )
        self._join_tls = join_server_context(credentials.identity, credentials.certificate_pem)
        self._join_server = JoinServer(
            options.host,
            options.join_port,
            self._join_tls,
            self._authority.certificate_pem,
            self._admit,
            pairing=PairingServer(
                self._pairing, self._authority.fingerprint, self._pair, self._pairing_refused
            ),
        )
        on_error.callback(self._join_server.close)
        self._relays = ClusterRelays(
            self._authority,
            options.relays,
            host=options.host,
            advertise=options.advertise,
            entries=self._entries(),
        )
        if self._endpoint.reach is not None:
            self._endpoint.reach.meet_through(self._meet)
        self._open_list()
        self.coordinator.start()
        self._endpoint.start()
        self._renew_pass()
        self._check_certificates()
        self._write_accounts()

    def _write_accounts(self) -> None:
        self.coordinator.after(_ACCOUNTS_EVERY_S, self._write_accounts)
        self.quota.flush()

    def _entries(self) -> dict[str, tuple[str, int]]:
        """Servers of this process that the relay leads to, for networks that let only the web out."""
        host = NEAR_HOSTS.get(self.options.host, self.options.host)
        return {
            "links": (host, urlsplit(self._endpoint.url).port or 0),
            "join": (host, self._join_server.port),
        }

    def _renew_pass(self) -> None:
        """This process is a member like others where it has to meet one."""
        credentials, reach = self._endpoint.credentials, self._endpoint.reach
        access = self._relays.grant(credentials.own)
        if access is not None and reach is not None:
            reach.learn(RelayPass(credentials.identity, access.ticket), access.relays)
            self.coordinator.after(_PASS_EVERY_S, self._renew_pass)

    def _meet(self, node: str, offer: bytes) -> bytes:
        asked = self.coordinator.registry.ask(node, MeetNode(self.node, offer))
        return await_answer(node, asked)

    def _answer_meeting(self, caller: str, offer: bytes) -> bytes:
        if self._endpoint.reach is None:
            raise LinkError("the coordinator is reached by its address alone")
        return self._endpoint.reach.answer(caller, offer)

    def _open_list(self) -> None:
        """Where nodes find this coordinator and, where there are several, the others."""
        join = f"{self.options.advertise or self.options.host}:{self._join_server.port}"
        own = Candidate(self.node, self._endpoint.url, join)
        self._coordinators: CoordinatorList | None = None
        self._addresses: Callable[[], tuple[Candidate, ...]] = lambda: (own,)
        if self.leadership is not None:
            store, prefix = self.leadership.store, self.leadership.prefix
            register_candidate(store, prefix, own)
            self._coordinators = CoordinatorList(store, prefix, own)
            self._addresses = self._coordinators.all
            self._coordinators.refresh()
            self.coordinator.after(_COORDINATORS_EVERY_S, self._look_for_coordinators)

    def _look_for_coordinators(self) -> None:
        """In the coordinator's thread."""
        self.coordinator.after(_COORDINATORS_EVERY_S, self._look_for_coordinators)
        self.coordinator.background(self._refresh_list)

    def _refresh_list(self) -> None:
        with contextlib.suppress(StoreError):
            if self._coordinators is not None and self._coordinators.refresh():
                self.coordinator.later(self.coordinator.control_server.tell_all)

    def _lead(self) -> Lead:
        if self.leadership is None:
            return Lead()
        return Lead(self.leadership.epoch, tuple(each.control_url for each in self._addresses()))

    def _check_certificates(self) -> None:
        self.coordinator.after(_CERTIFICATES_EVERY_S, self._check_certificates)
        self._issuer.check_own(self._endpoint, self._join_tls)

    def _open_books(self) -> None:
        """What the journal holds besides events. Who was thrown out is also known beside the authority."""
        bind_journal(self._journal, self._authority.fingerprint)
        self._tokens = self._read_book("tokens", TokenBook.from_bytes, TokenBook())
        self._keys = self._read_book("keys", KeyBook.from_bytes, KeyBook())
        orders: list[ServedOrder] = self._read_book("models", _decode_orders, [])
        self._orders = {order.name: order for order in orders}
        folder = authority_folder(self.options.folder)
        kept, noted = load_revocations(folder), self._read_book("revocations", Revocations.from_bytes, None)
        if kept is None and noted is None and self.options.recovers_journal:
            log.warning("who was thrown out of the cluster is not known any more: throw them out again")
        self._revocations = (kept or Revocations()).merged(noted or Revocations())
        if kept != self._revocations:
            save_revocations(folder, self._revocations)
        if noted != self._revocations:
            self._journal.write_note("revocations", self._revocations.to_bytes())

    @property
    def name(self) -> str:
        return self._authority.name

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

    def listen_to_joins(self, listener: Callable[[str, str, str], None]) -> None:
        """Call `listener` with the node, role and token's id of every machine that is let in, in any thread."""
        self._on_joined = listener

    @property
    def is_deposed(self) -> bool:
        """Whether another coordinator leads: this one is to be closed."""
        return self.leadership is not None and self.leadership.is_deposed

    @property
    def fingerprint(self) -> str:
        """Of the authority's certificate."""
        return self._authority.fingerprint

    @property
    def url(self) -> str:
        return self._endpoint.url

    @property
    def relay_doors(self) -> Sequence[str]:
        """By which this process is reached from networks that let only the web out."""
        return self._relays.doors

    def relay_view(self) -> RelayView | None:
        """What passes through the relay in this process; None where there is none."""
        return self._relays.view()

    def weights_sent_bytes(self) -> dict[str, int]:
        """What workers have fetched from this machine, by node."""
        return self._weights.sent_bytes()

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
        options = self.options
        checkpoint, served, drafters = prepared.checkpoint, prepared.served, prepared.drafters
        context = min(options.context_length, checkpoint.spec.context_length)
        model = describe_card(
            served.card,
            kv_tokens=options.kv_tokens,
            kv_type=kv_type or options.kv_type,
            context_length=context,
        )
        check_ranks(model, parallel)
        self._close_files(checkpoint.name)
        self._drafters[checkpoint.name] = drafters
        self._served[checkpoint.name] = served
        self._notes[checkpoint.name] = note_original(served.card, served.origin)
        self._checkpoints[checkpoint.name] = checkpoint
        checkpoint.files.keep()
        self.pool.add_model(
            PoolModel(
                checkpoint.name,
                prepared.tokenizer,
                checkpoint.spec.vocab_size,
                context,
                int(time.time()),
                content_of(checkpoint),
                checkpoint.files.total_bytes,
                speculation_for(checkpoint.spec, options.speculation),
                drafters,
                has_draft_head=prepared.has_draft_head,
                adapters=tuple(adapter.name for adapter in checkpoint.adapters),
                vision=checkpoint.spec.vision,
            )
        )
        choice = self._choose_backend(checkpoint, model.weight_form, parallel)
        model = replace(model, backend=choice.backend, backend_reason=shorten(choice.reason))
        self.coordinator.introduce()
        self.coordinator.post(
            ModelRequested(model, chains, has_draft_model=bool(drafters), parallel=parallel)
        )

    def _choose_backend(
        self, checkpoint: Checkpoint, form: str, parallel: Parallelism | None
    ) -> CpuBackendChoice:
        """For the whole life of the model in this cluster, also over restarts: tokens must not depend on which machine
        goes on. llama.cpp only where every CPU that is here can run it."""
        if self.options.choose_backend is None or is_fallback(checkpoint.spec):
            return CpuBackendChoice("", "")
        if checkpoint.adapters:
            return CpuBackendChoice(ONNX, "it adds what adapters add")
        if parallel is not None and parallel.tp > 1:
            return CpuBackendChoice(ONNX, "it can compute a part of every layer")
        state = self.coordinator.state
        served = state.models.get(checkpoint.name)
        if served is not None and served.is_wanted and served.model.weight_form == form:
            known = served.model
            if known.backend:
                return CpuBackendChoice(known.backend, known.backend_reason)
        choice = self.options.choose_backend(checkpoint, form)
        if choice.backend == ONNX:
            return choice
        unable = [
            node.name
            for node in state.nodes.values()
            if node.can_work and node.is_live and node.device == "cpu" and node.backend == ONNX
            if node.alternative(choice.backend) is None
        ]
        if not unable:
            return choice
        return CpuBackendChoice(ONNX, f"{', '.join(sorted(unable)[:3])} cannot run llama.cpp")

    def remember(self, order: ServedOrder) -> None:
        """Serve this again after a restart; until it is dropped."""
        with self._lock:
            self._orders[order.name] = order
            self._keep_note("models", msgspec.json.encode(list(self._orders.values())))

    def files_of(self, model: str) -> Checkpoint | None:
        """What a model that is served was opened from."""
        with self._lock:
            return self._checkpoints.get(model)

    def remembered(self) -> tuple[ServedOrder, ...]:
        with self._lock:
            return tuple(self._orders.values())

    def drop(self, model: str) -> None:
        with self._lock:
            if self._orders.pop(model, None) is not None:
                self._keep_note("models", msgspec.json.encode(list(self._orders.values())))
        self.coordinator.post(ModelDropped(model))
        self.pool.remove_model(model)
        self.coordinator.introduce()
        self._close_files(model)

    def _close_files(self, model: str) -> None:
        note = self._notes.pop(model, None)
        if note is not None:
            note.unlink(missing_ok=True)
        served = self._served.pop(model, None)
        if served is not None:
            served.tensors.close()
        for drafter in self._drafters.pop(model, ()):
            drafter.close()
        checkpoint = self._checkpoints.pop(model, None)
        if checkpoint is not None:
            checkpoint.close()

    def drain(self, node: str) -> None:
        self.coordinator.post(NodeDrained(node))

    # Who may join

    def create_token(
        self,
        *,
        life_s: float = 86_400.0,
        max_uses: int | None = None,
        roles: Collection[Role] = (Role.WORKER, Role.DRIVER),
    ) -> str:
        with self._lock:
            tokens, token = self._tokens.create(
                addresses=[each.join_address for each in self._addresses()],
                fingerprint=self._authority.fingerprint,
                cluster=self._authority.name,
                now_s=time.time(),
                roles=roles,
                life_s=life_s,
                max_uses=max_uses,
            )
            self._write_note("tokens", tokens.to_bytes())
            self._tokens = tokens
        return token.encode()

    def open_pairing(self) -> PairingCode:
        """A code that lets one machine in, once and soon; the one before is good for nothing."""
        return self._pairing.open()

    def watch_pairing(self, listener: Callable[[str, bool], None]) -> None:
        """Call `listener`, from any thread, with what a machine calls itself and whether its code was right."""
        self._on_pairing = listener

    def _pair(self, machine: str) -> str:
        token = self.create_token(life_s=_PAIRED_LIFE_S, max_uses=1)
        self._on_pairing(machine, True)
        return token

    def _pairing_refused(self, machine: str) -> None:
        self._on_pairing(machine, False)

    def sign_whereabout(self, whereabout: Whereabout, sequence: int) -> SignedRecord:
        """A record for the hash table (see `discovery.dht`), by which members find this cluster again."""
        return sign_record(self._authority.private_key, whereabout, sequence=sequence)

    def relay_urls(self) -> tuple[str, ...]:
        """The door of each relay that is to be preferred."""
        return tuple(doors[0] for doors in self._relays.urls if doors)

    @property
    def join_port(self) -> int:
        return self._join_server.port

    def tokens(self) -> tuple[TokenSummary, ...]:
        return self._tokens.summaries(time.time())

    def revoke_token(self, token_id: str) -> None:
        with self._lock:
            self._tokens = self._tokens.revoke(token_id)
            self._keep_note("tokens", self._tokens.to_bytes())

    def revoke_node(self, node: str) -> bool:
        """Throw a node out for good: its certificate is refused everywhere from now on, and so are the tokens that it
        joined with, as it knows them. Whether that is on record; otherwise it will be once the disk has room."""
        with self._lock:
            self._revocations = revocations = self._revocations.with_node(node)
            for token_id in self._tokens.used_by(node, time.time()):
                self._tokens = self._tokens.revoke(token_id)
        self._endpoint.revocations = revocations
        self.coordinator.revoke(node)
        self._endpoint.heed(revocations)
        with self._lock:
            revocations, folder = self._revocations, authority_folder(self.options.folder)
            is_saved = self.coordinator.record.keep(
                "revoked nodes", lambda: save_revocations(folder, revocations)
            )
            is_saved = self._keep_note("tokens", self._tokens.to_bytes()) and is_saved
            return self._keep_note("revocations", revocations.to_bytes()) and is_saved

    def tokens_used_by(self, node: str) -> tuple[str, ...]:
        """Ids of tokens that a node joined with and that are still good."""
        return self._tokens.used_by(node, time.time())

    def create_key(
        self,
        label: str,
        *,
        role: KeyRole = KeyRole.USE,
        limits: KeyLimits = NO_LIMITS,
        life_s: float | None = None,
    ) -> str:
        with self._lock:
            keys, key = self._keys.create(
                label=label, now_s=time.time(), role=role, limits=limits, life_s=life_s
            )
            self._write_note("keys", keys.to_bytes())
            self._keys = keys
        self.coordinator.introduce()
        return key

    def keys(self) -> tuple[KeySummary, ...]:
        return self._keys.summaries()

    def find_key(self, key: str) -> KeySummary | None:
        """Whose API key this is, None if it is unknown; AuthError if it was good once."""
        return self._keys.find(key, now_s=time.time())

    def revoke_key(self, key_id: str) -> None:
        with self._lock:
            self._keys = self._keys.revoke(key_id)
        self.coordinator.introduce()
        with self._lock:
            self._keep_note("keys", self._keys.to_bytes())

    def _write_note(self, name: str, content: bytes) -> None:
        """Write down what is to take effect only then; raises where that cannot be done."""
        self.coordinator.record.write(name, lambda: self._journal.write_note(name, content))

    def _keep_note(self, name: str, content: bytes) -> bool:
        """Write down what has taken effect already, now or as soon as that is possible; whether it is."""
        return self.coordinator.record.keep(name, lambda: self._journal.write_note(name, content))

    def close(self) -> None:
        self._relays.close()
        self._join_server.close()
        self.quota.flush()
        self.coordinator.close()
        self.pool.close()
        self._endpoint.close()
        for name in list(self._checkpoints):
            self._close_files(name)
        self._journal.close()

    def _admit(self, application: Application) -> Admission:
        if application.role not in (Role.WORKER.value, Role.DRIVER.value):
            raise UsageError(f"nobody joins as {application.role!r}")
        role, now_s = Role(application.role), time.time()
        with self._lock:
            tokens, _ = self._tokens.use(
                application.token_id,
                application.secret,
                node_id=application.node_id,
                role=role,
                now_s=now_s,
                companions=[each.node_id for each in application.companions],
            )
            applicants = [Companion(application.node_id, application.request_pem), *application.companions]
            certificate, *others = [
                self._issuer.admit(each.request_pem, node_id=each.node_id, role=role) for each in applicants
            ]
            self._write_note("tokens", tokens.to_bytes())
            self._tokens = tokens
        for each in applicants:
            log.info("%s joined as %s", each.node_id, role)
            self._on_joined(each.node_id, role.value, application.token_id)
        urls = [*(each.control_url for each in self._addresses()), *self.relay_doors]
        return Admission(certificate, urls, others)

    def _brief(self) -> Brief:
        models = [
            OfferedModel(
                name=model.name,
                vocab_size=model.vocab_size,
                context_length=model.context_length,
                created_s=model.created_s,
                digest=model.digest,
                size_bytes=model.size_bytes,
                speculation=model.speculation,
                has_draft_head=model.has_draft_head,
                adapters=model.adapters,
                vision=model.vision,
            )
            for model in self.pool.all_models()
        ]
        return Brief(models, self._keys.to_bytes())

    def _serve_control(self, link: Link) -> None:
        self.coordinator.serve_control(link)

    def _driver_lost_link(self, node: str) -> None:
        self.coordinator.lost_link(node)

    def _read_book(self, name: str, decode: Callable[[bytes], Book], default: Book) -> Book:
        """A note of the journal. One that is damaged is not taken for an empty one unless somebody decides so."""
        content = self._journal.read_note(name)
        try:
            return default if content is None else decode(content)
        except SourceError as error:
            if self.options.recovers_journal:
                log.warning("%s; going on without, as asked", error.message)
                return default
            raise JournalError(
                f"in the journal {self._journal.place}: {error.message}",
                hint="put back a copy of it; or start once with --recover-journal, which "
                "forgets this part of it",
            ) from error

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(LinkError):
            self.close()


def prepare_model(
    options: ClusterOptions, checkpoint: Checkpoint, form: str, progress: Progress | None = None
) -> PreparedModel:
    """Make ready what serving a model takes, for a cluster that may not run yet."""
    tokenizer = checkpoint.tokenizer()
    if is_fallback(checkpoint.spec):
        check_form(checkpoint.name, form)
    draft_heads = draft_head_attachments(checkpoint, options.draft_heads)
    served = prepare_served(
        checkpoint,
        form,
        options.folder / "served",
        progress,
        attachments={
            **attachments_of(tokenizer),
            TOKENIZER: pack_tokenizer(checkpoint),
            **header_attachment(checkpoint.tensors),
            **config_attachment(checkpoint),
            **draft_heads,
            **adapter_attachments(checkpoint.adapters),
        },
    )
    drafters = options.open_drafters(tokenizer, checkpoint.spec.vocab_size)
    return PreparedModel(checkpoint, tokenizer, served, drafters, has_draft_head=bool(draft_heads))


def check_journal(options: ClusterOptions) -> None:
    """JournalError where the cluster's journal is missing or damaged, unless it is to be recovered. Starts nothing."""
    if not options.recovers_journal and authority_folder(options.folder).is_dir():
        _open_record(options)[1].close()


def _open_record(
    options: ClusterOptions, leadership: Leadership | None = None
) -> tuple[ClusterAuthority | None, JournalStore]:
    open_private_folder(options.folder)
    authority = find_authority(options.folder)
    fingerprint = None if authority is None else authority.fingerprint
    if leadership is not None:
        journal = SharedJournal(leadership.store, leadership.prefix, leadership)
        check_owner(journal, fingerprint)
        return authority, journal
    return authority, open_journal(options.folder, fingerprint, recovers=options.recovers_journal)


def authority_folder(folder: Path) -> Path:
    """Where in a cluster's folder its authority is."""
    return folder / "authority"


def find_authority(folder: Path) -> ClusterAuthority | None:
    """That of the cluster in a folder; None where there is none yet."""
    try:
        return ClusterAuthority.load(authority_folder(folder))
    except FileNotFoundError:
        return None


def create_authority(folder: Path, name: str) -> ClusterAuthority:
    return ClusterAuthority.create(authority_folder(folder), name, now_s=time.time())


def _decode_orders(content: bytes) -> list[ServedOrder]:
    try:
        return msgspec.json.decode(content, type=list[ServedOrder])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"The list of models is damaged: {error}") from error
