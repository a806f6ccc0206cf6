"""Teaching draft heads through a cluster: what a machine that teaches may read of a served model, and hands back.

It reads the model's ends alone (the tables of tokens, the last norm, the tokenizer, the draft head in use), by name and
in pieces, never a layer. What it hands back is checked, kept by the hash of the weights and given to the last stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardcompute.control.state import Assignment, Chain
from shardcompute.core.errors import LinkError, UnknownModelError, UnsupportedModelError, UsageError
from shardcompute.models.draft_head import DRAFT_HEAD, decode_draft_head, encode_draft_head
from shardcompute.models.families import is_fallback
from shardcompute.node.cluster.preparation import offered
from shardcompute.node.coordinator.node_registry import await_answer
from shardcompute.node.rpc.commands import HostDriver, Peer, TakeDraftHead
from shardcompute.node.weights.draft_heads import save_draft_head
from shardcompute.weights.attached import find_attachment
from shardcompute.weights.card import Card, encode_card
from shardcompute.weights.served import MOST_READ_BYTES, ServedWeights
from shardcompute.weights.tokenizer_pack import TOKENIZER

if TYPE_CHECKING:
    from shardcompute.node.cluster.served_files import ServedFiles
    from shardcompute.node.coordinator.coordinator import Coordinator
    from shardcompute.node.driver.pool import DriverPool

log = logging.getLogger(__name__)
MOST_HEAD_BYTES = 128 << 20
"""Of a draft head: several times that of the largest models."""
_TAKEN_WITHIN_S = 180.0
_ENDS = ("embedding", "head", "norm", "norm.bias")


@dataclass(frozen=True, slots=True)
class TakenDraftHead:
    """Where a draft head is kept, on how many last stages it drafts now, and why it does not on others."""

    path: str
    in_use: int
    problems: tuple[str, ...] = ()


class DraftHeadTeaching:
    """For one cluster. Methods may be called from any thread; `take` waits for workers."""

    def __init__(
        self,
        files: ServedFiles,
        pool: DriverPool,
        coordinator: Coordinator,
        origin: Peer,
        folder: Path | None,
    ) -> None:
        """`origin` is who serves weights, `folder` where draft heads lie; None: none are kept."""
        self._files = files
        self._pool = pool
        self._coordinator = coordinator
        self._origin = origin
        self._folder = folder

    def card_of(self, model: str) -> Card:
        return self._served(model).card

    def read_card(self, model: str) -> bytes:
        return encode_card(self._served(model).card)

    def read_tensor(self, model: str, name: str, offset: int, length: int) -> bytes:
        """Bytes of one of the model's ends. UsageError for others, and for what is not there."""
        served = self._served(model)
        if name not in readable(served.card):
            raise UsageError(
                f"{name!r} is not among what teaching reads of {model}",
                hint="layers are served to workers alone",
            )
        size = served.card.entries[name].size_bytes
        if not 0 < length <= MOST_READ_BYTES or offset < 0 or offset + length > size:
            raise UsageError(
                f"bytes {offset} to {offset + length} of {name!r} cannot be read: it has {size}",
                hint=f"read at most {MOST_READ_BYTES} at once",
            )
        return bytes(served.tensors.read_bytes(name, offset, length))

    def take(self, model: str, content: bytes) -> TakenDraftHead:
        """Keep a model's draft head and have last stages draft with it. CorruptModelError for what cannot be one."""
        checkpoint = self._files.checkpoint_of(model)
        card = self._served(model).card
        if checkpoint is None:
            raise _unknown(model)
        if is_fallback(card.spec):
            raise UnsupportedModelError(f"{model} is run by transformers, whose last stages cannot draft")
        if self._folder is None:
            raise UsageError("this cluster keeps no draft heads", hint="start it with `shardcompute up`")
        weights = decode_draft_head(content, card.spec.hidden, card.spec.vocab_size)
        path = save_draft_head(self._folder, checkpoint, weights)
        self._files.attach(model, {DRAFT_HEAD: encode_draft_head(weights)})
        problems = self._hand_out(model)
        for known in [each for each in self._pool.all_models() if each.name == model]:
            self._pool.add_model(replace(known, has_draft_head=True, draft_head_problem=""))
        self._coordinator.introduce()
        problems += self._tell_hosts(model)
        stages = len(self._chains(model))
        return TakenDraftHead(str(path), max(0, stages - len(problems)), tuple(problems))

    def _hand_out(self, model: str) -> list[str]:
        """Have the last stages of all chains take it; why some do not. Standbys take it too, or when they are used."""
        asked = []
        for chain in self._chains(model):
            last = chain.stages[-1]
            asked.append((last.node, True, self._ask(chain, last)))
            spare = [each for each in chain.standbys if each.stop == last.stop]
            asked += [(each.node, False, self._ask(chain, each)) for each in spare]
        problems = []
        for node, is_needed, wait in asked:
            try:
                wait()
            except LinkError as error:
                log.warning("%s does not draft with the new draft head of %s: %s", node, model, error)
                if is_needed:
                    problems.append(error.message)
        return problems

    def _ask(self, chain: Chain, stage: Assignment) -> Callable[[], bytes]:
        command = TakeDraftHead(
            chain=chain.id,
            start=stage.start,
            stop=stage.stop,
            origin=self._origin,
            tensor=stage.place_of(stage.node),
        )
        answer = self._coordinator.registry.ask(stage.node, command)
        return lambda: await_answer(stage.node, answer, _TAKEN_WITHIN_S)

    def _tell_hosts(self, model: str) -> list[str]:
        """Workers that drive chains of this model are told that its last stages draft."""
        problems = []
        told = [offered(each) for each in self._pool.all_models() if each.name == model]
        hosts = {chain.driver_host for chain in self._chains(model) if chain.driver_host}
        for host in sorted(hosts) if told else ():
            chains = self._coordinator.state.live_chains()
            hosted = [chain.id for chain in chains if chain.driver_host == host]
            command = HostDriver(model=told[0], origin=self._origin, chains=hosted)
            try:
                await_answer(host, self._coordinator.registry.ask(host, command), _TAKEN_WITHIN_S)
            except LinkError as error:
                problems.append(error.message)
        return problems

    def _chains(self, model: str) -> list[Chain]:
        return [chain for chain in self._coordinator.state.live_chains(model) if chain.stages]

    def _served(self, model: str) -> ServedWeights:
        served = self._files.served_of(model)
        if served is None:
            raise _unknown(model)
        return served


def readable(card: Card) -> frozenset[str]:
    """The stored tensors of a model's ends, and what is attached for whoever teaches."""
    places = [place for name, place in card.layout.model.items() if name in _ENDS]
    names = {name for place in places for name in card.stored_names(place)}
    attached = (find_attachment(card.entries, name) for name in (TOKENIZER, DRAFT_HEAD))
    return frozenset(names | {name for name in attached if name is not None})


def _unknown(model: str) -> UnknownModelError:
    return UnknownModelError(
        f"the model {model!r} is not served here", hint="use a name as `shardcompute status` tells it"
    )
