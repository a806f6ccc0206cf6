"""`shardcompute bench …`: the measurements behind every number we publish."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.bench.bench_run import (
    BenchProgress,
    JsonFile,
    Model,
    ModelOption,
    WeightsName,
    finish,
    model_path,
    read_numbers,
    write_results,
)
from shardcompute.cli.bench.collectives import collectives
from shardcompute.cli.bench.faults import drift, faults
from shardcompute.cli.bench.paper import paper
from shardcompute.cli.bench.reach import reach
from shardcompute.cli.bench.serve import serve
from shardcompute.cli.bench.soak import prefix, soak
from shardcompute.cli.bench.tensor import tensor
from shardcompute.cli.bench.trust import pools, privacy, receipts, shares, trust
from shardcompute.cli.bench.wan import wan
from shardcompute.cli.options.cluster import Preference

app = typer.Typer(help="Measure, with raw results as JSON.", no_args_is_help=True)

Forms = Annotated[str, typer.Option(help="Weight forms, separated by commas.")]


@app.command()
def engine(
    model: Model = "",
    forms: Forms = "float32,int8,int4,mixed,native",
    threads: Annotated[str, typer.Option(help="Thread counts, separated by commas.")] = "1,2",
    batches: Annotated[str, typer.Option(help="Sessions at once, separated by commas.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm takes its turn.")] = 5,
    prompt: Annotated[int, typer.Option(min=1, max=640, help="Tokens of the prompt.")] = 512,
    steps: Annotated[int, typer.Option(min=1, max=640, help="Tokens of each answer.")] = 16,
    transformers: Annotated[bool, typer.Option(help="Measure transformers (float32) beside.")] = True,
    llamacpp: Annotated[bool, typer.Option(help="Measure llama.cpp beside, where its wheel is.")] = True,
    shape: Annotated[
        str,
        typer.Option(help="Random weights, every arm in --types: default, 1.1b, qwen3-moe or mixtral."),
    ] = "",
    types: Annotated[str, typer.Option(help="GGUF types of random weights.")] = "Q4_0,Q4_1,Q8_0",
    json_file: JsonFile = None,
) -> None:
    """Decode and prefill speed and memory of every weight form, next to transformers and llama.cpp.

    With --shape, a made-up model: of qwen3-moe and mixtral a few whole layers, as Qwen3-30B-A3B and Mixtral 8x7B have
    them; transformers computes the same shape in float32, the others the same file.
    """
    from shardcompute.bench.engine.random_gguf import named_shape
    from shardcompute.bench.engine.run import EngineBench, run_engine_bench, run_random_bench
    from shardcompute.bench.tables import render_results

    path = "" if shape else model_path(model)
    bench = EngineBench(
        model_path=path,
        forms=forms.split(","),
        threads=[int(part) for part in threads.split(",")],
        batches=[int(part) for part in batches.split(",")],
        prefill_tokens=prompt,
        steps=steps,
        rounds=rounds,
        with_transformers=transformers,
        with_llamacpp=llamacpp,
    )
    labels = ("threads", "tokens", "batch")
    with BenchProgress() as say:
        if not shape:
            results = run_engine_bench(bench, say)
            finish(results, render_results(results, "engine", labels=labels), json_file)
            return
        with tempfile.TemporaryDirectory() as folder:
            bench = replace(bench, forms=("native",))
            results = run_random_bench(bench, named_shape(shape), types.split(","), Path(folder), say)
    finish(results, render_results(results, "engine", labels=labels, tables=("type",)), json_file)


@app.command()
def quality(
    data: Annotated[Path, typer.Option(help="LAMBADA as JSON lines with a `text` each.")],
    model: Model = "",
    forms: Forms = "float32,int8,int4,mixed,native",
    texts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 500,
    sources: Annotated[
        Path | None,
        typer.Option(
            help="Folder of other checkpoints of the model, as quantisers publish it, to be measured too."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Perplexity, LAMBADA accuracy and size of every weight form."""
    from shardcompute.bench.quality import run_quality_bench
    from shardcompute.bench.report import Result, listed, write_json
    from shardcompute.bench.tables import render_results
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    settings = load_settings()
    reference = parse_reference(model)
    published = {
        folder.name: partial(resolve, parse_reference(str(folder)), settings)
        for folder in sorted(sources.iterdir() if sources else ())
        if (folder / "config.json").is_file()
    }

    def keep(results: list[Result]) -> None:
        if json_file is not None:
            write_json(json_file, {"results": listed(results)})

    with BenchProgress() as say:
        results = run_quality_bench(
            lambda: resolve(reference, settings), forms.split(","), data, texts, threads, say, published, keep
        )
    finish(results, render_results(results, "form", tables=("source",)), json_file)


