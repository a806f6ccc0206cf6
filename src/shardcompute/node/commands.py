"""What the coordinator tells a worker to do. Each is answered when it is done."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shardcompute.core.errors import LinkError


class WeightSource(msgspec.Struct, frozen=True):
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
    sources: list[WeightSource]


class Unload(msgspec.Struct, frozen=True, tag=True):
    chain: str
    start: int
    stop: int


class Connect(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take a place in an epoch of a chain and open the link to whoever comes next."""

    chain: str
    epoch: int
    start: int
    stop: int
    next_node: str
    next_url: str
    driver_node: str
    driver_url: str
    is_last: bool


class FenceOff(msgspec.Struct, frozen=True, tag=True):
    """Drop frames of this epoch and earlier ones."""

    chain: str
    epoch: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the cluster's is left here: the worker may go."""


WorkerCommand: TypeAlias = Load | Unload | Connect | FenceOff | Leave


def encode_command(command: WorkerCommand) -> bytes:
    return msgspec.json.encode(command)


def decode_command(content: bytes) -> WorkerCommand:
    try:
        command: WorkerCommand = msgspec.json.decode(content, type=WorkerCommand)
    except msgspec.DecodeError as error:
        raise LinkError(
            f"a command cannot be understood: {error}", hint="run one release on all nodes"
        ) from error
    return command
