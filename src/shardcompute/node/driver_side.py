"""What the coordinator asks of the drivers that live beside it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from shardcompute.control.actions import ActivateChain, ConnectChain, ReportUnservable
from shardcompute.control.state import ClusterState
from shardcompute.node.driver import Resumption


class DriverSide(Protocol):
    """Called from the coordinator's thread, `open_chain` from others too."""

    url: str

    def serves(self, model: str) -> bool:
        """Whether the model's tokenizer and weights are at hand; after a restart they come a moment later."""
        ...

    def open_chain(self, action: ConnectChain) -> None:
        """Dial the first stage. Raises LinkError."""
        ...

    def activate_chain(
        self, action: ActivateChain, state: ClusterState, resumption: Resumption | None
    ) -> None:
        """Use an epoch that was opened. Raises LinkError when it is lost already."""
        ...

    def fence_chain(self, chain: str, epoch: int) -> None: ...

    def retire_chain(self, chain: str) -> None:
        """The chain will not come back."""
        ...

    def report_unservable(self, action: ReportUnservable, broken: Collection[str]) -> None:
        """What is missing; `broken` are the model's chains that wait for it."""
        ...