@app.command()
def codecs(
    data: Annotated[Path, typer.Option(help="LAMBADA as JSON lines with a `text` each.")],
    model: Model = "",
    weights: Forms = "native,float32",
    cuts: Annotated[str, typer.Option(help="How often the model is cut, separated by commas.")] = "2,5",
    names: Annotated[str, typer.Option("--codecs", help="Codecs, separated by commas; by default all.")] = "",
    texts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 30,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """What each form of activations costs between stages: bytes, time, and what it does to the text."""
    from shardcompute.bench.codecs import CodecBench, run_codec_bench
    from shardcompute.bench.tables import render_results
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve
    from shardcompute.wire import CODECS

    settings = load_settings()
    reference = parse_reference(model)
    bench = CodecBench(
        files=lambda: resolve(reference, settings),
        data=data,
        forms=weights.split(","),
        cuts=[int(part) for part in cuts.split(",")],
        codecs=names.split(",") if names else tuple(CODECS),
        texts=texts,
        threads=threads,
    )
    with BenchProgress() as say:
        results = run_codec_bench(bench, say)
    finish(results, render_results(results, "codec", labels=("cuts",), tables=("weights",)), json_file)


@app.command()
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
    row_ms: Annotated[
        str, typer.Option(help="What a row costs elsewhere in ms, separated by commas; 0 as on a GPU.")
    ] = "4,0",
    json_file: JsonFile = None,
) -> None:
    """How often a draft head is right, by position and rank, and what rows of second guesses promise.

    In this process; the ring is added as a number, and rows cost what they cost one thread here, or --row-ms.
    """
    from shardcompute.bench.drafts.run import DraftsBench, run_drafts_bench
    from shardcompute.bench.tables import render_results
    from shardcompute.cli.options.cluster import draft_heads_folder
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
        row_ms=[float(part) for part in read_numbers(row_ms, "--row-ms")],
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


