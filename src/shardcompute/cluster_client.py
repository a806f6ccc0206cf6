"""A client for a cluster's own routes, besides those of any server (see `client`).

with ClusterClient("http://127.0.0.1:8000") as cluster:
    for node in cluster.state().nodes:
        print(node.name, node.status)
    for state in cluster.watch():
        print(state.load.tokens_per_s)
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from shardcompute.client import Client, _error_from, _error_of, _unreachable
from shardcompute.core.errors import AuthError, BackendError, LinkError, ShardComputeError, UnknownModelError
from shardcompute.core.generation import (
    Delta,
    FinishReason,
    GenerationRequest,
    Interruption,
    Speculation,
    Timings,
    Traversal,
)
from shardcompute.core.kv_types import KvType
from shardcompute.node.admin.history import HistoryPage
from shardcompute.node.admin.views import (
    ClusterChange,
    ClusterView,
    DraftHeadView,
    FetchView,
    KeyView,
    ModelView,
    NewKey,
    NewPairing,
    NewToken,
    NodeView,
    PlanView,
    RevokedNode,
    TokenView,
    apply_change,
)
from shardcompute.node.cluster.ledger.views import LedgerView
from shardcompute.node.finetuning.curves import RunReport
from shardcompute.node.telemetry.audit import AuditPage
from shardcompute.node.telemetry.history_store import EventView, HistoryRange
from shardcompute.node.telemetry.request_log import RequestView
from shardcompute.node.telemetry.usage import HOUR_S, UsageView

View = TypeVar("View")
_RECEIPT = "x-shardcompute-receipt"
_TRIP = ("wire_s", "stage_queue_s", "codec_s", "compute_s", "draft_s")


class _Listed(msgspec.Struct, Generic[View], frozen=True):
    data: list[View]


class _SignIn(msgspec.Struct, frozen=True):
    code: str
    life_s: float


class _Speech(msgspec.Struct, frozen=True):
    tokens: list[int]


class ClusterClient(Client):
    """Talks to one cluster. Errors are those of `core.errors`."""

    receipt_id: str = ""
    """Of the answer that was asked for last, where it was asked for with a receipt."""

    def state(self) -> ClusterView:
        return self._ask("GET", "/cluster/state", ClusterView)

    def watch(self) -> Generator[ClusterView, None, None]:
        """The state now, and again whenever it has changed. Closing the iterator ends the connection."""
        view: ClusterView | None = None
        for kind, data in self._events("GET", "/cluster/events"):
            if kind == "state":
                view = _decode(data, ClusterView)
            elif kind == "change" and view is not None:
                view = apply_change(view, _decode(data, ClusterChange))
            else:
                continue
            yield view

    def requests(self) -> list[RequestView]:
        """Generations that run, newest first, then the last ones that ended."""
        return self._list("/cluster/requests", RequestView)

    def event_history(self, wanted: HistoryRange | None = None) -> HistoryPage[EventView]:
        """What happened, newest first; `next` of a page is the `before` of the one after it."""
        return self._ask("GET", _range_path("events", wanted), HistoryPage[EventView])

    def request_history(self, wanted: HistoryRange | None = None) -> HistoryPage[RequestView]:
        """Generations that ended, newest first."""
        return self._ask("GET", _range_path("requests", wanted), HistoryPage[RequestView])

    def usage_history(
        self, wanted: HistoryRange | None = None, *, span_s: int = HOUR_S
    ) -> HistoryPage[UsageView]:
        """Tokens by key and model, by the hour or by the day, newest first."""
        return self._ask("GET", f"{_range_path('usage', wanted)}&span={span_s}", HistoryPage[UsageView])

    def plan(
        self,
        model: str,
        *,
        form: str = "native",
        chains: int = 1,
        kv_type: KvType | None = None,
        parallel: str | None = None,
        price_kwh: float | None = None,
        what_if: Mapping[str, float | None] | None = None,
    ) -> PlanView:
        """What loading `model` would lead to; cut as `parallel` says, such as tp=2,pp=3 (None: as asked for before).
        `what_if` are machines that are not there: `count`, `memory_bytes`, `bytes_per_s`."""
        order = _order(model, form, chains, kv_type, parallel)
        order |= {"price_kwh": price_kwh, "what_if": None if what_if is None else dict(what_if)}
        return self._ask("POST", "/cluster/plan", PlanView, order)

    def load_model(
        self,
        model: str,
        *,
        form: str = "native",
        chains: int = 1,
        replace: bool = False,
        via_coordinator: bool = False,
        kv_type: KvType | None = None,
        adapters: Mapping[str, str] | None = None,
        parallel: str | None = None,
    ) -> FetchView:
        """Have a model served; `watch` says how far that has come. WouldReplaceError where others would have to give
        way, unless they may. `kv_type` None: as it is served, else what the cluster was started with. `adapters` are
        folders on the coordinator's machine, by name, besides those that the model has."""
        order = _order(model, form, chains, kv_type, parallel)
        if adapters:
            order["adapters"] = dict(adapters)
        order |= {"replace": replace, "via_coordinator": via_coordinator}
        return self._ask("POST", "/cluster/models", FetchView, order)

    def unload_model(self, name: str) -> None:
        """A model, or (`model:adapter`) an adapter beside one."""
        self._ask("DELETE", f"/cluster/models/{quote(name, safe='')}", dict[str, Any])

    def keep_layout(self, name: str, is_kept: bool) -> ModelView:
        """Have a served model's layouts stay as they are, or let them move again."""
        path = f"/cluster/models/{quote(name, safe='')}/layout"
        return self._ask("POST", path, ModelView, {"keep": is_kept})

    def drain_node(self, node: str) -> NodeView:
        """By id, name or the start of the id; `watch` says when it is empty."""
        return self._ask("POST", f"/cluster/nodes/{quote(node, safe='')}/drain", NodeView, {})

    def pardon_node(self, node: str) -> NodeView:
        """Let a node work again that audits have put in quarantine."""
        return self._ask("POST", f"/cluster/nodes/{quote(node, safe='')}/pardon", NodeView, {})

    def revoke_node(self, node: str) -> RevokedNode:
        return self._ask("DELETE", f"/cluster/nodes/{quote(node, safe='')}", RevokedNode)

    def create_token(
        self,
        *,
        expires_s: float = 86_400.0,
        max_uses: int | None = 8,
        role: str | None = None,
        origin: str | None = None,
    ) -> NewToken:
        """For machines that join as "worker" or "driver"; None: as either. `max_uses` None: for any number of them.
        With `origin`, where the page is, also as a link and its QR code."""
        body = {"expires_s": expires_s, "max_uses": max_uses, "role": role, "origin": origin}
        return self._ask("POST", "/cluster/tokens", NewToken, body)

    def open_pairing(self) -> NewPairing:
        """A code for one machine nearby; the one before is good for nothing any more."""
        return self._ask("POST", "/cluster/pairing", NewPairing, {})

    def tokens(self) -> list[TokenView]:
        return self._list("/cluster/tokens", TokenView)

    def revoke_token(self, token_id: str) -> None:
        self._ask("DELETE", f"/cluster/tokens/{quote(token_id, safe='')}", dict[str, Any])

    def create_key(
        self,
        label: str = "",
        *,
        role: str = "use",
        models: Sequence[str] | None = None,
        requests_per_minute: int | None = None,
        tokens_per_day: int | None = None,
        expires_s: float | None = None,
    ) -> NewKey:
        """Of role "use", "observe" or "operate"; good until it is revoked unless it expires. Limits are for "use"."""
        body = {
            "label": label,
            "role": role,
            "models": models,
            "requests_per_minute": requests_per_minute,
            "tokens_per_day": tokens_per_day,
            "expires_s": expires_s,
        }
        return self._ask("POST", "/cluster/keys", NewKey, body)

    def keys(self) -> list[KeyView]:
        return self._list("/cluster/keys", KeyView)

    def revoke_key(self, key_id: str) -> None:
        self._ask("DELETE", f"/cluster/keys/{quote(key_id, safe='')}", dict[str, Any])

    def audit(self, *, before: int = 0, limit: int = 200) -> AuditPage:
        """Who changed what, newest first, and whether the log is whole; `next` of a page is the `before` of the one
        after it."""
        return self._ask("GET", f"/cluster/audit?before={before}&limit={limit}", AuditPage)

    def ledger(self) -> LedgerView:
        """The ledger's head, and what its entries come to."""
        return self._ask("GET", "/cluster/ledger", LedgerView)

    def ledger_export(self) -> bytes:
        """The whole ledger, as the file that `ledger verify` reads."""
        return self._exchange("GET", "/cluster/ledger/export")

    def ledger_proof(self, receipt_id: str) -> bytes:
        """That a receipt is in the ledger, as the file that `ledger verify --receipt` reads."""
        return self._exchange("GET", f"/cluster/ledger/receipts/{quote(receipt_id, safe='')}")

    def create_sign_in(self) -> str:
        """A code that signs the page in, once: it opens `/#/sign-in/<code>`."""
        return self._ask("POST", "/cluster/sign-in", _SignIn, {}).code

    # Teaching draft heads (see `draft_training.swarm`)

    def teaching_context(self, model: str) -> int:
        """The most tokens that a session of a served model may have."""
        lengths = {card["id"]: card["max_model_len"] for card in self._call("GET", "/v1/models")["data"]}
        if model not in lengths:
            known = ", ".join(lengths) or "none"
            raise UnknownModelError(f"the model {model!r} is not served here", hint=f"served here: {known}")
        return int(lengths[model])

    def teaching_card(self, model: str) -> bytes:
        """What a served model consists of (`weights.card`)."""
        return self._exchange("GET", _teaching_path(model, "card"))

    def teaching_tensor(self, model: str, name: str, offset: int, length: int) -> bytes:
        """Bytes of one of the model's ends, all that were asked for."""
        body = {"name": name, "offset": offset, "length": length}
        content = self._exchange("POST", _teaching_path(model, "tensor"), json=body)
        if len(content) != length:
            raise BackendError(f"{length} bytes of {name} were asked for and {len(content)} came.")
        return content

    def teaching_speech(self, model: str, request: GenerationRequest) -> list[int]:
        """The tokens with which the model goes on; the last one may be a stop. Of its sampling only temperature, top_p
        and seed are sent."""
        sampling = request.sampling
        body = {
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "stop_ids": sorted(request.stop_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        return self._ask("POST", _teaching_path(model, "speech"), _Speech, body).tokens

    def teaching_states(self, model: str, tokens: Sequence[int]) -> bytes:
        """The final states of a text, one behind the other, as float16."""
        return self._exchange("POST", _teaching_path(model, "states"), json={"tokens": list(tokens)})

    def take_draft_head(self, model: str, content: bytes) -> DraftHeadView:
        """Have a cluster keep a draft head and use it."""
        path, headers = _teaching_path(model, "draft-head"), {"content-type": "application/octet-stream"}
        reply = self._exchange("POST", path, content=content, headers=headers)
        return _decode(reply, DraftHeadView)

    def tell_run(self, report: RunReport) -> None:
        """How a fine-tuning run goes, for the cluster's page."""
        self._exchange("POST", "/cluster/finetuning", json=msgspec.to_builtins(report))

    # As a model in this process would answer (see `node.local.service`)

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], *, model: str) -> list[int]:
        body = {"model": model, "messages": list(messages)}
        return list(self._call("POST", "/tokenize", body)["tokens"])

    def generate(
        self,
        model: str,
        request: GenerationRequest,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[Delta, None, None]:
        """Deltas until one has a finish; closing the iterator cancels. Token ids are not told. With `messages` the
        server makes the prompt of them, in the place of the request's. A request with a `receipt`, whatever it says,
        asks for one: its id is `receipt_id` from the first delta on."""
        finish: FinishReason | None = None
        timings = Timings()
        body = _generation(model, request)
        path = "/v1/completions"
        if messages is not None:
            path = "/v1/chat/completions"
            body = {name: value for name, value in body.items() if name != "prompt"}
            body["messages"] = list(messages)
        headers = {_RECEIPT: "yes"} if request.receipt else {}
        self.receipt_id = ""
        for _, data in self._events("POST", path, body, headers):
            if data == b"[DONE]":
                break
            chunk = msgspec.json.decode(data)
            if "error" in chunk:
                raise _error_from(chunk["error"], 500)
            timings = _timings(chunk["timings"]) if chunk.get("timings") else timings
            timings = replace(timings, cached_tokens=_cached_tokens(chunk) or timings.cached_tokens)
            for told in chunk.get("interruptions", ()):
                yield Delta(interruption=msgspec.convert(told, Interruption))
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                text = choice["text"] if messages is None else choice["delta"].get("content")
                if text:
                    yield Delta(text)
        if finish is None:
            raise LinkError("The server ended the answer in the middle.", hint="ask again")
        yield Delta(finish=finish, timings=timings)

    def receipt(self, receipt_id: str) -> bytes:
        """The receipt of an answer, as the file that `receipt verify` reads."""
        path = f"/v1/receipts/{quote(receipt_id, safe='')}"
        response = self._send(self._http.build_request("GET", path))
        if response.status_code != 200:
            raise _refusal(response)
        return response.content

    def _list(self, path: str, kind: type[View]) -> list[View]:
        found: list[View] = self._ask("GET", path, _Listed[kind]).data  # type: ignore[valid-type]
        return found

    def _ask(self, method: str, path: str, kind: type[View], body: Mapping[str, Any] | None = None) -> View:
        response = self._send(self._http.build_request(method, path, json=body))
        if response.status_code != 200:
            raise _refusal(response)
        return _decode(response.content, kind)

    def _exchange(self, method: str, path: str, **sent: Any) -> bytes:
        """What is answered, whatever that is."""
        response = self._send(self._http.build_request(method, path, **sent))
        if response.status_code != 200:
            raise _refusal(response)
        return response.content

    def _events(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Generator[tuple[str, bytes], None, None]:
        """Kind and data of each event; the comments that keep a silent stream alive are left out."""
        response = self._send(self._http.build_request(method, path, json=body, headers=headers), stream=True)
        try:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            self.receipt_id = response.headers.get(_RECEIPT, "")
            kind = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, value.encode()
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        finally:
            response.close()


def _teaching_path(model: str, what: str) -> str:
    return f"/cluster/teaching/{quote(model, safe='')}/{what}"


def _range_path(kind: str, wanted: HistoryRange | None) -> str:
    asked = wanted or HistoryRange()
    return (
        f"/cluster/history/{kind}?since={int(asked.since_s)}&until={int(asked.until_s)}"
        f"&before={asked.before}&limit={asked.limit}"
    )


def _order(
    model: str, form: str, chains: int, kv_type: KvType | None, parallel: str | None
) -> dict[str, Any]:
    return {"model": model, "form": form, "chains": chains, "kv_type": kv_type, "parallel": parallel}


def _generation(model: str, request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "stop": list(request.stop),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_wish(request.speculation),
    }


def _wish(speculation: Speculation | None) -> dict[str, Any]:
    """What is None is left to the server."""
    if speculation is None:
        return {}
    told = {"drafter": speculation.drafter, "tokens": speculation.tokens, "frames": speculation.frames}
    return {"speculation": {name: value for name, value in told.items() if value is not None}}


def _cached_tokens(chunk: Mapping[str, Any]) -> int:
    """Of the prompt, as the chunk of usage tells them; 0 where it does not."""
    usage = chunk.get("usage") or {}
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _timings(told: Mapping[str, Any]) -> Timings:
    times: dict[str, Any] = {name: float(told.get(name, 0.0)) for name in _TRIP}
    return Timings(
        queue_s=told["queue_s"],
        prefill_s=told["prefill_s"],
        decode_s=told["decode_s"],
        prompt_tokens=told["prompt_tokens"],
        generated_tokens=told["generated_tokens"],
        traversals=told.get("traversals", 0),
        drafted_tokens=told.get("drafted_tokens", 0),
        accepted_tokens=told.get("accepted_tokens", 0),
        traversal=Traversal(**times, codecs=tuple(told.get("codecs", ()))),
    )


def _decode(content: bytes, kind: type[View]) -> View:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise BackendError(
            f"The server's answer cannot be understood: {error}.", hint="use the same release as the server"
        ) from error


def _refusal(response: httpx.Response) -> ShardComputeError:
    error = _error_of(response)
    if response.status_code in (401, 403):
        return AuthError(error.message)
    if response.status_code == 404 and error.message == "Not Found":
        return BackendError(
            "The server has no routes for clusters.", hint="it serves from one process, or is no ShardCompute"
        )
    return error
