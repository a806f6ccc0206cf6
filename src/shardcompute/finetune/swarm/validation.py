"""What a stage checks of the orders it gets, before they cost memory or time: a driver may be mistaken, or no friend.

Everything here looks at numbers only. `UsageError` where an order can never be carried out, `LinkError` where what came
contradicts itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardcompute.backends.matrix import Float32
from shardcompute.core.errors import LinkError, UsageError
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.plan import FinetunePlan, check_finetune_plan
from shardcompute.finetune.swarm.frames import ApplyStep, LearnStep, OpenStage, RowFacts, unpack_batch
from shardcompute.models.layout import Layout
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.wire import find_codec

_HINT = "run one release on all nodes"
_MOST_HELD_OUT = 1 << 16
"""Batches that one order may have looked at."""


def check_opening(order: OpenStage) -> OpenStage:
    """What can be known of it without the model."""
    check_finetune_plan(order.plan)
    if not all(0 <= each < 1 for each in order.plan.betas) or order.plan.epsilon <= 0:
        raise UsageError("the optimiser's numbers make no sense", hint="use betas from 0 up to 1")
    if not 0 <= order.place < order.stages:
        raise UsageError(f"there is no stage {order.place} of {order.stages}", hint=_HINT)
    if order.start >= order.stop:
        raise UsageError(f"layers {order.start} to {order.stop} are none", hint=_HINT)
    if (order.place > 0) != bool(order.previous) or (order.place + 1 < order.stages) != bool(order.next):
        raise UsageError(f"stage {order.place} of {order.stages} has other neighbours", hint=_HINT)
    nodes = [each.node for each in order.copies]
    if len(set(nodes)) < len(nodes) or order.copy >= max(1, len(nodes)):
        raise UsageError(f"there is no copy {order.copy} of {len(nodes)}", hint=_HINT)
    find_codec(order.codec)
    return order


def check_stage(order: OpenStage, spec: ModelSpec, layout: Layout) -> Stage:
    """The layers of an order, and that what it adapts are maps of these."""
    if order.stop > spec.layer_count:
        raise UsageError(f"{order.model} has {spec.layer_count} layers, not {order.stop}", hint=_HINT)
    stage = Stage(order.start, order.stop, spec.layer_count)
    is_end = (order.place == 0) == stage.is_first and (order.place + 1 == order.stages) == stage.is_last
    if not is_end:
        raise UsageError(f"layers {stage.start} to {stage.stop} are not stage {order.place}", hint=_HINT)
    if len({module.name for module in order.modules}) != len(order.modules):
        raise UsageError("a map is to be adapted twice", hint=_HINT)
    for each in order.modules:
        here = layout.layers[each.layer] if stage.start <= each.layer < stage.stop else {}
        module = each.module
        shapes = [here[name].shape if name in here else () for name, _ in module.places]
        is_map = bool(shapes) and all(len(shape) == 2 and shape[1] == module.width_in for shape in shapes)
        if not is_map or not sum(shape[0] for shape in shapes) <= module.width_out <= _most_rows(layout):
            raise UsageError(
                f"{each.name[:80]!r} is no map of layers {stage.start} to {stage.stop}", hint=_HINT
            )
    return stage


def _most_rows(layout: Layout) -> int:
    """No stored map of a layer has more rows than all its maps together."""
    return max(sum(place.shape[0] for place in layer.values() if place.shape) for layer in layout.layers)


def unpack_step(
    order: LearnStep, plan: FinetunePlan, vocab_size: int, *, is_learned: bool
) -> list[MicroBatch]:
    """The micro-batches of an order, no larger than the memory that was reserved for them."""
    most = plan.micro_batches if is_learned else _MOST_HELD_OUT
    if len(order.batches) > most:
        raise LinkError(f"{len(order.batches)} micro-batches came, of {most} at most", hint=_HINT)
    batches = [unpack_batch(each, vocab_size) for each in order.batches]
    numbers = [batch.key[1] for batch in batches]
    if numbers != sorted(set(numbers)) or any(number < 0 for number in numbers):
        raise LinkError("micro-batches are out of order", hint=_HINT)
    for batch in batches:
        if max(batch.lengths) > plan.longest or len(batch.lengths) > plan.batch:
            raise LinkError(
                f"a micro-batch of {len(batch.lengths)} examples of up to {max(batch.lengths)} tokens came, "
                f"where {plan.batch} of {plan.longest} were planned for",
                hint=_HINT,
            )
    return batches


def check_apply(order: ApplyStep, plan: FinetunePlan) -> ApplyStep:
    if not 0 <= order.step < plan.steps or not 0 <= order.scale <= 1:
        raise LinkError(f"step {order.step} cannot be applied times {order.scale:g}", hint=_HINT)
    return order


def check_rows(facts: RowFacts, kind: str, expected: str, hidden: int, plan: FinetunePlan) -> None:
    """Rows that a neighbour sends: of the kind that it may, as wide as the model and no more than planned for."""
    if kind != expected or facts.width != hidden or facts.rows > plan.batch * plan.longest:
        raise LinkError(
            f"{facts.rows} × {facts.width} {kind[:20]!r} came where {expected!r} of {hidden} were expected",
            hint=_HINT,
        )


def check_taken(taken: Mapping[str, Float32], parameters: int) -> None:
    """State that came so far: what is learned and two moments, and not more."""
    if sum(math.prod(values.shape) for values in taken.values()) > 3 * parameters:
        raise LinkError("more state came than this stage has", hint=_HINT)
