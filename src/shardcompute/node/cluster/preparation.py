"""Preparing models: what serving one takes, opened and made before anybody hears of it, and what drivers are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardcompute.backends.cpu_choice import ONNX, CpuBackendChoice
from shardcompute.control import ClusterState
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.core.generation import Speculation
from shardcompute.decoding.drafting import Drafter
from shardcompute.models.families import is_fallback
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.cluster.options import ClusterOptions
from shardcompute.node.driver.pool import PoolModel
from shardcompute.node.rpc.commands import OfferedModel
from shardcompute.node.weights.draft_heads import draft_head_attachments
from shardcompute.runtime.fallback import check_form, config_attachment, speculation_for
from shardcompute.weights.adapter_pack import adapter_attachments
from shardcompute.weights.checkpoint import Checkpoint
from shardcompute.weights.gguf_stage import header_attachment
from shardcompute.weights.served import ServedWeights, attachments_of, content_of, prepare_served
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.tokenizer_pack import TOKENIZER, pack_tokenizer


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that can be served: its files opened, and whatever travels beside its weights made."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    served: ServedWeights
    drafters: Sequence[Drafter]
    has_draft_head: bool
    draft_head_problem: str = ""
    """Why one that is there is left out."""


def prepare_model(
    options: ClusterOptions, checkpoint: Checkpoint, form: str, progress: Progress | None = None
) -> PreparedModel:
    """Make ready what serving a model takes, for a cluster that may not run yet."""
    tokenizer = checkpoint.tokenizer()
    if is_fallback(checkpoint.spec):
        check_form(checkpoint.name, form)
    draft_heads, problem = draft_head_attachments(checkpoint, options.draft_heads)
    served = prepare_served(
        checkpoint,
        form,
        options.folder / "served",
        progress,
        attachments={
            **attachments_of(tokenizer),
            TOKENIZER: pack_tokenizer(checkpoint),
            **header_attachment(checkpoint.tensors),
            **config_attachment(checkpoint),
            **draft_heads,
            **adapter_attachments(checkpoint.adapters),
        },
    )
    drafters = options.open_drafters(tokenizer, checkpoint.spec.vocab_size)
    return PreparedModel(
        checkpoint, tokenizer, served, drafters, has_draft_head=bool(draft_heads), draft_head_problem=problem
    )


def pool_model(prepared: PreparedModel, context_length: int, speculation: Speculation) -> PoolModel:
    """What a driver knows of it."""
    checkpoint = prepared.checkpoint
    return PoolModel(
        checkpoint.name,
        prepared.tokenizer,
        checkpoint.spec.vocab_size,
        context_length,
        int(time.time()),
        content_of(checkpoint),
        checkpoint.files.total_bytes,
        speculation_for(checkpoint.spec, speculation),
        prepared.drafters,
        has_draft_head=prepared.has_draft_head,
        draft_head_problem=prepared.draft_head_problem,
        adapters=tuple(adapter.name for adapter in checkpoint.adapters),
        vision=checkpoint.spec.vision,
    )


def offered(model: PoolModel) -> OfferedModel:
    """What drivers in other processes are told of it."""
    return OfferedModel(
        name=model.name,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        created_s=model.created_s,
        digest=model.digest,
        size_bytes=model.size_bytes,
        speculation=model.speculation,
        has_draft_head=model.has_draft_head,
        adapters=model.adapters,
        vision=model.vision,
    )


def choose_backend(
    choose: Callable[[Checkpoint, str], CpuBackendChoice] | None,
    state: ClusterState,
    checkpoint: Checkpoint,
    form: str,
    parallel: Parallelism | None,
) -> CpuBackendChoice:
    """For the whole life of the model in this cluster, also over restarts: tokens must not depend on which machine
    goes on. llama.cpp only where every CPU that is here can run it."""
    if choose is None or is_fallback(checkpoint.spec):
        return CpuBackendChoice("", "")
    if checkpoint.adapters:
        return CpuBackendChoice(ONNX, "it adds what adapters add")
    if parallel is not None and parallel.tp > 1:
        return CpuBackendChoice(ONNX, "it can compute a part of every layer")
    served = state.models.get(checkpoint.name)
    if served is not None and served.is_wanted and served.model.weight_form == form:
        known = served.model
        if known.backend:
            return CpuBackendChoice(known.backend, known.backend_reason)
    choice = choose(checkpoint, form)
    if choice.backend == ONNX:
        return choice
    unable = [
        node.name
        for node in state.nodes.values()
        if node.can_work and node.is_live and node.device == "cpu" and node.backend == ONNX
        if node.alternative(choice.backend) is None
    ]
    if not unable:
        return choice
    return CpuBackendChoice(ONNX, f"{', '.join(sorted(unable)[:3])} cannot run llama.cpp")
