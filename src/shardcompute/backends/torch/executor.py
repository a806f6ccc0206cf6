"""Executor for torch: eagerly on CPUs and Apple GPUs, by our kernels and CUDA graphs on CUDA devices.

On a CUDA device a step is launched and not waited for, tokens are picked where the logits are, and the next step of a
session may begin with a token that the host has not seen yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from shardcompute.backends.executor import (
    ComputedStep,
    ExecutorOptions,
    Network,
    PendingPicks,
    PendingStep,
    PickRule,
)
from shardcompute.backends.host.eager_tower import EagerTower
from shardcompute.backends.host.pictures import Encode, SessionPictures
from shardcompute.backends.kv import MovableSessions
from shardcompute.backends.matrix import Array, Float32
from shardcompute.backends.torch.device import can_fuse, choose_device, choose_dtype
from shardcompute.backends.torch.kv import PagedKv
from shardcompute.backends.torch.ops import TorchOps
from shardcompute.backends.torch.picked import DevicePicks, LastPicks
from shardcompute.backends.torch.picking import can_draw
from shardcompute.backends.torch.plan import StepPlan, plan_step
from shardcompute.backends.torch.steps import Computed, reordered
from shardcompute.backends.torch.transfers import Download, upload
from shardcompute.core.batch import Segment, count_rows
from shardcompute.core.errors import UsageError
from shardcompute.core.phases import phase
from shardcompute.core.pictures import PictureSpan
from shardcompute.core.steps import PICKED


class TorchExecutor(MovableSessions[PagedKv]):
    """See Executor. `use_library` leaves matrix products to torch's library, for comparison."""

    def __init__(self, network: Network, options: ExecutorOptions, *, use_library: bool = False) -> None:
        self._network = network
        self._max_rows = options.max_rows
        self._device = choose_device(options.device)
        self._dtype = choose_dtype(options.dtype, self._device)
        if self._device.type == "cpu":
            torch.set_num_threads(options.threads)
        with phase("opening the device"):
            self._kv = PagedKv(
                network.layer_count,
                network.kv_shape,
                context_length=options.context_length,
                budget_bytes=options.kv_bytes,
                dtype=self._dtype,
                device=self._device,
            )
            self._ops: TorchOps
            self._ops, self._last, self._graphs = self._choose_ops(options, use_library)
        self._normed: torch.Tensor | None = None
        self._final: torch.Tensor | None = None
        self._rows: Sequence[tuple[slice, torch.Tensor]] = ()
        """Of pictures, in the step that is computed."""
        with torch.inference_mode():
            self._load_weights(network)
            self._pictures: SessionPictures = self._open_pictures(network, options.context_length)
            if self._graphs is not None:
                self._graphs.capture(self._max_rows)

    def _load_weights(self, network: Network) -> None:
        ops = self._ops
        with phase("weights of the ends"):
            self._shared = network.load_shared(ops)
            self._embedding = network.load_embedding(ops) if network.is_first else None
            self._head = network.load_head(ops) if network.is_last else None
        self._layers: list[Any] = []
        with phase("weights of layers"):
            for layer in range(network.layer_count):
                self._layers.append(network.load_layer(ops, layer))
                if self._graphs is not None and layer == 0:
                    # Layers are mostly alike: their kernels are compiled while the others are fetched.
                    self._graphs.compile_ahead(
                        partial(self._forward, layers=tuple(self._layers)), self._max_rows
                    )

    def _open_pictures(self, network: Network, context_length: int) -> SessionPictures:
        encode: Encode | None = None
        if network.pictures is not None and network.is_first:
            # Primitives of its own, and a stream: pictures are encoded while steps are computed.
            tower = EagerTower(
                network.pictures, TorchOps(self._kv, context_length, self._device, self._dtype)
            )
            stream: Any = nullcontext()
            if self._device.type == "cuda":
                stream = torch.cuda.stream(torch.cuda.Stream(self._device))
                torch.cuda.synchronize(self._device)

            def encode(span: PictureSpan, patches: bytes) -> Float32:
                with torch.inference_mode(), stream:
                    return tower.encode(span, patches)

        return SessionPictures(
            network.pictures, encode, max_rows=self._max_rows, context_length=context_length
        )

    @property
    def is_asynchronous(self) -> bool:
        return bool(self._device.type == "cuda")

    @property
    def can_pick(self) -> bool:
        return self.is_asynchronous and self._network.is_last

    @property
    def graph_bytes(self) -> int:
        """Device memory that captured graphs keep."""
        return 0 if self._graphs is None else int(self._graphs.held_bytes)

    def launch(
        self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False
    ) -> PendingStep:
        self._check(segments, inputs)
        plan = self._plan(segments)
        self._last.forget(segment.session for segment in segments)
        computed = self._compute(plan, self._to_tensor(inputs), keeps_hidden=keeps_hidden)
        if self.is_asynchronous:
            return Download(computed.result)
        return ComputedStep(computed.result.cpu().numpy())

    def launch_picks(
        self,
        segments: Sequence[Segment],
        inputs: Array,
        rules: Sequence[PickRule | None],
        *,
        keeps_hidden: bool = False,
    ) -> PendingPicks:
        self._check(segments, inputs, lowest=PICKED)
        rules = [None if rule is None or not can_draw(rule) else rule for rule in rules]
        continued = self._last.place_ids(segments, inputs) if self._network.is_first else inputs
        plan = self._plan(segments)
        slots = self._last.take(segments, rules)
        computed = self._compute(plan, self._to_tensor(continued), slots, keeps_hidden=keeps_hidden)
        with torch.inference_mode():
            return DevicePicks(computed, rules, slots, self._last)

    def can_continue(self, session: int, position: int) -> bool:
        """Whether the device knows the token of a session at `position`."""
        return self._last.knows(session, position)

    def step(self, segments: Sequence[Segment], inputs: Array, *, keeps_hidden: bool = False) -> Array:
        return self.launch(segments, inputs, keeps_hidden=keeps_hidden).wait()

    def hidden_rows(self) -> Array:
        rows: Array = self.hidden_tensor().cpu().numpy()
        return rows

    def hidden_tensor(self) -> torch.Tensor:
        """`hidden_rows` where they were computed: on the device, not waited for."""
        if self._normed is None:
            raise UsageError("the last step kept no hidden states")
        return self._normed.float()

    def final_rows(self) -> Array:
        rows: Array = self.final_tensor().cpu().numpy()
        return rows

    def final_tensor(self) -> torch.Tensor:
        """`final_rows` where they were computed."""
        if self._final is None:
            raise UsageError("the last step kept no final states")
        return self._final.float()

    def step_tensor(
        self, segments: Sequence[Segment], inputs: torch.Tensor, *, keeps_hidden: bool = False
    ) -> torch.Tensor:
        """`step` on tensors: the result stays on the device, is not waited for, and holds until the next step."""
        return self._compute(self._plan(segments), inputs, keeps_hidden=keeps_hidden).result

    def needs_encoding(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> bool:
        # Nobody has tried two threads on an Apple GPU.
        return self._device.type != "mps" and self._pictures.needs_encoding(spans, patches)

    def encode_pictures(self, spans: Sequence[PictureSpan], patches: Sequence[bytes]) -> None:
        self._pictures.encode(spans, patches)

    def continue_tensor(
        self,
        starts: Sequence[tuple[int, int]],
        ids: torch.Tensor,
        steps: int,
        choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """So many steps of one row for each of these sessions (number, position of its next row), of a whole model.
        `choose` makes of a step's logits and final states the ids of the next. Nothing is waited for, and what there
        is to plan is planned once."""
        self._kv.take([Segment(session, start, steps, 1) for session, start in starts])
        plan = plan_step([Segment(session, start, 1, 1) for session, start in starts], self._kv)
        with torch.inference_mode():
            self._rows = ()
            self._ops.begin(plan)
            for step in range(steps):
                if step:
                    self._ops.advance()
                computed = self._forward(ids, None)
                assert computed.final is not None
                ids = choose(computed.result, computed.final)

    def close_session(self, session: int) -> None:
        super().close_session(session)
        self._last.forget([session])

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._layers.clear()
        self._embedding = self._head = self._shared = self._normed = self._final = None

    def _check(self, segments: Sequence[Segment], inputs: Array, lowest: int = 0) -> None:
        rows = count_rows(segments)
        expected = (rows,) if self._network.is_first else (rows, self._network.hidden)
        if inputs.shape != expected or rows > self._max_rows:
            raise UsageError(
                f"a step of {rows} rows (at most {self._max_rows}) got inputs of shape {inputs.shape}"
            )
        if self._network.is_first and not lowest <= inputs.min() <= inputs.max() < self._network.vocab_size:
            # A CUDA device that meets such an id is lost to its whole process.
            raise UsageError(f"token ids must lie in [0, {self._network.vocab_size})")

    def _to_tensor(self, inputs: Array) -> torch.Tensor:
        kind = np.int64 if self._network.is_first else np.float32
        return torch.from_numpy(np.array(inputs, dtype=kind))

    def _plan(self, segments: Sequence[Segment]) -> StepPlan:
        """Make room for a step. What cannot be done is refused here, before anything changes."""
        self._pictures.check(segments)
        self._kv.take(segments)
        plan = plan_step(segments, self._kv)
        return self._seeing(plan) if self._pictures.are_in(segments) else plan

    def _seeing(self, plan: StepPlan) -> StepPlan:
        """With what pictures do to the positions and sights of rows."""
        ends = [self._pictures.ends(segment) for segment in plan.segments]
        joined = None
        if any(each is not None for each in ends):
            joined = plan.positions + 1
            starts = np.cumsum([0, *(segment.count for segment in plan.segments)])
            for start, each in zip(starts, ends, strict=False):
                if each is not None:
                    joined[start : start + len(each)] = each
        return replace(plan, turns=self._pictures.positions(plan.segments).astype(np.int32), ends=joined)

    def _compute(
        self, plan: StepPlan, inputs: torch.Tensor, slots: Sequence[int] = (), *, keeps_hidden: bool = False
    ) -> Computed:
        with torch.inference_mode():
            if plan.order is not None:
                inputs = inputs[torch.from_numpy(plan.order).to(inputs.device, torch.int64)]
            self._rows = ()
            if plan.turns is not None:
                placed = self._pictures.rows(plan.segments)
                self._rows = [(place, self._ops.upload(rows)) for place, rows in placed]
            computed = None
            # Graphs know no rows of pictures.
            if self._graphs is not None and plan.ends is None and not self._rows:
                computed = self._graphs.run(plan, inputs, slots)
            if computed is None:
                self._ops.begin(plan)
                computed = self._last.note(self._forward(upload(inputs, self._device), None), slots)
            computed = computed.first(plan.rows, len(plan.logit_rows))
            self._normed = self._final = None
            if computed.final is None:
                return replace(computed, result=reordered(computed.result, plan.order))
            if keeps_hidden:
                self._normed, self._final = computed.normed, reordered(computed.final, plan.order)
            return computed

    def _choose_ops(self, options: ExecutorOptions, use_library: bool) -> tuple[TorchOps, LastPicks, Any]:
        sessions = self._kv.budget.total_pages
        if not can_fuse(self._device):
            ops = TorchOps(self._kv, options.context_length, self._device, self._dtype)
            return ops, LastPicks(sessions, self._device), None
        from shardcompute.backends.torch.fused import FusedOps
        from shardcompute.backends.torch.graphs import GraphedSteps

        fused = FusedOps(self._kv, options.context_length, self._device, self._dtype, use_library=use_library)
        last = LastPicks(sessions, self._device, fused.token_kernels)
        fused.picked = last.tokens
        if not options.use_graphs:
            return fused, last, None
        width = None if self._network.is_first else self._network.hidden
        steps = GraphedSteps(fused, self._kv, self._forward, width, self._dtype, unused_slot=last.unused)
        return fused, last, steps

    def _forward(
        self, inputs: torch.Tensor, slots: torch.Tensor | None, layers: Sequence[Any] | None = None
    ) -> Computed:
        """`slots` say where the best token of each logit row is kept, in a graph. Through all layers, or these."""
        network, ops = self._network, self._ops
        x = ops.accept(inputs)
        if network.is_first:
            x = network.embed(ops, self._embedding, self._last.filled(x))
            for place, rows in self._rows:
                x[place] = rows
        for i, weights in enumerate(self._layers if layers is None else layers):
            x = network.layer(ops, self._shared, weights, i, x)
        if not network.is_last:
            return Computed(ops.finish(x))
        normed = ops.computed(network.normed(ops, self._head, x))
        logits = ops.finish(network.head(ops, self._head, normed))
        computed = Computed(logits, normed, final=ops.computed(x))
        return computed if slots is None else self._last.note(computed, slots)
