"""What the coordinator tells a worker to do. Each is answered when it is done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shardcompute.core.errors import LinkError


class Peer(msgspec.Struct, frozen=True):
    node: str
    url: str


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Load layers `[start, stop)` of a model, with KV memory for `kv_tokens`."""

    chain: str
    model: str
    start: int
    stop: int
    kv_tokens: int
    context_length: int
    sources: list[Peer]


class Unload(msgspec.Struct, frozen=True, tag=True):
    chain: str
    start: int
    stop: int


class Connect(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take a place in an epoch of a chain and open the link to whoever comes next.

    `keeps_sessions`: this stage was in the epoch before and goes on with its KV. `replays`: whoever comes next is new
    and gets what this stage has sent before. Frames are taken from `previous_node` (the driver, for the first stage)
    alone. Answered with `Connected`.
    """

    chain: str
    epoch: int
    start: int
    stop: int
    next_node: str
    next_url: str
    previous_node: str
    driver_node: str
    driver_url: str
    is_last: bool
    keeps_sessions: bool = False
    replays: bool = False


class Connected(msgspec.Struct, frozen=True):
    """Whether the stage goes on with its sessions; which it holds, and which it replayed to the next, each with how
    many tokens."""

    kept: bool = False
    replayed: dict[int, int] = {}
    held: dict[int, int] = {}


class FenceOff(msgspec.Struct, frozen=True, tag=True):
    """Drop frames of this epoch and earlier ones. `forgets`: free what is left of the sessions, too, because others
    go on with them."""

    chain: str
    epoch: int
    forgets: bool = False


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Measure the links to these nodes and report them."""

    peers: list[Peer]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the cluster's is left here: the worker may go."""


WorkerCommand: TypeAlias = Load | Unload | Connect | FenceOff | Probe | Leave


def encode_command(command: WorkerCommand) -> bytes:
    return msgspec.json.encode(command)


def encode_connected(connected: Connected) -> bytes:
    return msgspec.json.encode(connected)


def decode_connected(content: bytes) -> Connected:
    try:
        return msgspec.json.decode(content, type=Connected)
    except (ValueError, RecursionError) as error:
        raise LinkError(
            f"an answer cannot be understood: {error}", hint="run one release on all nodes"
        ) from error


def decode_command(content: bytes) -> WorkerCommand:
    try:
        command: WorkerCommand = msgspec.json.decode(content, type=WorkerCommand)
    except (ValueError, RecursionError) as error:
        raise LinkError(
            f"a command cannot be understood: {error}", hint="run one release on all nodes"
        ) from error
    return command
