"""The model that a draft head learns from, as a device sees it: what its ends are made of, and opened to talk.

Of its ends (`ModelEnds`) the last norm is read, and rows of the two tables of tokens; a whole model only where it talks
on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import Float32, Matrix
from shardcompute.backends.torch import TorchExecutor
from shardcompute.backends.torch.device import choose_device
from shardcompute.draft_training.dialogue import Script
from shardcompute.draft_training.draft_net import NetShape
from shardcompute.draft_training.self_play import STEPS_AHEAD, Keep, SelfPlay
from shardcompute.draft_training.training_loop import FrozenWeights
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import ModelSpec, head_stage, whole
from shardcompute.models.tensor_share import TensorCut
from shardcompute.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

_TALK_MEMORY = 0.38
_ROWS_MEMORY = 0.38
_HOST_BYTES = 1 << 30
_HEAD_DIM = 64
_THETA = 10_000.0
_THETA_CONTEXT = 8192
_READ_ROWS = 4096
"""Of a table, at once."""
_USUAL_TOKENS = 480
"""Of a session, all in all."""


class TableSource(Protocol):
    """Where tensors of a model are read by our names: vectors, and parts of matrices."""

    def part(self, name: str, layer: int | None, cut: TensorCut) -> Matrix: ...

    def vector(self, name: str, layer: int | None = None) -> Float32: ...


class ModelEnds(Protocol):
    """What is needed of a model besides its states, wherever it is."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    def tokenizer(self) -> Tokenizer: ...

    def vector(self, name: str) -> Float32:
        """The last norm, or its bias."""
        ...

    def rows(self, name: str, ids: NDArray[np.int32]) -> Float32:
        """The rows of these tokens, in rising order, of the embedding or the head."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointEnds:
    """Those of a model whose files are here."""

    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer()

    def vector(self, name: str) -> Float32:
        return self.checkpoint.source(head_stage(self.spec)).vector(name, None)

    def rows(self, name: str, ids: NDArray[np.int32]) -> Float32:
        return read_rows(self.checkpoint.source(head_stage(self.spec)), name, ids)


def read_rows(source: TableSource, name: str, ids: NDArray[np.int32]) -> Float32:
    """Rows of a table by number, in rising order. Only parts of it are read that have some of them, one at a time."""
    found = []
    for first in np.unique(ids // _READ_ROWS).tolist():
        wanted = ids[ids // _READ_ROWS == first]
        start = int(first) * _READ_ROWS
        part = source.part(name, None, TensorCut((start, int(wanted[-1]) + 1))).to_dense()
        found.append(part[wanted - start])
    return np.ascontiguousarray(np.concatenate(found), dtype=np.float32)


class Teacher:
    """A model on a device; `context_length` of a conversation, as many `sessions` side by side as fit."""

    def __init__(
        self, ends: ModelEnds, device: str, *, context_length: int, sessions: int, threads: int
    ) -> None:
        self.ends = ends
        self.spec = ends.spec
        self._frozen: tuple[bytes, FrozenWeights] | None = None
        self.device: torch.device = choose_device(_choose_device_name(device))
        self.is_cuda = self.device.type == "cuda"
        self.context_length = min(context_length or (1280 if self.is_cuda else 512), self.spec.context_length)
        self.read_rows = max(8192 if self.is_cuda else 512, self.context_length)
        self._threads = threads
        each = self.spec.kv_bytes_per_token_and_layer() * self.spec.layer_count
        if self.is_cuda:
            room = int(_TALK_MEMORY * torch.cuda.get_device_properties(self.device).total_memory)
            # On the device a number has 16 bits, which is half of what is counted.
            self.kv_tokens = room // max(1, each // 2)
            self.sessions = sessions or max(64, min(4096, self.kv_tokens // _USUAL_TOKENS))
        else:
            self.sessions = sessions or 16
            self.kv_tokens = self.sessions * (self.context_length + 2 * STEPS_AHEAD + 64)

    def open(self, checkpoint: Checkpoint) -> TorchExecutor:
        """The whole model, for sessions of self-play. Steps of so many rows would widen quantised matrices every
        time."""
        spec, stage = self.spec, whole(self.spec)
        kv_bytes = self.kv_tokens * spec.kv_bytes_per_token_and_layer() * spec.layer_count
        options = ExecutorOptions(
            kv_bytes=kv_bytes // 2 if self.is_cuda else kv_bytes,
            max_rows=max(self.read_rows, self.sessions),
            max_logit_rows=max(self.read_rows, self.sessions),
            context_length=self.context_length + 2 * STEPS_AHEAD,
            threads=self._threads,
            device=str(self.device),
            use_graphs=False,
        )
        return TorchExecutor(Decoder(spec, stage, checkpoint.source(stage, form="float32")), options)

    def play(self, executor: TorchExecutor, scripts: Iterator[Script], keep: Keep, seed: int) -> SelfPlay:
        """Self-play of as many sessions as fit."""
        return SelfPlay(
            executor,
            scripts,
            keep,
            sessions=self.sessions,
            context_length=self.context_length,
            kv_tokens=self.kv_tokens - self.context_length,
            max_rows=self.read_rows,
            hidden=self.spec.hidden,
            device=self.device,
            seed=seed,
        )

    def capacity(self, tokens: int | None) -> int:
        """Rows that the device's memory has room for, or that are asked for."""
        room = _HOST_BYTES
        if self.is_cuda:
            room = int(_ROWS_MEMORY * torch.cuda.get_device_properties(self.device).total_memory)
        rows = room // (2 * self.spec.hidden + 5)
        return rows if tokens is None else min(rows, 2 * tokens + self.sessions * self.context_length)

    def shape(self, layers: int, width: int) -> NetShape:
        """Of a draft head for this model, with heads like the model's own where these are plain."""
        spec = self.spec
        heads, kv_heads, head_dim = spec.heads, spec.kv_heads, spec.head_dim
        if spec.latent is not None or heads * head_dim > 2 * spec.hidden or heads * head_dim % 32:
            head_dim = min(_HEAD_DIM, spec.hidden)
            heads = kv_heads = spec.hidden // head_dim
        wide = width or -(-8 * spec.hidden // 3)
        return NetShape(
            hidden=spec.hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=-(-wide // 64) * 64,
            theta=_THETA * max(1.0, spec.context_length / _THETA_CONTEXT),
            eps=spec.norm_eps,
        )

    def last_norm(self) -> torch.Tensor:
        """The gains of the model's last norm."""
        return self._upload(self.ends.vector("norm"))

    def frozen_weights(self, ids: NDArray[np.int32]) -> FrozenWeights:
        """What a draft head that knows these tokens takes from the model. The last one is kept: reading it may take
        long."""
        if self._frozen is None or self._frozen[0] != ids.tobytes():
            self._frozen = ids.tobytes(), self._read_frozen(ids)
        return self._frozen[1]

    def _read_frozen(self, ids: NDArray[np.int32]) -> FrozenWeights:
        spec = self.spec
        places = torch.full((spec.vocab_size,), -1, dtype=torch.int64, device=self.device)
        places[torch.from_numpy(ids).long().to(self.device)] = torch.arange(len(ids), device=self.device)
        embedding = self._upload(self.ends.rows("embedding", ids)) * spec.embedding_scale
        return FrozenWeights(
            torch.cat([torch.zeros_like(embedding[:1]), embedding]),
            self._upload(self.ends.rows("head", ids)),
            places,
            self._finish(),
            spec.logit_scale,
            spec.logit_softcap,
        )

    def _finish(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The last norm, of rows that have a mean square of 1 already."""
        weight = self.last_norm()
        if self.spec.norm != "layer":
            return lambda rows: rows * weight
        bias = self._upload(self.ends.vector("norm.bias")) if self.spec.has_norm_bias else None
        return lambda rows: functional.layer_norm(rows, weight.shape, weight, bias, self.spec.norm_eps)

    def _upload(self, values: Float32) -> torch.Tensor:
        """In float32 on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).float().to(self.device)


def _choose_device_name(name: str) -> str:
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
