"""Command executor of a process' drivers: of the coordinator's own, and of those on other machines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardcompute.core.errors import LinkError, UnknownModelError
from shardcompute.node.driver.pool import DriverPool, PoolModel
from shardcompute.node.rpc.commands import (
    Attach,
    ConfirmMissing,
    FenceOff,
    NodeCommand,
    OfferedModel,
    Peer,
    Progressed,
    Redial,
    Retire,
    Share,
    Unservable,
)
from shardcompute.node.weights.tokenizer_client import fetch_tokenizer
from shardcompute.wire import Link

log = logging.getLogger(__name__)


def carry_out(pool: DriverPool, command: NodeCommand) -> None:
    """What every driver does when it is told so; a chain must have been opened before it is used. What is no command
    for a driver is left alone."""
    match command:
        case Attach():
            pool.activate_chain(command)
        case Share(chain, epoch, kv_tokens):
            pool.share_chain(chain, epoch, kv_tokens)
        case FenceOff(chain, epoch):
            pool.fence_chain(chain, epoch)
        case ConfirmMissing(chain, epoch, sequence):
            if not pool.misses(chain, epoch, sequence):
                raise LinkError(f"step {sequence} of chain {chain} is missed no more")
        case Redial(chain, node, by_driver=True):
            if not pool.redial_chain(chain, node):
                raise LinkError(f"chain {chain} has no link to {node} here")
        case Retire(chain):
            pool.retire_chain(chain)
        case Progressed(chain, epoch, fraction, waits_for):
            pool.progressed(chain, (epoch, fraction), waits_for)
        case Unservable():
            pool.report_unservable(command)


class InProcessDriver:
    """The coordinator's own drivers, in its process: commanded like others (`coordinator.driver_port.OwnDriver`)."""

    def __init__(self, node: str, pool: DriverPool) -> None:
        self.node = node
        self.url = pool.url
        self.session_namespace = pool.session_namespace
        self.serves = pool.serves
        self.open_chain = pool.open_chain
        self.running_sessions = pool.running_sessions
        self.host_chain = pool.host_chain
        self.unhost_chain = pool.unhost_chain
        self._pool = pool

    def tell(self, command: NodeCommand) -> None:
        carry_out(self._pool, command)

    def ask(self, command: NodeCommand) -> None:
        carry_out(self._pool, command)


class DriverCommandExecutor:
    """Commands for the drivers in `pool` that came over a control link. `dial` opens a link for weights, over which
    tokenizers come."""

    def __init__(self, pool: DriverPool, dial: Callable[[Peer], Link]) -> None:
        self._pool = pool
        self._dial = dial

    def carry_out(self, command: NodeCommand) -> None:
        """What is no command for a driver is left alone."""
        if isinstance(command, Attach):
            if not self._pool.serves(command.model):
                raise UnknownModelError(f"the tokenizer of {command.model} is not here yet")
            self._pool.open_chain(command)
        carry_out(self._pool, command)

    def learn(self, offered: OfferedModel, origin: Peer) -> None:
        """Get ready to serve a model, unless that was done. LinkError or SourceError without its tokenizer."""
        known = {model.name: model for model in self._pool.all_models()}.get(offered.name)
        if known is not None and known.created_s == offered.created_s:
            if known.has_draft_head != offered.has_draft_head:
                self._pool.add_model(replace(known, has_draft_head=offered.has_draft_head))
            return
        log.info("fetching the tokenizer of %s", offered.name)
        self._pool.add_model(
            PoolModel(
                offered.name,
                fetch_tokenizer(partial(self._dial, origin), origin.node, offered.name),
                offered.vocab_size,
                offered.context_length,
                offered.created_s,
                offered.digest,
                offered.size_bytes,
                offered.speculation,
                has_draft_head=offered.has_draft_head,
                adapters=offered.adapters,
                vision=offered.vision,
            )
        )
