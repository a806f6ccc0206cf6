"""Process groups over `torch.distributed`: gloo between CPUs or over one shared GPU, NCCL where each rank has its own.

The same interface, order of sums and bits as over our own fabrics: torch's all-reduce adds in an order of its own, so
parts are gathered (or exchanged by pieces, where the array is large) and added here, on the device they are on.

torch's connections know no certificates: they are for ranks of one machine, or for a network that is closed to others.
They listen at `host` alone, which is loopback unless said otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import numpy as np

from shardcompute.collectives.elements import BFLOAT16, DTYPES, code_of
from shardcompute.collectives.fabrics.fabric import ExpectedFrame, PeerFailedError, judge_head
from shardcompute.collectives.fabrics.frames import (
    HEAD_BYTES,
    SEQUENCE_SPAN,
    FrameKind,
    Operation,
    pack_head,
)
from shardcompute.collectives.group import Array, GroupStats, as_contiguous, columns_space, even_counts
from shardcompute.core.errors import BackendError, CollectiveError, UsageError

_PIECEWISE_BYTES = 256 << 10
"""From here on, with three ranks or more, each adds its piece: fewer bytes, one more exchange."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TorchMeeting:
    """Where the ranks of a world find each other. Rank 0 keeps the store at `host` and `port`."""

    rank: int
    size: int
    port: int
    host: str = "127.0.0.1"
    backend: str = "gloo"
    device: str = "cpu"
    epoch: int = 1
    timeout_s: float = 30.0


