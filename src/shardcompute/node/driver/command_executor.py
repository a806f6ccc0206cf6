"""Command executor of a process' drivers, where they are not the coordinator's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from shardcompute.control.actions import ActivateChain, ReportUnservable
from shardcompute.core.errors import UnknownModelError
from shardcompute.node.driver.chain_links import ChainAddress
from shardcompute.node.driver.pool import DriverPool, PoolModel
from shardcompute.node.rpc.commands import (
    Attach,
    FenceOff,
    NodeCommand,
    OfferedModel,
    Peer,
    Retire,
    Share,
    Unservable,
)
from shardcompute.node.weights.tokenizer_client import fetch_tokenizer
from shardcompute.wire import Link

log = logging.getLogger(__name__)


class DriverCommandExecutor:
    """Carries out commands for the drivers in `pool`. `dial` opens a link for weights, over which tokenizers come."""

    def __init__(self, pool: DriverPool, dial: Callable[[Peer], Link]) -> None:
        self._pool = pool
        self._dial = dial

    def carry_out(self, command: NodeCommand) -> None:
        """What is no command for a driver is left alone."""
        if isinstance(command, Attach):
            self._attach(command)
        elif isinstance(command, Share):
            self._pool.share_chain(command.chain, command.epoch, command.kv_tokens)
        elif isinstance(command, FenceOff):
            self._pool.fence_chain(command.chain, command.epoch)
        elif isinstance(command, Retire):
            self._pool.retire_chain(command.chain)
        elif isinstance(command, Unservable):
            action = ReportUnservable(command.model, command.missing_bytes, tuple(command.reasons))
            self._pool.report_unservable(action, command.broken)

    def learn(self, offered: OfferedModel, origin: Peer) -> None:
        """Get ready to serve a model, unless that was done. LinkError or SourceError without its tokenizer."""
        known = {model.name: model.created_s for model in self._pool.all_models()}
        if known.get(offered.name) == offered.created_s:
            return
        log.info("fetching the tokenizer of %s", offered.name)
        self._pool.add_model(
            PoolModel(
                offered.name,
                fetch_tokenizer(partial(self._dial, origin), origin.node, offered.name),
                offered.vocab_size,
                offered.context_length,
                offered.created_s,
                offered.speculation,
                has_draft_head=offered.has_draft_head,
            )
        )

    def _attach(self, command: Attach) -> None:
        if not self._pool.serves(command.model):
            raise UnknownModelError(f"the tokenizer of {command.model} is not here yet")
        first = command.first
        address = ChainAddress(command.chain, command.epoch, first.node, first.url, tuple(command.nodes))
        self._pool.open_address(address)
        action = ActivateChain(command.chain, command.epoch, command.model)
        self._pool.activate_chain(action, command.kv_tokens, command.resumption)
