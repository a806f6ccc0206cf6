"""`shardcompute plan`: where a cluster would put a model, and why; or how many machines of a size it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.cluster.access import ClusterAddress, ClusterLocation
from shardcompute.cli.cluster.load import Chains, Model, name_for
from shardcompute.cli.console import open_screen
from shardcompute.cli.format import parse_size
from shardcompute.cli.options.cluster import Parallel
from shardcompute.cli.options.engine import ModelKvType, WeightForm, Weights
from shardcompute.cli.options.output import Json
from shardcompute.cli.options.records import with_options
from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.core.kv_types import DEFAULT_KV_TYPE
from shardcompute.core.settings import load_settings
from shardcompute.core.units import format_seconds
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.node.admin.views import MoveView

_MACHINES = "Machines that are not there"
_MOST_IMAGINED = 64


@with_options
def plan(
    *,
    model: Model,
    weights: Weights = WeightForm.NATIVE,
    kv_type: ModelKvType = None,
    chains: Chains = 1,
    parallel: Parallel = None,
    machines: Annotated[
        str,
        typer.Option(
            "--machines",
            metavar="SIZES",
            help="Ask no cluster, but how many machines of a size are needed, such as 16G, or of several: 16G,24G.",
            rich_help_panel=_MACHINES,
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="KIND",
            help="What those machines compute on: cpu, cuda, mps or mlx.",
            rich_help_panel=_MACHINES,
        ),
    ] = "",
    price_kwh: Annotated[
        float | None,
        typer.Option(
            "--price-kwh",
            metavar="PRICE",
            min=0.0,
            max=1e6,
            help="What a kilowatt-hour costs, to say what a million tokens do; by default what the cluster was told.",
        ),
    ] = None,
    what_if: Annotated[
        str,
        typer.Option(
            "--what-if",
            metavar="[COUNTx]MEMORY[@SPEED]",
            help="What would another machine bring: 8GB, two of them (2x8GB), or one that reads 20 GB of weights a "
            "second (8GB@20G); as fast as the middle one of yours unless said.",
            rich_help_panel=_MACHINES,
        ),
    ] = "",
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Have a served model stay where it is, or let it move again. What fails is replaced all the same.",
        ),
    ] = None,
    moves: Annotated[
        bool,
        typer.Option(
            "--moves",
            help="Say instead how a served model has moved: each time why, what was expected, and what came of it.",
        ),
    ] = False,
    json: Json = False,
    at: ClusterLocation,
) -> None:
    """Where a cluster would put a model, why there, how fast it would be, and what it takes of each machine's memory.

    Nothing is loaded; of a model that the cluster does not have, only headers are read, and of one that
    `list --catalogue` names nothing at all. Ends with 7 if it does not fit. With --machines, no cluster need be there:
    it says how few machines of that size hold the model, in every form of weights.
    """
    from shardcompute.cli.cluster.text import describe_fit, describe_memory

    if machines:
        if what_if or price_kwh is not None:
            raise UsageError(
                "--machines knows neither speeds nor what machines draw",
                hint="leave out --what-if and --price-kwh, or ask a cluster",
            )
        if chains != 1 or at != ClusterLocation():
            raise UsageError(
                "--machines counts the machines of one chain and asks no cluster",
                hint="leave out --chains, --url, --api-key-file and --data-dir",
            )
        _count(model, machines, device or "cpu", weights, kv_type, parallel, is_json=json)
        return
    if device:
        raise UsageError(
            "--device is said of machines that are not there", hint="say how large they are: --machines 16G"
        )
    screen = open_screen()
    address = at.require()
    if keep is not None:
        _keep(address, model, keep, is_json=json)
        return
    if moves:
        _tell_moves(address, model, is_json=json)
        return
    with address.connect() as client:
        planned = client.plan(
            name_for(address, model),
            form=weights.value,
            chains=chains,
            kv_type=kv_type.value if kv_type else None,
            parallel=parallel,
            price_kwh=price_kwh,
            what_if=parse_machines(what_if) if what_if else None,
        )
    if json:
        screen.write_json(dataclasses.asdict(planned))
    else:
        lines = [describe_fit(planned), "", planned.text, "", *describe_memory(planned)]
        if planned.what_if is not None:
            lines += ["", planned.what_if.told]
        screen.write("\n".join(lines) + "\n")
    if not all(chain.is_possible for chain in planned.chains):
        raise typer.Exit(CapacityError.exit_code)


def parse_machines(text: str) -> dict[str, float | None]:
    """Such as 8GB, 2x8GB or 2x8GB@20G. UsageError for anything else."""
    counted, _, speed = text.partition("@")
    count, _, memory = counted.rpartition("x")
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count[:4]) <= _MOST_IMAGINED):
        raise UsageError(
            f"{count!r} is no number of machines", hint=f"write 2x8GB, with 1 to {_MOST_IMAGINED} of them"
        )
    return {
        "count": int(count or 1),
        "memory_bytes": parse_size(memory),
        "bytes_per_s": float(parse_size(speed.removesuffix("/s"))) if speed else None,
    }


def _keep(address: ClusterAddress, model: str, is_kept: bool, *, is_json: bool) -> None:
    """Pin a served model's layout, or let it move."""
    screen = open_screen()
    with address.connect() as client:
        view = client.keep_layout(model, is_kept)
    if is_json:
        screen.write_json({"model": view.name, "is_kept": view.is_kept})
    elif is_kept:
        screen.say(
            f"{view.name} stays where it is, also after a restart; only machines that fail, or are drained, are "
            f"replaced (shardcompute plan {view.name} --no-keep lets it move again)"
        )
    else:
        screen.say(f"{view.name} may move again, where that pays")


