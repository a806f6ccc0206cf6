"""Model swap: which models have to give way to one that is to be served, and how they do without breaking an answer.

Whoever gives way takes no new requests, is waited for until its answers are finished (or for as long as there is
patience), and is dropped then. Where there is room for both nobody has to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardcompute.control.sizes import sizes_of, usual_holding
from shardcompute.control.state import ClusterState, Model
from shardcompute.core.errors import WouldReplaceError
from shardcompute.core.units import count_of, format_bytes
from shardcompute.node.admin.dry_run import plan_model

if TYPE_CHECKING:
    from shardcompute.node.cluster import Cluster
    from shardcompute.weights.sources.progress import Progress

PATIENCE_S = 120.0
"""So long answers may take to finish before what gives them is dropped."""
REPLACE_HINT = "send replace: true, and it takes their place once the answers that run are finished"
_RETIRED_WITHIN_S = 15.0
_LOOK_S = 0.1
Answering = Callable[[str], int]
"""How many requests a model is answering."""


def models_in_the_way(
    state: ClusterState, model: Model, now_s: float, answering: Answering
) -> tuple[str, ...]:
    """Those that `model` can only be served instead of: itself in another form, and as few others as make room for
    it. None of the others where even all of them would not."""
    former = state.models.get(model.name)
    is_reformed = former is not None and former.is_wanted and _form_of(former.model) != _form_of(model)
    # What was never ready answers nobody: smaller weights may be just what it needs.
    is_served = any(chain.used_stages for chain in state.live_chains(model.name))
    found = (model.name,) if is_reformed and is_served else ()
    others = [
        name
        for name, each in state.models.items()
        if each.is_wanted and name != model.name and state.live_chains(name)
    ]
    if not others or _fits(state, model, now_s):
        return found
    others.sort(key=lambda name: (answering(name), name))
    for names in (*((name,) for name in others), tuple(others)):
        if _fits(_without(state, names), model, now_s):
            return (*found, *names)
    return found


def _form_of(model: Model) -> tuple[str, str, str]:
    return model.weight_form, model.kv_type, model.adapters


def refusal(
    model: Model, names: Sequence[str], answering: Answering, holdings: Sequence[str] = ()
) -> WouldReplaceError:
    """What would be lost, for whoever has not said that it may."""
    told = [f"{_described(model, name)}, which is answering {_count(answering(name))}" for name in names]
    why = f"{model.name} needs {format_bytes(sizes_of(model).on(usual_holding(holdings)).total_bytes)} of memory"
    reason = (
        "" if tuple(names) == (model.name,) else f": {why}, and there is not enough beside what is served"
    )
    return WouldReplaceError(
        f"serving {model.name} ({model.weight_form}) would replace {' and '.join(told)}{reason}",
        hint=REPLACE_HINT,
    )


@contextlib.contextmanager
def given_way(
    cluster: Cluster,
    names: Sequence[str],
    successor: str,
    progress: Progress,
    *,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Within the block nobody is being answered by these models, and those called otherwise than their successor are
    served no more. Raises what `progress` raises where the swap is not wanted any longer; they serve on then."""
    pool = cluster.pool
    with contextlib.ExitStack() as stack:
        for name in names:
            pool.pause(name, successor)
            stack.callback(pool.resume, name)
        deadline_s = clock() + patience_s
        last = -1
        while (left := sum(map(pool.answering, names))) and clock() < deadline_s:
            if left != last:
                progress.start(f"waiting for {_count(left)} of {' and '.join(names)} to be finished", None)
            last = left
            progress.advance(0)
            time.sleep(_LOOK_S)
        former = pool.chains_of(successor)
        for name in names:
            if name != successor:
                cluster.drop(name)
        yield
        # A request that came now would be given to a chain that is about to go.
        deadline_s = clock() + _RETIRED_WITHIN_S
        while successor in names and former & pool.chains_of(successor) and clock() < deadline_s:
            time.sleep(_LOOK_S)


def _fits(state: ClusterState, model: Model, now_s: float) -> bool:
    return plan_model(state, model, 1, now_s).chains[0].is_possible


def _without(state: ClusterState, names: Sequence[str]) -> ClusterState:
    return replace(state, chains={id: each for id, each in state.chains.items() if each.model not in names})


def _described(model: Model, name: str) -> str:
    return f"{name} as it is served now" if name == model.name else name


def _count(requests: int) -> str:
    return count_of(requests, "request") if requests else "nothing"