class TorchGroup:
    """One rank's view of a group; made by `connect_torch`. `open_group` makes torch's group of some ranks, under a
    name that is theirs alone."""

    def __init__(
        self,
        meeting: TorchMeeting,
        open_group: Callable[[Sequence[int], str], Any],
        members: Sequence[int],
        name: str = "world",
    ) -> None:
        import torch

        self._torch = torch
        self._meeting = meeting
        self._open_group = open_group
        self._group = open_group(members, name)
        self._name = name
        self._splits: dict[tuple[int, ...], int] = {}
        # Arrays come from the host, and gloo carries them from there: it sends nothing from a device's memory.
        self._carrier = torch.device(meeting.device if meeting.backend == "nccl" else "cpu")
        self.members = tuple(members)
        self.rank = self.members.index(meeting.rank)
        self.size = len(self.members)
        self.epoch = meeting.epoch
        self._sequence = 0
        self._failure: CollectiveError | None = None
        self._bytes_sent = 0
        self._calls: dict[str, int] = {}
        self._busy_s = 0.0

    @property
    def stats(self) -> GroupStats:
        """Bytes as the algorithm needs them; what torch adds to them is not known. As many come as go."""
        return GroupStats(self._bytes_sent, self._bytes_sent, 0, dict(self._calls), self._busy_s)

    def all_reduce(self, array: Array, out: Array | None = None) -> Array:
        code_of(array)
        tensor = self._from_numpy(as_contiguous(array).reshape(-1))
        result = self._to_numpy(self.all_reduce_tensor(tensor), array.dtype).reshape(array.shape)
        if out is None:
            return result
        out[...] = result
        return out

    def all_reduce_tensor(self, tensor: Any) -> Any:
        """The sum of a tensor on the group's device, which it does not leave where the backend is NCCL."""
        flat = tensor.contiguous().reshape(-1)
        with self._call(Operation.ALL_REDUCE):
            size_bytes = flat.numel() * flat.element_size()
            is_large = size_bytes >= _PIECEWISE_BYTES and self.size > 2
            total = self._sum_by_pieces(flat) if is_large else self._sum(self._gather(flat))
        return total.reshape(tensor.shape)

    def reduce_scatter(self, array: Array, counts: Sequence[int] | None = None) -> Array:
        rows = even_counts(len(array), self.size) if counts is None else list(counts)
        if len(rows) != self.size or sum(rows) != len(array) or min(rows) < 0:
            raise UsageError(
                f"{len(array)} rows cannot be cut as {rows} for {self.size} ranks",
                hint="count every row once",
            )
        start = sum(rows[: self.rank])
        return self.all_reduce(array)[start : start + rows[self.rank]].copy()

    def all_gather(self, array: Array) -> list[Array]:
        held = as_contiguous(array)
        with self._call(Operation.ALL_GATHER):
            heads = self._gather(self._head_tensor(Operation.ALL_GATHER, held))
            told = [self._judge(Operation.ALL_GATHER, rank, head) for rank, head in enumerate(heads)]
            most = max(size_bytes for _, _, size_bytes in told)
            padded = np.zeros(most, np.uint8)
            padded[: held.nbytes] = held.reshape(-1).view(np.uint8)
            frames = (
                self._gather(self._from_numpy(padded)) if most else [self._from_numpy(padded)] * self.size
            )
        return [
            np.frombuffer(self._to_numpy(frame, np.dtype("uint8")).tobytes()[:size_bytes], dtype)
            .reshape(shape)
            .copy()
            for frame, (dtype, shape, size_bytes) in zip(frames, told, strict=True)
        ]

    def gather_columns(self, array: Array, widths: Sequence[int], out: Array | None = None) -> Array:
        result = columns_space(array, widths, self.rank, out)
        np.concatenate(self.all_gather(array), axis=-1, out=result)
        return result

    def broadcast(self, array: Array | None, root: int = 0, timeout_s: float | None = None) -> Array:
        """`timeout_s` is not looked at: torch's groups have one time for all that they do."""
        is_root = self.rank == root
        if is_root and array is None:
            raise UsageError("the root of a broadcast has nothing to send", hint="give it an array")
        with self._call(Operation.BROADCAST):
            held = as_contiguous(array) if is_root and array is not None else np.empty(0, np.uint8)
            head = self._head_tensor(Operation.BROADCAST, held)
            self._spread(head, root)
            dtype, shape, size_bytes = self._judge(Operation.BROADCAST, root, head)
            body = self._from_numpy(
                held.reshape(-1).view(np.uint8) if is_root else np.empty(size_bytes, np.uint8)
            )
            if size_bytes:
                self._spread(body, root)
        return np.frombuffer(self._to_numpy(body, np.dtype("uint8")).tobytes(), dtype).reshape(shape).copy()

    def barrier(self) -> None:
        with self._call(Operation.BARRIER):
            self._gather(self._from_numpy(np.zeros(1, np.uint8)))

    def send(self, array: Array, to: int) -> None:
        held = as_contiguous(array)
        with self._call(Operation.SEND, is_counted=False):
            self._group.send([self._head_tensor(Operation.SEND, held)], to, 0).wait()
            if held.nbytes:
                self._group.send([self._from_numpy(held.reshape(-1).view(np.uint8))], to, 0).wait()
            self._bytes_sent += held.nbytes

    def receive(self, source: int, timeout_s: float | None = None) -> Array:
        with self._call(Operation.SEND, is_counted=False):
            head = self._head_tensor(Operation.SEND, np.empty(0, np.uint8))
            self._group.recv([head], source, 0).wait()
            dtype, shape, size_bytes = self._judge(Operation.SEND, source, head)
            body = self._from_numpy(np.empty(size_bytes, np.uint8))
            if size_bytes:
                self._group.recv([body], source, 0).wait()
        return np.frombuffer(self._to_numpy(body, np.dtype("uint8")).tobytes(), dtype).reshape(shape).copy()

    def split(self, ranks: Sequence[int]) -> Self:
        if self.rank not in ranks:
            raise UsageError(f"rank {self.rank} is not among {list(ranks)}", hint="name it, too")
        # torch's groups meet by name, and the same ranks may be split off twice.
        chosen = tuple(ranks)
        number = self._splits[chosen] = self._splits.get(chosen, 0) + 1
        name = f"{self._name}/{','.join(map(str, chosen))}.{number}"
        return type(self)(self._meeting, self._open_group, [self.members[each] for each in ranks], name)

    def abort(self, reason: str) -> None:
        """Others learn of it when they next wait for this rank: its connections are gone."""
        self._failure = self._failure or CollectiveError(
            f"rank {self.members[self.rank]} has ended the group: {reason}",
            hint="form the group again",
            rank=self.members[self.rank],
        )
        self._group = None

    def close(self) -> None:
        self.abort("it leaves")

    @contextmanager
    def _call(self, operation: Operation, *, is_counted: bool = True) -> Iterator[None]:
        if self._failure is not None:
            raise CollectiveError(self._failure.message, hint=self._failure.hint, rank=self._failure.rank)
        name = operation.name.lower()
        if is_counted:
            self._sequence = (self._sequence + 1) % SEQUENCE_SPAN
        started_s = time.monotonic()
        try:
            yield
        except (RuntimeError, PeerFailedError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._failure = CollectiveError(
                f"{name} {self._sequence} failed on rank {self.members[self.rank]}: {first}",
                hint="the ranks must call the same collectives; form the group again",
                rank=error.peer if isinstance(error, PeerFailedError) else None,
                operation=name,
                sequence=self._sequence,
            )
            self._group = None
            raise self._failure from error
        self._busy_s += time.monotonic() - started_s
        self._calls[name] = self._calls.get(name, 0) + 1

    def _gather(self, tensor: Any) -> list[Any]:
        """What every rank gives, of one size and type; as bytes on the way, which every backend carries."""
        mine = tensor.view(self._torch.uint8)
        parts = [self._torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([parts], [mine]).wait()
        self._bytes_sent += (self.size - 1) * mine.numel()
        return [part.view(tensor.dtype) for part in parts]

    def _sum(self, parts: Sequence[Any]) -> Any:
        """In the order of `algorithms.order`."""
        level = list(parts)
        while len(level) > 1:
            pairs = [level[index] + level[index + 1] for index in range(0, len(level) - 1, 2)]
            level = [*pairs, level[-1]] if len(level) % 2 else pairs
        return level[0]

    def _sum_by_pieces(self, flat: Any) -> Any:
        torch = self._torch
        piece = -(-flat.numel() // self.size)
        piece += -piece % _ALIGNMENT
        padded = torch.zeros(piece * self.size, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
        mine = torch.empty_like(padded)
        self._group.alltoall_base(mine.view(torch.uint8), padded.view(torch.uint8), [], []).wait()
        self._bytes_sent += (self.size - 1) * piece * flat.element_size()
        total = self._sum(mine.chunk(self.size)).contiguous()
        return torch.cat(self._gather(total))[: flat.numel()]

    def _spread(self, tensor: Any, root: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([tensor], options).wait()
        if self.rank == root:
            self._bytes_sent += (self.size - 1) * tensor.numel()

    def _head(self, operation: Operation, rank: int, dtype: int, shape: tuple[int, ...], size: int) -> bytes:
        sequence = 0 if operation is Operation.SEND else self._sequence
        kind = FrameKind.ELEMENTS
        return pack_head(kind, operation, dtype, 0, self.epoch, sequence, 0, rank, shape, size)

    def _head_tensor(self, operation: Operation, array: Array) -> Any:
        raw = self._head(operation, self.rank, code_of(array), array.shape, array.nbytes)
        return self._from_numpy(np.frombuffer(raw, np.uint8).copy())

    def _judge(self, operation: Operation, rank: int, tensor: Any) -> tuple[Any, tuple[int, ...], int]:
        """Type, shape and size of what a rank gives; `PeerFailedError` if it is at something else."""
        raw = self._to_numpy(tensor, np.dtype("uint8")).tobytes()[:HEAD_BYTES]
        head = judge_head(raw, ExpectedFrame(self.members[rank], self._head(operation, rank, 0, (), 0)))
        if head is None:
            raise PeerFailedError(self.members[rank], "it is at an earlier epoch")
        return DTYPES[head.dtype], head.shape, head.body_bytes

    def _from_numpy(self, array: Array) -> Any:
        torch = self._torch
        # torch has no sums of uint16, and means bfloat16 by what we keep in it.
        tensor = (
            torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == BFLOAT16 else None
        )
        return (torch.from_numpy(array) if tensor is None else tensor).to(self._carrier)

    def _to_numpy(self, tensor: Any, dtype: Any) -> Array:
        host = tensor.detach().cpu().contiguous()
        raw: Array = host.view(self._torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
        return raw.view(dtype)


def connect_torch(meeting: TorchMeeting) -> TorchGroup:
    """The group of all ranks. `BackendError` where torch or its backend is missing, `CollectiveError` if the ranks do
    not meet in time."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise BackendError("this needs torch", hint="pip install 'shardcompute[torch]'") from error
    if meeting.backend == "nccl" and (
        not dist.is_nccl_available() or torch.cuda.device_count() < meeting.size
    ):
        raise BackendError(
            f"NCCL needs a GPU of its own for each of {meeting.size} ranks; there are {torch.cuda.device_count()}",
            hint="use gloo, which lets ranks share a GPU",
        )
    try:
        wait = timedelta(seconds=meeting.timeout_s)
        store = dist.TCPStore(
            meeting.host, meeting.port, None, meeting.rank == 0, timeout=wait, wait_for_workers=False
        )

        def open_group(members: Sequence[int], name: str) -> Any:
            named = dist.PrefixStore(f"{meeting.epoch}/{name}", store)
            return _open_backend(meeting, named, members.index(meeting.rank), len(members), wait)

        return TorchGroup(meeting, open_group, range(meeting.size))
    except RuntimeError as error:
        raise CollectiveError(
            f"the ranks did not meet at {meeting.host}:{meeting.port}: {str(error).splitlines()[0]}",
            hint="check that every rank is running and forms the same epoch",
            operation="form",
            sequence=0,
        ) from error


def _open_backend(meeting: TorchMeeting, store: Any, rank: int, size: int, wait: timedelta) -> Any:
    import torch.distributed as dist

    if meeting.backend == "nccl":
        import torch

        torch.cuda.set_device(meeting.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(store, rank, size, options)
    chosen = dist.ProcessGroupGloo._Options()
    chosen._timeout = wait
    chosen._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
    return dist.ProcessGroupGloo(store, rank, size, chosen)
