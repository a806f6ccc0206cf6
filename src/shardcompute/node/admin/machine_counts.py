"""How many machines of a size a model needs, in every form of weights: `plan --machines`, which asks no cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardcompute.backends.footprint import holding_of, process_bytes
from shardcompute.control.machine_count import Cuts, fewest_machines, held_by_ranks, least_room_bytes
from shardcompute.control.placement.parallelism import PIPELINE, Parallelism
from shardcompute.control.placement.rank_groups import check_ranks
from shardcompute.control.state import Model
from shardcompute.core.errors import UsageError
from shardcompute.core.kv_types import DEFAULT_KV_TYPE, KvType
from shardcompute.core.units import count_of, format_bytes
from shardcompute.node.admin.dry_run import size_up
from shardcompute.weights.checkpoint import Checkpoint

FORMS = ("native", "float32", "mixed", "int8", "int4")
BACKENDS = {"cpu": "onnx", "cuda": "torch", "mps": "torch", "mlx": "mlx"}
"""What computes on a kind of device where nobody names anything else."""
_OWN_MEMORY = frozenset({"cuda"})
"""Devices whose memory is not that of the process."""
_LEFT_TO_SYSTEM = 10
"""One part in so many of a machine's memory, or of a card's, is not counted on."""
_USUAL_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class MachineCount:
    """Of machines with `machine_bytes` each, of which a worker may have `offered_bytes`; `cuts` is None where they are
    too small for some layer, and `least_bytes` what a worker must have at least."""

    weights: str
    machine_bytes: int
    offered_bytes: int
    cuts: Cuts | None
    largest_bytes: int
    """What the fullest worker takes, with its process."""
    least_bytes: int
    ranks: int = 1
    """So many machines compute each cut together."""

    @property
    def count(self) -> int | None:
        return None if self.cuts is None else len(self.cuts) * self.ranks


@dataclass(frozen=True, slots=True)
class MachineCounts:
    """Of one model, for every form and size, in that order."""

    model: str
    layer_count: int
    device: str
    context: int
    kv_type: KvType
    counts: tuple[MachineCount, ...]

    def of(self, weights: str) -> tuple[MachineCount, ...]:
        return tuple(each for each in self.counts if each.weights == weights)


def count_machines(
    checkpoint: Checkpoint,
    sizes: Sequence[int],
    *,
    device: str = "cpu",
    kv_type: KvType = DEFAULT_KV_TYPE,
    context: int = _USUAL_CONTEXT,
    parallel: Parallelism = PIPELINE,
) -> MachineCounts:
    """From headers alone. Each machine keeps KV for one context of so many tokens, or what the model can. `parallel`:
    how many compute each layer together; UnsupportedModelError where the model cannot be divided so."""
    if device not in BACKENDS:
        raise UsageError(f"there is no kind of device {device!r}", hint=f"use one of {', '.join(BACKENDS)}")
    context = min(context, checkpoint.spec.context_length)
    counts = []
    for form in FORMS:
        model = size_up(checkpoint, form, kv_tokens=context, context_length=context, kv_type=kv_type)
        check_ranks(model, parallel)
        counts += [_count(model, form, device, size, parallel) for size in sizes]
    return MachineCounts(
        checkpoint.name, checkpoint.spec.layer_count, device, context, kv_type, tuple(counts)
    )


def count_rows(counts: MachineCounts, weights: str) -> Iterator[tuple[str, str]]:
    """As a table of names and words: every form, and how the wanted one is cut."""
    yield "model", f"{counts.model}, {counts.layer_count} layers"
    for form in FORMS:
        yield form, "; ".join(_words(each) for each in counts.of(form))
    for each in counts.of(weights):
        if each.cuts is not None:
            yield f"{weights}, {format_bytes(each.machine_bytes)}", _cut_words(each)
    yield "counted", _counted_words(counts)


def _count(model: Model, form: str, device: str, machine_bytes: int, parallel: Parallelism) -> MachineCount:
    backend = BACKENDS[device]
    holding = holding_of(backend, device)
    own_bytes = 0 if device in _OWN_MEMORY else process_bytes(backend)
    offered_bytes = machine_bytes - machine_bytes // _LEFT_TO_SYSTEM
    cuts = fewest_machines(model, holding, offered_bytes - own_bytes, parallel)
    held = held_by_ranks(model, holding, parallel)
    largest = max((each.memory_bytes(*cut) for cut in cuts for each in held), default=0) if cuts else 0
    return MachineCount(
        form,
        machine_bytes,
        offered_bytes,
        cuts,
        largest_bytes=own_bytes + largest if cuts else 0,
        least_bytes=own_bytes + least_room_bytes(model, holding, parallel),
        ranks=max(1, parallel.tp),
    )


def _words(each: MachineCount) -> str:
    size = format_bytes(each.machine_bytes)
    if each.count is None:
        return f"none of {size}: a worker needs {format_bytes(each.least_bytes)} for one layer"
    together = f", {each.ranks} to a stage" if each.ranks > 1 else ""
    return f"{count_of(each.count, 'machine')} of {size}{together}"


def _cut_words(each: MachineCount) -> str:
    assert each.cuts is not None
    lengths = sorted({stop - start for start, stop in each.cuts})
    layers = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return (
        f"{layers} layers on each, {format_bytes(each.largest_bytes)} of {format_bytes(each.offered_bytes)} "
        "on the fullest"
    )


def _counted_words(counts: MachineCounts) -> str:
    # Only CPUs heed the type.
    kv_type = f" ({counts.kv_type})" if counts.device == "cpu" else ""
    kept = f"with keys and values{kv_type} for a context of {counts.context:,} tokens"
    if counts.device in _OWN_MEMORY:
        return f"on {counts.device}, {kept}; a tenth of each card's memory is left free"
    offered = ", ".join(f"{each.offered_bytes / 2**30:.1f}G" for each in counts.of(FORMS[0]))
    return (
        f"on {counts.device}, {kept}; a tenth of each machine is left to its system, so workers join with "
        f"--max-memory {offered} (else they take four fifths of what is free)"
    )
