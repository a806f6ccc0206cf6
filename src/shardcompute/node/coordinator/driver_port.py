"""What the coordinator asks of the drivers of one process: of its own, and by way of commands of those elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from shardcompute.control.actions import ActivateChain, ConnectChain, ReportUnservable
from shardcompute.node.rpc.session_ids import Resumption


class DriverPort(Protocol):
    """Called from the coordinator's thread, `open_chain` from others too."""

    url: str
    session_namespace: int
    """The namespace in which its sessions are numbered (see `session_ids`)."""

    def serves(self, model: str) -> bool:
        """Whether the model's tokenizer and weights are at hand; after a restart they come a moment later."""
        ...

    def open_chain(self, action: ConnectChain) -> None:
        """Dial the first stage. Raises LinkError."""
        ...

    def activate_chain(self, action: ActivateChain, kv_tokens: int, resumption: Resumption | None) -> None:
        """Use an epoch that was opened, with KV for so many tokens. Raises LinkError when it is lost already."""
        ...

    def share_chain(self, chain: str, epoch: int, kv_tokens: int) -> None:
        """From now on there is KV for so many tokens. Raises LinkError when the epoch is over."""
        ...

    def fence_chain(self, chain: str, epoch: int) -> None: ...

    def retire_chain(self, chain: str) -> None:
        """The chain will not come back."""
        ...

    def host_chain(self, chain: str, node: str, url: str) -> None:
        """The chain's driver sits on this worker from now on: hand generations over to it. Raises LinkError."""
        ...

    def unhost_chain(self, chain: str, node: str) -> None:
        """It does not any more: go on here with what it has not finished."""
        ...

    def report_unservable(self, action: ReportUnservable, broken: Collection[str]) -> None:
        """What is missing; `broken` are the model's chains that wait for it."""
        ...
