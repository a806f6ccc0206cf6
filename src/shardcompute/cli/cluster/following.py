"""Progress of loading and draining: waits until a cluster has done what it was asked, and shows how far it has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardcompute.core.errors import CancelledError, CapacityError, SourceError, rebuild_error
from shardcompute.node.admin.views import ClusterView, FetchView, ModelView
from shardcompute.weights.sources.progress import Progress


@dataclass(frozen=True, slots=True)
class Step:
    """What is being waited for now."""

    label: str
    done_bytes: int = 0
    total_bytes: int | None = None


class _Tasks:
    """Steps as tasks of a progress: a new label begins a new one."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step: Step | None = None

    def show(self, step: Step) -> None:
        last = self._step
        if last is None or (last.label, last.total_bytes) != (step.label, step.total_bytes):
            self.finish()
            self._progress.start(step.label, step.total_bytes)
            last = Step(step.label)
        if step.done_bytes != last.done_bytes:
            self._progress.advance(step.done_bytes - last.done_bytes)
        self._step = step

    def finish(self) -> None:
        if self._step is not None:
            self._progress.finish()
            self._step = None


def follow_load(states: Iterable[ClusterView], order: FetchView, progress: Progress) -> ModelView:
    """The model once it is served as ordered; raises what kept it from being."""
    tasks = _Tasks(progress)
    was_there = False
    for state in states:
        fetch = next((each for each in state.fetches if each.model == order.model), None)
        if fetch is not None:
            if fetch.status == "failed":
                raise rebuild_error(fetch.error_kind, fetch.error)
            tasks.show(Step(fetch.doing, fetch.done_bytes, fetch.total_bytes))
            continue
        model = next((each for each in state.models if each.name == order.name), None)
        if model is None or model.wanted_chains == 0:
            if was_there:
                raise CancelledError(f"{order.name} was unloaded meanwhile")
            continue
        if (model.weight_form, model.wanted_chains) != (order.form, order.chains):
            continue
        was_there = True
        if _is_settled(model):
            tasks.finish()
            return model
        tasks.show(_loading_step(state, model))
    raise SourceError(f"the cluster stopped before {order.name} was served", hint="start it again")


def _is_settled(model: ModelView) -> bool:
    """Served in full, or in part where the rest does not fit; raises where nothing fits."""
    if model.status == "unservable":
        raise CapacityError(
            f"{model.name} does not fit the machines there are: {'; '.join(model.reasons)}",
            hint="it will be served once more machines have joined; shardcompute unload takes it back",
        )
    is_whole = model.ready_chains >= model.wanted_chains
    return model.status == "serving" and (is_whole or model.missing_bytes > 0)


def _loading_step(state: ClusterView, model: ModelView) -> Step:
    stages = [stage for chain in state.chains if chain.model == model.name for stage in chain.stages]
    nodes = len({stage.node for stage in stages})
    return Step(
        f"loading onto {nodes} machine{'' if nodes == 1 else 's'}",
        round(sum(stage.memory_bytes * stage.fraction for stage in stages)),
        sum(stage.memory_bytes for stage in stages) or None,
    )


def follow_drain(states: Iterable[ClusterView], node: str, progress: Progress) -> str:
    """The node's last status, once it has left or is lost."""
    tasks = _Tasks(progress)
    most_bytes = 0
    for state in states:
        view = next((each for each in state.nodes if each.id == node), None)
        if view is None or view.status in ("gone", "lost"):
            tasks.finish()
            return "gone" if view is None else view.status
        most_bytes = max(most_bytes, view.used_bytes)
        layers = sum(held.stop - held.start for held in view.layers)
        label = f"moving {layers} layer{'' if layers == 1 else 's'} off {view.name}"
        tasks.show(Step(label, most_bytes - view.used_bytes, most_bytes or None))
    raise SourceError("the cluster stopped before the node was empty", hint="start it again")
