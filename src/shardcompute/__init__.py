"""ShardCompute: serve one language model from many small machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcompute.client import Answer, Client

__all__ = ["Answer", "Client"]


def __getattr__(name: str) -> Any:
    """`shardcompute.Client`, imported when it is first asked for: workers never need an HTTP client."""
    if name in __all__:
        from shardcompute import client

        return getattr(client, name)
    raise AttributeError(f"module 'shardcompute' has no attribute {name!r}")
