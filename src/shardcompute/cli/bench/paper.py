"""`shardcompute bench paper`: a published paper's tables, run again here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.bench.bench_run import (
    BenchProgress,
    EmulatorName,
    JsonFile,
    Model,
    finish,
    model_path,
    read_numbers,
)
from shardcompute.core.errors import UsageError
from shardcompute.sim import Emulator

_PARTS = ("forms", "links")


def paper(
    model: Model = "",
    data: Annotated[
        Path | None, typer.Option(help="Folder with lambada.jsonl and bbh_*.jsonl; needed for forms.")
    ] = None,
    parts: Annotated[str, typer.Option(help="What to run: forms, links, or both.")] = "forms,links",
    forms: Annotated[
        str, typer.Option(help="Weight forms, separated by commas; others are compared with the first.")
    ] = "float32,int8,mixed",
    texts: Annotated[int, typer.Option(min=2, help="Texts of LAMBADA.")] = 150,
    questions: Annotated[int, typer.Option(min=2, help="Questions of each BIG-bench task.")] = 40,
    batches: Annotated[str, typer.Option(help="Streams at once, separated by commas.")] = "1,8,32",
    weights: Annotated[str, typer.Option(help="Weight form that the six workers serve.")] = "int8",
    workers: Annotated[int, typer.Option(min=2, max=16, help="Stages, each on a machine of its own.")] = 6,
    threads: Annotated[int, typer.Option(min=1, help="Threads for the forms; a worker has one.")] = 2,
    published: Annotated[
        Path | None, typer.Option(help="Published figures as JSON, to be shown beside ours.")
    ] = None,
    emulator: EmulatorName = Emulator.AUTO,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few texts, one link, one round, two workers: a glance.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Weights in 16 against 8 bits and mixed, on LAMBADA and BIG-bench tasks with 95 % intervals; and tok/s of six
    workers by batch and link: 1 Gbit/s and 100 Mbit/s, 5 and 100 ms between any two.

    Takes some ten minutes on two cores that have nothing else to do.
    """
    from shardcompute.bench.paper.forms import FormBench, run_forms
    from shardcompute.bench.paper.links import PAPER_LINKS, LinkBench, run_links
    from shardcompute.bench.paper.published import read_published
    from shardcompute.bench.paper.report import render_paper
    from shardcompute.bench.report import Result
    from shardcompute.bench.wan.cluster import WanServing
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    asked = parts.split(",")
    if not asked or not set(asked) <= set(_PARTS):
        raise UsageError(f"{parts!r} names a part that there is not", hint="use forms, links or forms,links")
    if "forms" in asked and data is None:
        raise UsageError("weight forms are compared on texts", hint="give a folder with --data")
    figures = [] if published is None else read_published(published)
    counts = [int(part) for part in read_numbers(batches, "--batches", is_whole=True)]
    settings, reference = load_settings(), parse_reference(model)
    results: list[Result] = []
    with BenchProgress() as say:
        if "forms" in asked and data is not None:
            bench = FormBench(
                lambda: resolve(reference, settings),
                data,
                forms.split(","),
                texts=min(texts, 4) if quick else texts,
                questions=min(questions, 2) if quick else questions,
                threads=threads,
            )
            results += run_forms(bench, say)
        if "links" in asked:
            serving = WanServing(model_path(model), weights, kv_tokens=8192, context=512)
            links = LinkBench(
                serving,
                PAPER_LINKS[:1] if quick else PAPER_LINKS,
                counts[:1] if quick else counts,
                workers=2 if quick else workers,
                tokens=6 if quick else 24,
                rounds=1 if quick else 2,
                emulator=emulator,
            )
            results += run_links(links, say)
    finish(results, render_paper(results, figures), json_file)
