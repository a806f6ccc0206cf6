"""The rungs of the ladder: ways on which a link can go, from the best to the last resort."""

from __future__ import annotations

from shardcompute.wire.links import DIRECT, LOCAL

__all__ = ["CALLBACK", "DIRECT", "LOCAL", "PUNCHED", "RANKS", "RELAYED"]

# LOCAL: a socket of the same machine. DIRECT: one side dialled the other at an address of its own.
CALLBACK = "callback"
"""The side that was wanted dialled the one that wanted it."""
PUNCHED = "punched"
"""Both dialled at once, from ports that their routers then let the other's answer through."""
RELAYED = "relayed"
"""Through a relay, which sees ciphertext."""
RANKS = {LOCAL: 0, DIRECT: 1, CALLBACK: 1, PUNCHED: 2, RELAYED: 3}
