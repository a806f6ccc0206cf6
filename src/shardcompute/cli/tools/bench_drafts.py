"""`shardcompute bench drafts`: how often guesses are right, and what more of them would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.options.cluster import draft_heads_folder
from shardcompute.cli.tools.bench_run import BenchProgress, JsonFile, ModelOption, finish, read_numbers


def drafts(
    data: Annotated[Path, typer.Option(help="Spec-Bench's questions as JSON lines.")],
    model: ModelOption = "",
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, of all categories in turn.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, max=1024, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="By which prompts are drawn, and answers sampled.")] = 1,
    ring_ms: Annotated[
        str, typer.Option(help="Times once round the ring in ms, separated by commas.")
    ] = "20,80,200",
    json_file: JsonFile = None,
) -> None:
    """How often a draft head is right, by position and rank, and what rows of second guesses promise.

    In this process; the ring is added as a number, and rows cost what they cost one thread here, or nothing.
    """
    from shardcompute.bench.drafts.run import DraftsBench, run_drafts_bench
    from shardcompute.bench.tables import render_results
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    settings = load_settings()
    reference = parse_reference(model)
    bench = DraftsBench(
        files=lambda: resolve(reference, settings),
        data=data,
        heads=draft_heads_folder(settings),
        prompts=prompts,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        ring_ms=[float(part) for part in read_numbers(ring_ms, "--ring-ms")],
    )
    with BenchProgress() as say:
        results = run_drafts_bench(bench, say)
    counted = [result for result in results if "shape" not in result.labels]
    promised = [result for result in results if "shape" in result.labels]
    shown = [
        render_results(counted, "of", labels=("position",)),
        render_results(promised, "shape", labels=("ring_ms",), tables=("rows",)),
    ]
    finish(results, "\n".join(shown), json_file)