def _tell_moves(address: ClusterAddress, model: str, *, is_json: bool) -> None:
    """The last moves of a served model's chains, newest first."""
    screen = open_screen()
    with address.connect() as client:
        chains = [chain for chain in client.state().chains if chain.model == model]
    if not chains:
        raise UsageError(
            f"{model} is not served", hint="shardcompute ps lists what is, and a plan needs no --moves"
        )
    if is_json:
        screen.write_json({chain.id: [dataclasses.asdict(move) for move in chain.moves] for chain in chains})
        return
    for chain in chains:
        if not chain.moves:
            screen.write(f"{chain.id} has not moved\n")
        for move in chain.moves:
            screen.write("\n".join(_describe_move(chain.id, move)) + "\n")


def _describe_move(chain: str, move: MoveView) -> Iterator[str]:
    yield f"{chain}, move {move.number}: {move.reason}"
    if move.expected_before_s and move.expected_after_s:
        now, then = format_seconds(move.expected_before_s), format_seconds(move.expected_after_s)
        yield f"  expected: a step of one stream takes {then} instead of {now}"
    yield f"  what came of it: {move.outcome or 'not known yet'}"


def _count(
    model: str,
    sizes: str,
    device: str,
    weights: WeightForm,
    kv_type: ModelKvType,
    parallel: str | None,
    *,
    is_json: bool,
) -> None:
    from shardcompute.control.placement.parallelism import parse_parallelism
    from shardcompute.node.admin.dry_run import open_headers
    from shardcompute.node.admin.machine_counts import count_machines, count_rows

    asked = parse_parallelism(parallel or "tp=1")
    if asked.pp or not asked.tp:
        raise UsageError(
            "--machines counts the stages by itself, and knows of no speeds",
            hint="of --parallel say tp=2 alone: so many machines compute each stage together",
        )
    screen = open_screen()
    with open_headers(parse_reference(model), load_settings()) as checkpoint:
        counts = count_machines(
            checkpoint,
            [parse_size(size) for size in sizes.split(",")],
            device=device,
            kv_type=kv_type.value if kv_type else DEFAULT_KV_TYPE,
            parallel=asked,
        )
    if is_json:
        told = [{**dataclasses.asdict(each), "count": each.count} for each in counts.counts]
        screen.write_json({**dataclasses.asdict(counts), "counts": told})
    else:
        screen.write_table((), list(count_rows(counts, weights.value)))
    if all(each.count is None for each in counts.of(weights.value)):
        raise typer.Exit(CapacityError.exit_code)
