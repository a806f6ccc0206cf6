"""Local service: opens a model in this process and serves it, to a caller line by line or to the API."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from shardcompute.backends.cpu_choice import CpuBackendChoice
from shardcompute.backends.executor import Executor, ExecutorOptions, rows_of_step
from shardcompute.backends.processor import default_threads
from shardcompute.core.closing import Closing
from shardcompute.core.errors import CapacityError, ShardComputeError, UnknownModelError, UsageError
from shardcompute.core.generation import Delta, GenerationRequest
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, VisionSpec, cut_layers
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.driver.driver import Driver
from shardcompute.node.driver.generation import DeltaStream
from shardcompute.node.driver.limits import AUTO, ChainShape, DriverLimits
from shardcompute.node.local.chain import LocalChain
from shardcompute.node.local.shared_stage import SharedStage
from shardcompute.node.service import ServedModel, ServiceLoad, with_adapters
from shardcompute.runtime.fallback import fallback_remark, speculation_for
from shardcompute.runtime.shard import open_shard
from shardcompute.runtime.stage import StageRuntime
from shardcompute.weights.checkpoint import Checkpoint, adapted, open_checkpoint
from shardcompute.weights.served import content_of
from shardcompute.weights.sources.progress import Progress
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import ModelFiles, resolve

log = logging.getLogger(__name__)
_KV_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is run in this process. None: chosen from what the machine has."""

    backend: str = "onnx"
    form: str = "native"
    device: str = "cpu"
    threads: int | None = None
    context_length: int | None = None
    kv_bytes: int | None = None
    stages: int = 1
    max_sessions: int = 16
    use_graphs: bool = True
    free_bytes: int | None = None
    """Memory that is free on the device; None: it computes in the machine's own."""
    kv_type: KvType = DEFAULT_KV_TYPE
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of adapters that are kept beside the model, by name."""
    merged_adapter: Path | None = None
    """Folder of an adapter that is merged into its weights."""
    choose_backend: Callable[[Checkpoint, str, int], CpuBackendChoice] | None = None
    """What computes a model in a form with so many threads, where nobody named a backend; None: `backend`."""
    shares: SharedStage | None = None
    """Layers that are computed on shares, as a stage of their own; None: all are computed here."""


class LocalService(Closing):
    """One model in this process. Leaving the block stops its thread and frees it."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        driver: Driver,
        chain: LocalChain,
        *,
        remark: str = "",
        adapters: Sequence[str] = (),
    ) -> None:
        self._model = model
        self.remark = remark
        """What whoever opened it should know of how it is run."""
        self.name = model.name
        self.adapters = tuple(adapters)
        self.tokenizer = tokenizer
        self.driver = driver
        self._chain = chain

    # For a caller in this process

    def stream(self, request: GenerationRequest) -> Iterator[Delta]:
        """Deltas until one has a finish; closing the iterator cancels the generation."""
        deltas: queue.SimpleQueue[Delta | ShardComputeError] = queue.SimpleQueue()
        generation = self.driver.submit(request, deltas.put)
        try:
            while True:
                delta = deltas.get()
                if isinstance(delta, ShardComputeError):
                    raise delta
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.driver.cancel(generation)

    # For the API (see `node.service.Service`)

    def models(self) -> Sequence[ServedModel]:
        return with_adapters([(self._model, self.adapters)])

    def codec(self, model: str) -> Tokenizer:
        self._adapter_of(model)
        return self.tokenizer

    def is_ready(self) -> bool:
        return True

    def obstacle(self) -> CapacityError | None:
        return None

    def load(self) -> ServiceLoad:
        load = self.driver.load()
        fraction = min(1.0, load.used_tokens / max(1, load.capacity_tokens))
        return ServiceLoad(load.running, load.waiting, fraction, routers={"local": self.driver.speculation()})

    async def generate(self, model: str, request: GenerationRequest) -> AsyncIterator[Delta]:
        request = replace(request, adapter=self._adapter_of(model))
        deltas = DeltaStream()
        generation = self.driver.submit(request, deltas.emit)
        try:
            async for delta in deltas:
                yield delta
        finally:
            self.driver.cancel(generation)

    def _adapter_of(self, model: str) -> str:
        """The adapter that a name asks for, "" for the model itself; UnknownModelError for other names."""
        if model in (self.name, "default"):
            return ""
        base, _, adapter = model.rpartition(":")
        if base in (self.name, "default") and adapter in self.adapters:
            return adapter
        known = ", ".join(repr(each.name) for each in self.models())
        raise UnknownModelError(f"the model {model!r} is not served here", hint=f"use {known}")

    def close(self) -> None:
        self.driver.close()
        self._chain.close()


