"""Opens a shard: a stage of a checkpoint on a backend."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace

from shardcompute.backends.executor import (
    Executor,
    ExecutorOptions,
    Network,
    PictureNetwork,
    refuse_final_rows,
)
from shardcompute.backends.footprint import ADAPTING_HOLDERS, holding_of
from shardcompute.backends.host.low_rank import NO_ADAPTERS, AdapterLayers
from shardcompute.backends.matrix import ChosenRows, DenseMatrix, HeldRows, StoredRows, rows_of
from shardcompute.core.errors import BackendError, UnsupportedModelError, UsageError
from shardcompute.core.phases import phase
from shardcompute.models.decoder import Decoder, StoredTables, TensorSource
from shardcompute.models.draft_head import DraftHeadNetwork, DraftHeadWeights
from shardcompute.models.families import is_fallback, refuse_foreign
from shardcompute.models.rank_tensors import RankTensors, rank_adapters
from shardcompute.models.spec import ModelSpec, Stage, whole
from shardcompute.models.tensor_rank import TensorRank
from shardcompute.models.tensor_share import Exchange, ExpertCut, GridShape, TensorSplit, split_tensors
from shardcompute.runtime.fallback import open_local_fallback
from shardcompute.runtime.head_drafter import HeadDrafter, HeadDraftLimits
from shardcompute.runtime.llamacpp import open_local_stage
from shardcompute.weights.adapters import stage_adapters
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.formats.quantise import WEIGHT_FORMS, convert
from shardcompute.weights.held import column_block

BACKENDS: tuple[str, ...] = ("onnx", "torch", "mlx", "llamacpp", "numpy", "transformers")
"""The last one runs models that have no spec of ours, see `runtime.fallback`."""
RANKED_BACKENDS: tuple[str, ...] = ("onnx", "torch", "mlx", "numpy")
"""Those that can run a tensor rank."""
DRAFTING_BACKENDS: tuple[str, ...] = ("onnx", "torch", "mlx", "numpy")
"""Those whose last stage can have a draft head."""
DRAFT_HEAD_ROWS = 128
"""Of one of its steps: prompts are shown to it in pieces, and what it computes with stays small."""


def open_shard(
    checkpoint: Checkpoint,
    *,
    stage: Stage | None = None,
    backend: str = "onnx",
    form: str = "native",
    options: ExecutorOptions,
    rank: TensorRank | None = None,
) -> Executor:
    """Load a stage (by default the whole model), or a tensor rank's share of it; the checkpoint may be closed
    afterwards."""
    if form not in WEIGHT_FORMS:
        raise UsageError(f"there is no weight form {form!r}", hint=f"use one of {', '.join(WEIGHT_FORMS)}")
    stage = stage or whole(checkpoint.spec)
    if checkpoint.adapters:
        refuse_adapters("transformers" if is_fallback(checkpoint.spec) else backend, options.device)
    if rank is not None:
        refuse_ranks("transformers" if is_fallback(checkpoint.spec) else backend)
    if is_fallback(checkpoint.spec):
        return open_local_fallback(checkpoint, stage, form, options)
    if backend == "llamacpp":
        return open_local_stage(checkpoint, stage, form, options)
    return build_executor(
        checkpoint.spec,
        stage,
        checkpoint.source(stage, form=form),
        backend=backend,
        options=options,
        adapters=stage_adapters(checkpoint.adapters, stage),
        rank=rank,
    )


def build_executor(
    spec: ModelSpec,
    stage: Stage,
    source: TensorSource,
    *,
    backend: str,
    options: ExecutorOptions,
    adapters: AdapterLayers = NO_ADAPTERS,
    rank: TensorRank | None = None,
) -> Executor:
    """Load a stage from wherever `source` reads, with adapters beside it; neither is needed afterwards. A tensor rank
    loads its share of both, and gives logits of its part of the vocabulary (see `tensor_stage`)."""
    refuse_foreign(spec)
    if adapters.names:
        refuse_adapters(backend, options.device)
    # Ranks have parts of the embedding each, and none has the rows that a picture replaces.
    pictures = None if rank is not None else _pictures(spec, source)
    if rank is not None:
        refuse_ranks(backend)
        number = rank.group.rank
        source = RankTensors(source, spec, rank.split, number)
        adapters = rank_adapters(adapters, spec, rank.split, number)
        # A captured or compiled step cannot wait for other ranks.
        options = replace(options, use_graphs=False)
    return _run_by(backend, Decoder(spec, stage, source, adapters, rank, pictures), options)


def split_checkpoint(
    checkpoint: Checkpoint,
    weights: Sequence[float],
    *,
    form: str = "native",
    exchange: Exchange = "reduce",
    experts_by: ExpertCut | None = None,
    grid: GridShape | None = None,
) -> TensorSplit:
    """The shares of tensor ranks of these weights (speeds), cut where the matrices' blocks end."""
    block = column_block(checkpoint.layout, checkpoint.tensors.entries, form)
    return split_tensors(
        checkpoint.spec, weights, block=block, exchange=exchange, experts_by=experts_by, grid=grid
    )


