"""Administration of a running cluster: to see it, to plan, to load, to empty, to let in and out.

    with ClusterAdmin(cluster, settings) as admin:
        app = create_app(cluster.pool, verify_key=admin.find_key, admin=admin)

Answers are plain values (see `views`). Methods may be called from any thread; `plan` may wait for the hub and the
others for a disk at most, so an event loop calls them in a thread. What does not exist is a UsageError (a model:
UnknownModelError).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from shardcompute.backends.footprint import RANK_BACKENDS
from shardcompute.control.cost.what_if import ImaginedMachines
from shardcompute.control.events import ModelRequested
from shardcompute.control.placement.parallelism import Parallelism, parse_parallelism
from shardcompute.control.placement.rank_groups import check_ranks
from shardcompute.control.state import ClusterState, Model, Node, RequestedModel
from shardcompute.core.closing import Closing
from shardcompute.core.errors import ShardComputeError, SourceError, UnknownModelError, UsageError
from shardcompute.core.kv_types import KvType
from shardcompute.core.settings import Settings, check_origin
from shardcompute.node.admin.catalogue import CatalogueEntry, list_catalogue
from shardcompute.node.admin.downloads import Fetches, check_order, served_name
from shardcompute.node.admin.dry_run import open_headers, plan_model, size_up
from shardcompute.node.admin.feed import Feed, Subscription
from shardcompute.node.admin.history import ClusterHistory
from shardcompute.node.admin.incidents import ClusterHealth, IncidentLog, view_health
from shardcompute.node.admin.qr import qr_svg
from shardcompute.node.admin.swap import given_way, models_in_the_way, refusal
from shardcompute.node.admin.view_builder import view_chains, view_links, view_models, view_nodes
from shardcompute.node.admin.views import (
    ClusterView,
    CoordinatorView,
    FetchView,
    KeyView,
    LoadView,
    ModelView,
    NewKey,
    NewPairing,
    NewToken,
    NodeView,
    PlanView,
    RevokedNode,
    TokenView,
)
from shardcompute.node.admin.what_if import imagine
from shardcompute.node.cluster import ServedOrder
from shardcompute.node.coordinator.journal import RecordStatus
from shardcompute.node.finetuning.curves import CurveBoard
from shardcompute.node.telemetry.audit import AuditLog
from shardcompute.node.telemetry.history_store import EventView
from shardcompute.node.telemetry.quota import QuotaSource
from shardcompute.node.telemetry.request_log import RequestView
from shardcompute.node.telemetry.usage import UsageReport
from shardcompute.security.api_keys import NO_LIMITS, KeyLimits, KeyRole, KeySummary
from shardcompute.security.names import Role
from shardcompute.security.pairing.codes import CODE_LIFE_S
from shardcompute.security.tokens import parse_token
from shardcompute.version import VERSION
from shardcompute.weights.adapter_pack import key_of_adapters
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.sources.reference import HubReference, parse_reference

if TYPE_CHECKING:
    from shardcompute.node.cluster import Cluster
    from shardcompute.node.cluster.ledger.keeper import LedgerKeeper
    from shardcompute.node.cluster.teaching import DraftHeadTeaching

log = logging.getLogger(__name__)
DAY_S = 86_400.0
HISTORY_FILE = "history.sqlite"
_PAGE = re.compile(r"https?://[a-z0-9._\[\]:-]{1,280}")


class ClusterAdmin(Closing):
    """Speaks for one cluster. Close it before the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        *,
        history: Path | None = None,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`history` is the file of what happened, `audit` the log of who changed what; None: that is known for as long
        as this process runs."""
        self.audit = audit or AuditLog(None)
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self.history = ClusterHistory(history, cluster.coordinator.state, cluster.pool.requests)
        self.finetuning = CurveBoard()
        self._feed = Feed(self.state)
        self._restored: set[str] = set()
        """Models that were served together with the others before, whatever there is of memory now."""
        self._fetches = Fetches(settings, self._serve, self._feed.poke)
        self._incidents = IncidentLog(cluster.coordinator.state)
        cluster.coordinator.listen(self._incidents.saw)
        cluster.coordinator.listen(self.history.saw)
        cluster.coordinator.listen(lambda _: self._feed.poke())
        self.history.listen(lambda _: self._feed.poke())
        cluster.watch_record(self._record_changed)
        cluster.access.watch_pairing(self._paired)
        cluster.listen_to_usage(self.history.count_report)
        cluster.access.listen_to_joins(self._joined)
        self.history.start()
        self._feed.start()

    def close(self) -> None:
        self._fetches.close()
        self._feed.close()
        self.history.close()

    def _joined(self, node: str, role: str, token_id: str) -> None:
        self.audit.append(node, "node.join", node, detail={"role": role, "token": token_id})

    def _record_changed(self, status: RecordStatus) -> None:
        if status.waiting:
            text = f"what happens cannot be written down: {status.reason}"
            self.history.tell(EventView(kind="cluster", tone="bad", text=text))
        else:
            text = "all that has happened is on record again"
            self.history.tell(EventView(kind="cluster", tone="good", text=text))

    def _paired(self, machine: str, is_right: bool) -> None:
        if is_right:
            text = f"{machine} was paired by its code, and may join"
            self.history.tell(EventView(kind="cluster", tone="good", text=text))
        else:
            text = f"somebody who says to be {machine} tried a wrong pairing code: it is good for nothing any more"
            self.history.tell(EventView(kind="cluster", tone="warn", text=text))

    # To see

    def state(self) -> ClusterView:
        state, now_s, swarm = self._state, self._clock(), self._cluster.pool
        load = swarm.load()
        return ClusterView(
            name=self._cluster.name,
            version=VERSION,
            url=self._cluster.url,
            driver=state.driver,
            nodes=view_nodes(state, now_s),
            links=view_links(state, self._cluster.url),
            models=view_models(
                state, now_s, {each.name for each in swarm.models() if each.vision is not None}
            ),
            chains=view_chains(state, now_s, swarm.timings(), load.routers, swarm.draft_heads()),
            fetches=self._fetches.views(),
            load=LoadView(
                running=load.running,
                waiting=load.waiting,
                kv_used_fraction=load.kv_used_fraction,
                tokens_per_s=swarm.requests.tokens_per_s(),
            ),
            events=self.history.recent(),
            warnings=self.warnings(),
            coordinators=tuple(
                CoordinatorView(
                    node=each.node, status=each.status, api_url=each.api_url, since_s=each.since_s
                )
                for each in self._cluster.coordinators()
            ),
        )

    @property
    def draft_heads(self) -> DraftHeadTeaching:
        """What teaches them asks of the cluster."""
        return self._cluster.draft_heads

    def warnings(self) -> tuple[str, ...]:
        """What the operator should see to; nothing in it is secret."""
        canaries = self._cluster.canaries
        drifting = () if canaries is None else canaries.warnings()
        return (*self._cluster.record_status.warnings, *self._cluster.ledger.warnings, *drifting)

    @property
    def ledger(self) -> LedgerKeeper:
        """Who was there, who signed for what, and what audits found."""
        return self._cluster.ledger

    def health(self) -> ClusterHealth:
        """For whoever watches over it: counts by status, and incidents so far."""
        sent_bytes = self._cluster.weights_sent_bytes()
        unrecorded = self._cluster.record_status.waiting
        health = view_health(self._state, self._incidents.counts(), sent_bytes, self._clock(), unrecorded)
        canaries = self._cluster.canaries
        if canaries is None:
            return health
        return replace(health, drifts=canaries.notes.machines, drifting_chains=len(canaries.warnings()))

    def requests(self) -> tuple[RequestView, ...]:
        """Generations that run, newest first, then the last ones that ended."""
        return self._cluster.pool.requests.views()

    def requests_after(self, ended: int) -> tuple[tuple[RequestView, ...], int]:
        """`requests` without the first `ended` that ended, and what to ask with next time."""
        return self._cluster.pool.requests.look(ended)

    def usage(self) -> UsageReport:
        """Tokens by API key and model since the start."""
        return self._cluster.pool.requests.usage.report()

    @property
    def quota(self) -> QuotaSource:
        """What API keys with limits draw from."""
        return self._cluster.quota

    def subscribe(self, wake: Callable[[], None]) -> Subscription:
        """The state, then its changes; `wake` is called from another thread when there are some."""
        return self._feed.subscribe(wake)

    def unsubscribe(self, reader: Subscription) -> None:
        self._feed.unsubscribe(reader)

    # Models

    def plan(
        self,
        model: str,
        form: str = "native",
        chains: int = 1,
        *,
        kv_type: KvType | None = None,
        parallel: Parallelism | None = None,
        price_per_kwh: float | None = None,
        what_if: ImaginedMachines | None = None,
    ) -> PlanView:
        """What loading `model` would lead to, and what it would with machines that are not there. Reads headers at
        most."""
        check_order(form, chains)
        sized = self._size_up(model, form, kv_type)
        replaces = models_in_the_way(self._state, sized, self._clock(), self._answering)
        check_ranks(sized, parallel)
        state, now_s = self._state, self._clock()
        plan = plan_model(
            state, sized, chains, now_s, parallel, has_alternatives=True, price_per_kwh=price_per_kwh
        )
        asked = None if what_if is None else imagine(state, sized, what_if, now_s, parallel, price_per_kwh)
        return dataclasses.replace(plan, replaces=replaces, what_if=asked)

    def _size_up(
        self, model: str, form: str, kv_type: KvType | None, adapters: Mapping[str, str] | None = None
    ) -> Model:
        """As it would be served, with these adapters beside it; None: with those that it has."""
        served = self._state.models.get(model)
        if (
            served is not None
            and adapters is None
            and served.model.weight_form == form
            and kv_type in (None, served.model.kv_type)
        ):
            return served.model
        reference = parse_reference(model)
        if adapters is None:
            adapters = self._adapters_of(served_name(reference))
        folders = {name: Path(folder) for name, folder in adapters.items()}
        with open_headers(reference, self._settings) as checkpoint:
            adapted = checkpoint.with_adapters(folders) if folders else checkpoint
            sized = self._size_of(adapted, form, kv_type)
        served = self._state.models.get(sized.name)
        if served is None or not served.is_wanted or served.model.weight_form != form:
            return sized
        # What was chosen for it stays as long as it is served.
        known = served.model
        return structs.replace(sized, backend=known.backend, backend_reason=known.backend_reason)

    def _size_of(self, checkpoint: Checkpoint, form: str, kv_type: KvType | None) -> Model:
        options = self._cluster.options
        return size_up(
            checkpoint,
            form,
            kv_tokens=options.kv_tokens,
            kv_type=self._kv_type_of(checkpoint.name, kv_type),
            context_length=options.context_length,
        )

    def _kv_type_of(self, name: str, given: KvType | None) -> KvType:
        """As asked for, else as it is served, else what the cluster was started with."""
        served = self._state.models.get(name)
        if given is not None:
            return given
        if served is not None and served.is_wanted and self._cluster.pool.serves(name):
            return served.model.kv_type
        return self._cluster.options.kv_type

    def _adapters_of(self, name: str) -> dict[str, str]:
        """The folders of the adapters that a model has beside it, by name."""
        files = self._cluster.files_of(name)
        return {} if files is None else {each.name: str(each.folder) for each in files.adapters}

    def _answering(self, model: str) -> int:
        return self._cluster.pool.answering(model)

    def _check_replaces_none(self, model: Model) -> None:
        names = models_in_the_way(self._state, model, self._clock(), self._answering)
        if names:
            holdings = [node.holding_of(model) for node in self._state.nodes.values() if node.can_work]
            raise refusal(model, names, self._answering, holdings)

    def load_model(
        self,
        model: str,
        form: str = "native",
        chains: int = 1,
        *,
        replaces: bool = False,
        via_coordinator: bool = False,
        kv_type: KvType | None = None,
        adapters: Mapping[str, str] | None = None,
        parallel: Parallelism | None = None,
    ) -> FetchView:
        """Serve another model, or this one in another form, with another KV type, with more `adapters` beside it
        (folders by name) or by another number of chains.

        Fetching it goes on behind the scenes; `state` says how far it has come. Where others would have to give way
        (see `swap`) and it is not said that it `replaces` them: WouldReplaceError, and nothing happens.
        """
        check_order(form, chains)
        kept = self._adapters_of(served_name(parse_reference(model)))
        beside = {**kept, **(adapters or {})}
        if parallel is not None and parallel.tp > 1:
            with contextlib.suppress(SourceError, UnknownModelError):
                check_ranks(self._size_up(model, form, kv_type, None if beside == kept else beside), parallel)
        if not replaces:
            # What cannot be sized up yet is found out once it has been fetched.
            with contextlib.suppress(SourceError, UnknownModelError):
                self._check_replaces_none(
                    self._size_up(model, form, kv_type, None if beside == kept else beside)
                )
        return self._fetches.start(
            model,
            form,
            chains,
            replaces=replaces,
            via_coordinator=via_coordinator,
            kv_type=kv_type,
            adapters=beside,
            parallel=parallel,
        )

    def catalogue(self) -> tuple[CatalogueEntry, ...]:
        """The models on this disk."""
        return list_catalogue(self._settings)

    def pull_model(self, model: str) -> FetchView:
        """Fetch a model to this disk without serving it; `state` says how far it has come."""
        return self._fetches.pull(model)

    def unload_model(self, name: str) -> None:
        """Stop serving a model, or fetching it: requests that it is answering end with an error. `model:adapter` takes
        an adapter away from a model, which is loaded again without it once its answers are finished."""
        was_fetched = self._fetches.cancel(name)
        served = self._state.models.get(name)
        if served is None and not was_fetched and self._unload_adapter(*name.rpartition(":")[::2]):
            return
        if served is not None and served.is_wanted:
            self._cluster.drop(name)
        elif not was_fetched:
            known = ", ".join(name for name, each in self._state.models.items() if each.is_wanted)
            raise UnknownModelError(
                f"the model {name!r} is not served here", hint=f"served here: {known or 'none'}"
            )

    def _unload_adapter(self, name: str, adapter: str) -> bool:
        """Whether there was such a one."""
        files, served, left = (
            self._cluster.files_of(name),
            self._state.models.get(name),
            self._adapters_of(name),
        )
        if files is None or served is None or left.pop(adapter, None) is None:
            return False
        self._fetches.start(
            str(files.files.reference),
            served.model.weight_form,
            served.chain_count,
            replaces=True,
            via_coordinator=files.files.listing is None,
            adapters=left,
        )
        return True

    def restore(self, *, without: str = "") -> None:
        """Serve again what people had asked for before the cluster was stopped, but for one model."""
        for order in self._cluster.remembered():
            if order.name == without:
                continue
            try:
                self._restored.add(order.name)
                self._fetches.start(
                    order.reference,
                    order.form,
                    order.chains,
                    via_coordinator=order.via_coordinator,
                    kv_type=order.kv_type,
                    adapters=order.adapters,
                    parallel=order.parallel,
                )
            except ShardComputeError as error:
                log.warning("%s is not served again: %s", order.name, error)

    def _serve(self, checkpoint: Checkpoint, form: str, chains: int, progress: Progress) -> None:
        name = checkpoint.name
        orders = [view for view in self._fetches.views() if view.name == name and view.chains]
        served = self._state.models.get(name)
        given = next((view.kv_type for view in orders), None)
        kv_type = self._kv_type_of(name, given)
        asked = next((parse_parallelism(view.parallel) for view in orders if view.parallel), None)
        form_of = (form, kv_type, key_of_adapters(checkpoint.adapters))
        if (
            served is None
            or not self._cluster.pool.serves(name)
            or not _is_served_as(served, form_of)
            or not _can_be_cut(served.model, asked)
        ):
            replaces = any(view.replaces for view in orders)
            self._swap(checkpoint, form, chains, kv_type, asked, progress, replaces=replaces)
        else:
            request = ModelRequested(served.model, chains, served.has_draft_model, asked)
            self._cluster.coordinator.post(request)
            checkpoint.close()
        for order in orders[:1]:
            reference = _at_commit(order.model, checkpoint)
            before = [each for each in self._cluster.remembered() if each.name == name]
            kept = given or next((each.kv_type for each in before), None)
            self._cluster.remember(
                ServedOrder(
                    name,
                    reference,
                    form,
                    chains,
                    order.via_coordinator,
                    kv_type=kept,
                    adapters=order.adapters,
                    parallel=asked or next((each.parallel for each in before), None),
                )
            )

    def _swap(
        self,
        checkpoint: Checkpoint,
        form: str,
        chains: int,
        kv_type: KvType,
        parallel: Parallelism | None,
        progress: Progress,
        *,
        replaces: bool,
    ) -> None:
        """Serve it, after those who have to give way to it, if they may."""
        names: tuple[str, ...] = ()
        is_restored = checkpoint.name in self._restored
        self._restored.discard(checkpoint.name)
        if not is_restored and any(each.is_wanted for each in self._state.models.values()):
            model = self._size_of(checkpoint, form, kv_type)
            if not replaces:
                self._check_replaces_none(model)
            names = models_in_the_way(self._state, model, self._clock(), self._answering)
        with given_way(self._cluster, names, checkpoint.name, progress):
            self._cluster.serve(
                checkpoint,
                form=form,
                chains=chains,
                kv_type=kv_type,
                parallel=parallel,
                progress=progress,
            )

    def keep_layout(self, name: str, is_kept: bool) -> ModelView:
        """Have the layouts of a model's chains stay as they are, or let them move again."""
        state = self._state
        known = state.models.get(name)
        if known is None or not known.is_wanted:
            served = ", ".join(sorted(state.models)) or "none"
            raise UnknownModelError(f"the model {name!r} is not served here", hint=f"use one of: {served}")
        self._cluster.keep_layout(name, is_kept)
        [view] = [each for each in view_models(state, self._clock(), ()) if each.name == name]
        return dataclasses.replace(view, is_kept=is_kept)

    # Nodes

    def drain_node(self, node: str) -> NodeView:
        """Move everything off a node (given by id, name or the start of its id), then let it leave."""
        found = self._find_node(node)
        if not found.is_live:
            raise UsageError(f"{found.name} is {found.status} already", hint="there is nothing to move")
        self._cluster.drain(found.id)
        return self._view(found.id)

    def pardon_node(self, node: str) -> NodeView:
        """Let a node work again that audits have put in quarantine."""
        found = self._find_node(node)
        if not found.quarantine:
            raise UsageError(f"{found.name} is not in quarantine", hint="shardcompute nodes shows who is")
        self._cluster.pardon(found.id)
        return self._view(found.id)

    def revoke_node(self, node: str) -> RevokedNode:
        """Throw a node out for good, with the join tokens that it used; it can only come back as a new machine with a
        new token."""
        found = self._find_node(node)
        if found.id == self._cluster.node:
            raise UsageError("this is the coordinator itself", hint="stop the cluster instead")
        tokens = self._cluster.access.tokens_used_by(found.id)
        is_recorded = self._cluster.revoke_node(found.id)
        view = self._view(found.id)
        if not is_recorded:
            reason = f"thrown out, but that is not on record yet: {self._cluster.record_status.reason}"
            view = replace(view, status_reason=reason)
        return RevokedNode(node=view, revoked_tokens=tokens)

    def _find_node(self, text: str) -> Node:
        nodes = list(self._state.nodes.values())
        live = [node for node in nodes if node.is_live]
        for group in (live, nodes):
            for matches in (
                [node for node in group if node.id == text],
                [node for node in group if node.name == text],
                [node for node in group if text and node.id.startswith(text)],
            ):
                if len(matches) == 1:
                    return matches[0]
                if matches:
                    ids = ", ".join(sorted(node.id for node in matches))
                    raise UsageError(f"{text!r} could be any of {ids}", hint="give the whole id")
        raise UsageError(f"there is no node {text!r}", hint="list the nodes to see their names and ids")

    def _view(self, node: str) -> NodeView:
        return next(view for view in view_nodes(self._state, self._clock()) if view.id == node)

    # Who may come in

    def create_token(
        self,
        *,
        life_s: float = DAY_S,
        max_uses: int | None = None,
        role: Role | None = None,
        origin: str | None = None,
    ) -> NewToken:
        """For machines that join in this role; None: in any. With `origin`, where the page is, also as a link."""
        page = None if origin is None else _check_page(origin)
        roles = (Role.WORKER, Role.DRIVER) if role is None else (role,)
        token = self._cluster.access.create_token(life_s=life_s, max_uses=max_uses, roles=roles)
        token_id = parse_token(token).token_id
        kept = next(view for view in self.tokens() if view.id == token_id)
        link = "" if page is None else f"{page}/#/join/{token}"
        return NewToken(
            id=kept.id,
            token=token,
            expires_at_s=kept.expires_at_s,
            max_uses=kept.max_uses,
            link=link,
            qr=qr_svg(link) if link else "",
        )

    def open_pairing(self) -> NewPairing:
        """A code for one machine that is nearby and has no token. QueueFullError after too many wrong ones."""
        code = self._cluster.access.open_pairing()
        return NewPairing(code=code.shown, life_s=CODE_LIFE_S, join_port=self._cluster.join_port)

    def tokens(self) -> tuple[TokenView, ...]:
        return tuple(
            TokenView(
                id=summary.token_id,
                state=summary.state,
                roles=tuple(sorted(role.value for role in summary.roles)),
                created_at_s=summary.created_at_s,
                expires_at_s=summary.expires_at_s,
                max_uses=summary.max_uses,
                used_by=summary.used_by,
            )
            for summary in self._cluster.access.tokens()
        )

    def revoke_token(self, token_id: str) -> None:
        """Nobody joins with it any more; nodes that did stay."""
        self._cluster.access.revoke_token(token_id)

    def create_key(
        self,
        label: str,
        *,
        role: KeyRole = KeyRole.USE,
        limits: KeyLimits = NO_LIMITS,
        life_s: float | None = None,
    ) -> NewKey:
        """An API key; `life_s` None: good until it is revoked."""
        key = self._cluster.access.create_key(label, role=role, limits=limits, life_s=life_s)
        kept = self._cluster.access.find_key(key)
        assert kept is not None
        return NewKey(
            id=kept.key_id, key=key, label=kept.label, role=kept.role.value, expires_at_s=kept.expires_at_s
        )

    def keys(self) -> tuple[KeyView, ...]:
        summaries = self._cluster.access.keys()
        return tuple(
            KeyView(
                id=summary.key_id,
                label=summary.label,
                created_at_s=summary.created_at_s,
                is_revoked=summary.is_revoked,
                role=summary.role.value,
                models=summary.limits.models,
                requests_per_minute=summary.limits.requests_per_minute,
                tokens_per_day=summary.limits.tokens_per_day,
                expires_at_s=summary.expires_at_s,
            )
            for summary in summaries
        )

    def revoke_key(self, key_id: str) -> None:
        self._cluster.access.revoke_key(key_id)

    def find_key(self, key: str) -> KeySummary | None:
        """Whose API key this is, None if it is unknown; AuthError if it was good once."""
        return self._cluster.access.find_key(key)

    @property
    def _state(self) -> ClusterState:
        return self._cluster.coordinator.state


def _is_served_as(served: RequestedModel, form: tuple[str, KvType, str]) -> bool:
    """With these weights, this KV type and these adapters."""
    model = served.model
    return served.is_wanted and (model.weight_form, model.kv_type, model.adapters) == form


def _at_commit(model: str, checkpoint: Checkpoint) -> str:
    """What to open after a restart: of a model that stays at the hub, the same version."""
    reference = parse_reference(model)
    listing = checkpoint.files.listing
    if listing is None or not isinstance(reference, HubReference):
        return model
    return str(replace(reference, revision=listing.commit))


def _can_be_cut(model: Model, asked: Parallelism | None) -> bool:
    """Whether what computes a model that is served can compute it as asked."""
    return asked is None or asked.tp < 2 or model.backend in ("", *RANK_BACKENDS)


def _check_page(origin: str) -> str:
    """Where a browser finds the page; UsageError for what is no http or https origin."""
    checked = check_origin(origin, "origin")
    if not _PAGE.fullmatch(checked):
        raise UsageError(
            f"{origin[:100]!r} is not where a page can be", hint="give one such as http://10.0.0.5:8000"
        )
    return checked