def open_model(
    reference: str, settings: Settings, options: EngineOptions, progress: Progress | None = None
) -> LocalService:
    """Fetch what is missing, load the model and start its engine."""
    files = resolve(parse_reference(reference), settings, progress)
    opened = open_checkpoint(files, is_fallback=options.backend == "transformers")
    with adapted(opened, options.adapters, options.merged_adapter) as checkpoint:
        options = _settled(checkpoint, options, settings)
        spec, tokenizer = checkpoint.spec, checkpoint.tokenizer()
        executor_options = _executor_options(options, settings, spec.context_length)

        def open_stage(stage: Stage, share: ExecutorOptions) -> Executor:
            if options.shares is not None:
                shared = options.shares.open(checkpoint, stage, options.form, share)
                if shared is not None:
                    return shared
            return open_shard(
                checkpoint, stage=stage, backend=options.backend, form=options.form, options=share
            )

        names = tuple(adapter.name for adapter in checkpoint.adapters)
        cuts = _cuts(checkpoint.name, spec.layer_count, options)
        stages = _open_stages(tokenizer, cuts, executor_options, open_stage, names)
        model = _served(files, content_of(checkpoint), executor_options, spec.vision)
        limits = DriverLimits(
            spec.vocab_size,
            executor_options.context_length,
            max_sessions=options.max_sessions,
            speculation=speculation_for(spec, AUTO),
            vision=spec.vision,
        )
        return _start(model, tokenizer, limits, stages, executor_options, fallback_remark(spec), names)


def _settled(checkpoint: Checkpoint, options: EngineOptions, settings: Settings) -> EngineOptions:
    """With the backend that suits the model. Not every one adds what adapters add."""
    if options.choose_backend is None or checkpoint.adapters:
        return options
    choice = options.choose_backend(checkpoint, options.form, _threads(options, settings))
    log.info("%s is computed by %s: %s", checkpoint.name, choice.backend, choice.reason)
    return replace(options, backend=choice.backend)


def _threads(options: EngineOptions, settings: Settings) -> int:
    return options.threads or settings.threads or default_threads()


def _executor_options(options: EngineOptions, settings: Settings, longest: int) -> ExecutorOptions:
    max_rows, max_logit_rows = rows_of_step(options.backend, options.device)
    return ExecutorOptions(
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
        kv_bytes=options.kv_bytes or int((options.free_bytes or _host_free_bytes()) * _KV_FRACTION),
        context_length=min(options.context_length or 8192, longest),
        threads=_threads(options, settings),
        device=options.device,
        use_graphs=options.use_graphs,
        kv_type=options.kv_type,
    )


def _cuts(name: str, layers: int, options: EngineOptions) -> list[Stage]:
    if options.shares is not None:
        return options.shares.cut(layers)
    if not 1 <= options.stages <= layers:
        raise UsageError(
            f"{name} has {layers} layers and cannot be cut into {options.stages} stages",
            hint=f"use 1 to {layers} stages",
        )
    return cut_layers(layers, options.stages)


def _open_stages(
    tokenizer: Tokenizer,
    cuts: Sequence[Stage],
    options: ExecutorOptions,
    open_stage: Callable[[Stage, ExecutorOptions], Executor],
    adapters: Sequence[str],
) -> list[StageRuntime]:
    """The model in these stages, each loaded; KV memory is shared out by their layers."""
    runtimes = []
    for stage in cuts:
        share = replace(options, kv_bytes=options.kv_bytes * stage.count // cuts[-1].stop)
        runtimes.append(
            StageRuntime(
                open_stage(stage, share),
                is_first=stage.is_first,
                is_last=stage.is_last,
                vocabulary=tokenizer.vocabulary,
                max_rows=options.max_rows,
                max_logit_rows=options.max_logit_rows,
                adapters=adapters,
            )
        )
    return runtimes


def _served(
    files: ModelFiles, digest: str, options: ExecutorOptions, vision: VisionSpec | None
) -> ServedModel:
    return ServedModel(
        files.name, options.context_length, int(time.time()), digest, files.total_bytes, vision=vision
    )


def _start(
    model: ServedModel,
    tokenizer: Tokenizer,
    limits: DriverLimits,
    stages: list[StageRuntime],
    executor_options: ExecutorOptions,
    remark: str,
    adapters: Sequence[str],
) -> LocalService:
    driver = Driver(tokenizer, limits)
    chain = LocalChain(stages, driver)
    capacity = min(stage.kv_usage().free_tokens for stage in stages)
    driver.connect(
        chain,
        ChainShape(
            capacity,
            max_rows=executor_options.max_rows,
            max_logit_rows=executor_options.max_logit_rows,
            can_continue=len(stages) == 1 and stages[0].can_continue,
        ),
    )
    return LocalService(model, tokenizer, driver, chain, remark=remark, adapters=adapters)


def _host_free_bytes() -> int:
    return int(psutil.virtual_memory().available)