@app.command()
def exactness(
    bits: Annotated[int, typer.Option(help="Weights: 32, 8 or 4 bits.")] = 8,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often both arms take their turn.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """What rows with equal bits cost, against one fused graph."""
    from shardcompute.bench.exactness import ExactnessBench, run_exactness_bench
    from shardcompute.bench.tables import render_results

    with BenchProgress() as say:
        results = run_exactness_bench(ExactnessBench(bits, threads, rounds=rounds), say)
    finish(results, render_results(results, "arm", labels=("past", "batch")), json_file)


@app.command()
def swarm(
    model: Model = "",
    weights: WeightsName = "int8",
    workers: Annotated[int, typer.Option(min=1, help="Local workers, one thread each.")] = 2,
    streams: Annotated[str, typer.Option(help="Streams at once, separated by commas.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm takes its turn.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Two workers against one process on this machine, as a client sees them."""
    from shardcompute.bench.swarm import SwarmBench, run_swarm_bench
    from shardcompute.bench.tables import render_results

    counts = [int(part) for part in streams.split(",")]
    bench = SwarmBench(model_path(model), weights, workers, counts, rounds=rounds)
    with BenchProgress() as say:
        results = run_swarm_bench(bench, say)
    finish(results, render_results(results, "arm", labels=("streams", "stage")), json_file)


@app.command()
def failover(
    model: Model = "",
    weights: WeightsName = "native",
    workers: Annotated[int, typer.Option(min=2, help="Local workers, stages and standbys together.")] = 3,
    max_memory: Annotated[str, typer.Option(help="Memory of each worker, such as 150M.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Kill and freeze each stage mid-sentence: what the client sees, and for how long."""
    from shardcompute.bench.failover import FailoverBench, run_failover_bench
    from shardcompute.bench.tables import render_results

    bench = FailoverBench(model_path(model), weights, workers, max_memory)
    with BenchProgress() as say:
        results = run_failover_bench(bench, say)
    finish(results, render_results(results, "stage", tables=("how",)), json_file)


@app.command()
def migration(
    model: Model = "",
    weights: WeightsName = "native",
    streams: Annotated[int, typer.Option(min=1, help="Answers under way while the chain moves.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1000,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="How often both arms take their turn.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """A planned move amid answers: how long they pause where their KV moves along, and where it is replayed."""
    from shardcompute.bench.migration import MigrationBench, run_migration_bench
    from shardcompute.bench.tables import render_results

    bench = MigrationBench(model_path(model), weights, streams, prompt, tokens, rounds)
    with BenchProgress() as say:
        results = run_migration_bench(bench, say)
    finish(results, render_results(results, "arm", labels=["part"]), json_file)


@app.command()
def finetune(
    model: Model = "",
    layers: Annotated[
        int, typer.Option(min=1, help="Layers of the made-up model that peft teaches, too.")
    ] = 6,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of its longest examples.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm takes its turn.")] = 5,
    workers: Annotated[bool, typer.Option(help="Measure one worker and two, as processes.")] = True,
    worker_rounds: Annotated[int, typer.Option(min=1, help="How often these take their turn.")] = 2,
    ring_ms: Annotated[
        float,
        typer.Option(min=0.0, help="Measure codecs instead, on an emulated ring that takes so long; 0: not."),
    ] = 0.0,
    mbit: Annotated[float, typer.Option(min=0.1, help="Of each machine's line, with --ring-ms.")] = 100.0,
    ring_steps: Annotated[int, typer.Option(min=2, help="Steps of each codec, with --ring-ms.")] = 8,
    leak: Annotated[
        bool,
        typer.Option(
            "--leak", help="Instead: what machines could read that compute only the layers between."
        ),
    ] = False,
    skill: Annotated[
        bool,
        typer.Option(
            "--skill", help="Instead: teach a made-up skill on three workers, and ask for what was held out."
        ),
    ] = False,
    skill_steps: Annotated[int, typer.Option(min=1, help="Steps of it, with --skill.")] = 90,
    json_file: JsonFile = None,
) -> None:
    """Tokens a second of fine-tuning: against peft in one process, and of two workers against one."""
    from shardcompute.bench.finetune.leak import LeakBench, run_leak_bench
    from shardcompute.bench.finetune.run import FinetuneBench, run_finetune_bench
    from shardcompute.bench.finetune.skill import SkillBench, run_skill_bench
    from shardcompute.bench.finetune.wan import WanTeaching, run_wan_teaching
    from shardcompute.bench.tables import render_results

    if skill:
        with BenchProgress() as say:
            taught = run_skill_bench(SkillBench(model_path(model), steps=skill_steps), say)
        finish(taught, render_results(taught, "arm"), json_file)
        return
    if ring_ms:
        with BenchProgress() as say:
            ring = WanTeaching(model_path(model), ring_ms=ring_ms, mbit=mbit, steps=ring_steps)
            found = run_wan_teaching(ring, say)
        finish(found, render_results(found, "arm"), json_file)
        return
    if leak:
        with BenchProgress() as say:
            results = run_leak_bench(LeakBench(model_path(model)), say)
        finish(results, render_results(results, "arm"), json_file)
        return
    with BenchProgress() as say:
        bench = FinetuneBench(
            model_path(model) if workers else "",
            layers=layers,
            tokens=tokens,
            rounds=rounds,
            worker_rounds=worker_rounds,
            with_workers=workers,
        )
        results = run_finetune_bench(bench, say)
    finish(results, render_results(results, "arm"), json_file)


app.command()(receipts)
app.command()(shares)
app.command()(trust)
app.command()(pools)
app.command()(privacy)
app.command()(wan)
app.command()(paper)
app.command()(soak)
app.command()(prefix)
app.command()(drift)
app.command()(faults)
app.command()(serve)
app.command()(collectives)
app.command()(tensor)
app.command()(reach)


@app.command()
def placement(
    machines: Annotated[
        str, typer.Option(help="Sizes of clusters, separated by commas.")
    ] = "8,16,32,64,256,1000",
    rooms: Annotated[
        str, typer.Option(help="roomy (few machines hold the model), tight (most are needed), or both.")
    ] = "roomy,tight",
    seeds: Annotated[int, typer.Option(min=1, help="Clusters of each size.")] = 5,
    budget: Annotated[
        float, typer.Option(min=0.01, help="CPU seconds of annealing, genetics and random orders.")
    ] = 1.0,
    methods: Annotated[
        str,
        typer.Option(
            help="plan (all that a plan takes), random, greedy, local-search, annealing, brkga, brkga-warm, "
            "cp-sat (needs shardcompute[planner]), exact."
        ),
    ] = "plan,random,greedy,local-search,annealing,brkga,brkga-warm,cp-sat,exact",
    prefer: Annotated[Preference, typer.Option(help="What is worth most.")] = Preference.BALANCED,
    schemes: Annotated[
        int, typer.Option(min=0, help="Layouts in the library of computed ones; 0: none.")
    ] = 6,
    drifts: Annotated[
        str, typer.Option(help="By how much links change later, separated by commas.")
    ] = "0.1,0.5",
    graphs: Annotated[
        int, typer.Option(min=0, help="Clusters over which graphs that are no chain are sliced; 0: none.")
    ] = 9,
    json_file: JsonFile = None,
) -> None:
    """Every method on the same made-up clusters: how near it comes to what no layout can exceed, and its CPU time."""
    from shardcompute.bench.placement.run import PlacementBench, run_placement_bench
    from shardcompute.bench.report import listed
    from shardcompute.bench.tables import render_results
    from shardcompute.cli.options.cluster import LATENCY_WEIGHTS

    bench = PlacementBench(
        machines=[int(part) for part in machines.split(",")],
        rooms=rooms.split(","),
        seeds=seeds,
        budget_s=budget,
        methods=methods.split(","),
        latency_weight=LATENCY_WEIGHTS[prefer],
        schemes=schemes,
        drifts=[float(part) for part in drifts.split(",") if part],
        graphs=graphs,
    )
    with BenchProgress() as say:
        results, runs = run_placement_bench(bench, say)
    recalls = [each for each in results if "asked" in each.labels]
    sliced = [each for each in results if "graph" in each.labels]
    placed = [each for each in results if "machines" in each.labels and "asked" not in each.labels]
    typer.echo(render_results(placed, "method", labels=("machines",), tables=("room",)))
    if recalls:
        typer.echo(render_results(recalls, "method", labels=("asked", "machines"), tables=("room",)))
    if sliced:
        typer.echo(render_results(sliced, "method", labels=("graph",)))
    write_results(json_file, {"results": listed(results), "runs": [asdict(run) for run in runs]})


@app.command()
def gpu(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the 8B-shaped model.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm takes its turn.")] = 5,
    experts: Annotated[
        bool, typer.Option("--experts", help="Instead: layers of Qwen3-30B-A3B and Mixtral 8x7B.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """How near decoding on a CUDA device comes to its memory's bandwidth."""
    import importlib.util

    from shardcompute.core.errors import BackendError

    if importlib.util.find_spec("torch") is None:
        raise BackendError("this needs torch and a CUDA device", hint="pip install 'shardcompute[torch]'")
    import torch

    if not torch.cuda.is_available():
        raise BackendError("there is no CUDA device here", hint="run it on a machine with an NVIDIA GPU")
    from shardcompute.bench.gpu.decoding import run_gpu_bench
    from shardcompute.bench.gpu.experts import run_expert_bench

    outcome = run_expert_bench(rounds=rounds) if experts else run_gpu_bench(layers=layers, rounds=rounds)
    if json_file is not None:
        json_file.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