def refuse_ranks(backend: str) -> None:
    """UnsupportedModelError where a backend cannot stop within a layer, to meet other ranks."""
    if backend not in RANKED_BACKENDS:
        raise UnsupportedModelError(
            f"{backend} computes layers whole: tensor ranks cannot meet within one",
            hint=f"use --backend {' or '.join(RANKED_BACKENDS)}, or cut the model into stages only",
        )


def _pictures(spec: ModelSpec, source: TensorSource) -> PictureNetwork | None:
    if spec.vision is None:
        return None
    from shardcompute.models.vision.tower import VisionTower

    return VisionTower(spec, spec.vision, source)


def refuse_adapters(backend: str, device: str) -> None:
    """UnsupportedModelError where adapters cannot be kept beside what computes."""
    if holding_of(backend, device) not in ADAPTING_HOLDERS:
        raise UnsupportedModelError(
            f"adapters beside a model are computed by onnx and numpy on CPUs and by torch on CPUs and CUDA, not by "
            f"{backend} on {device}",
            hint="compute on the CPU with --device cpu --backend onnx, or put one adapter into 16-bit safetensors "
            "weights with --merge-adapter, which every device and backend takes",
        )


def build_head_drafter(
    spec: ModelSpec,
    source: TensorSource,
    weights: DraftHeadWeights,
    *,
    backend: str,
    options: ExecutorOptions,
) -> HeadDrafter:
    """What drafts on from the final states of a last stage on this backend; `source` has the model's head and
    embedding, `options.kv_bytes` is for its memory of sessions. UnsupportedModelError where the backend gives no such
    states. Rows of the embedding are read where they are stored, if they can be: few are, one for each token."""
    rows = min(options.max_rows, DRAFT_HEAD_ROWS)
    limits = HeadDraftLimits(options.context_length, max_rows=options.max_logit_rows, step_rows=rows)
    options = replace(options, max_rows=rows, max_logit_rows=min(options.max_logit_rows, rows))
    network, embedding = build_draft_network(spec, source, weights, backend=backend, options=options)
    return HeadDrafter(
        network,
        weights.ids,
        embedding,
        limits,
        vocab_size=spec.vocab_size,
        embedding_scale=spec.embedding_scale,
    )


def build_draft_network(
    spec: ModelSpec,
    source: TensorSource,
    weights: DraftHeadWeights,
    *,
    backend: str,
    options: ExecutorOptions,
) -> tuple[Executor, StoredRows]:
    """A draft head's network on this backend, and the embedding of the tokens that it knows. UnsupportedModelError
    where the backend gives no states to draft from."""
    if not can_draft(spec, backend):
        raise refuse_final_rows("transformers" if is_fallback(spec) else backend)
    head = rows_of(source.matrix("head"), weights.ids)
    if isinstance(head, DenseMatrix):
        # All of it is read for every drafted token, which is only a guess.
        head = convert(head, "int8")
    stored = source.stored_rows("embedding") if isinstance(source, StoredTables) else None
    embedding: StoredRows
    if stored is not None:
        embedding = ChosenRows(stored, weights.ids)
    else:
        embedding = HeldRows(rows_of(source.matrix("embedding"), weights.ids))
    return _run_by(backend, DraftHeadNetwork(spec, weights, head), options), embedding


def can_draft(spec: ModelSpec, backend: str) -> bool:
    """Whether a last stage of this model on this backend can have a draft head."""
    return backend in DRAFTING_BACKENDS and not is_fallback(spec)


def _run_by(backend: str, network: Network, options: ExecutorOptions) -> Executor:
    if backend == "onnx":
        from shardcompute.backends.ort import OrtExecutor

        return OrtExecutor(network, options)
    if backend == "numpy":
        from shardcompute.backends.host.numpy_ops import NumpyExecutor

        return NumpyExecutor(network, options)
    if backend == "torch":
        if importlib.util.find_spec("torch") is None:
            raise BackendError("the torch backend needs torch", hint="pip install 'shardcompute[torch]'")
        with phase("importing torch"):
            from shardcompute.backends.torch import TorchExecutor

        return TorchExecutor(network, options)
    if backend == "mlx":
        if importlib.util.find_spec("mlx") is None:
            raise BackendError("the mlx backend needs mlx", hint=_mlx_hint(sys.platform, platform.machine()))
        from shardcompute.backends.mlx import MlxExecutor

        return MlxExecutor(network, options)
    if backend == "transformers":
        raise UsageError(
            "transformers is no backend for the layers of models that we know",
            hint="leave --backend away: models that only transformers can run use it by themselves",
        )
    raise UsageError(f"there is no backend {backend!r}", hint=f"use one of {', '.join(BACKENDS)}")


def _mlx_hint(system: str, machine: str) -> str:
    if system == "linux" or (system == "darwin" and machine == "arm64"):
        return "pip install 'shardcompute[mlx]'"
    return "there is no mlx for this machine: it runs on Apple silicon and, slowly, on Linux; leave --backend away"
