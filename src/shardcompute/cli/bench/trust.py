"""`bench receipts`, `shares`, `trust`, `pools`, `privacy`: what strangers can be trusted with, and what that costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import to_builtins

from shardcompute.cli.bench.bench_run import (
    BenchProgress,
    JsonFile,
    Model,
    WeightsName,
    finish,
    model_path,
    read_numbers,
    write_results,
)


def receipts(
    model: Model = "",
    stages: Annotated[int, typer.Option(min=1, help="How many stages the model is cut into.")] = 3,
    prompt: Annotated[int, typer.Option(min=1, max=512, help="Tokens of the prompt.")] = 64,
    steps: Annotated[int, typer.Option(min=2, max=4096, help="Tokens of the answer.")] = 128,
    wire: Annotated[str, typer.Option(help="In which form activations go from stage to stage.")] = "exact",
    mutations: Annotated[int, typer.Option(min=0, help="How many changed receipts are verified.")] = 10_000,
    json_file: JsonFile = None,
) -> None:
    """What signing for an answer costs its stages, and whether a verifier refuses receipts that were changed."""
    from shardcompute.bench.receipts import ReceiptBench, run_receipt_bench
    from shardcompute.bench.tables import render_results
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    files = resolve(parse_reference(model), load_settings())
    with BenchProgress() as say:
        results = run_receipt_bench(ReceiptBench(files, stages, prompt, steps, wire, mutations), say)
    finish(results, render_results(results, "wire"), json_file)


def shares(
    model: Model = "",
    layers: Annotated[str, typer.Option(help="How many first layers are shared, with commas.")] = "1,2",
    prompt: Annotated[int, typer.Option(min=1, max=512, help="Tokens of the prompt.")] = 64,
    steps: Annotated[int, typer.Option(min=2, max=4096, help="Rows after it, one at a time.")] = 32,
    shape: Annotated[str, typer.Option(help="Shape of a random model that is shared wholly.")] = "tiny",
    json_file: JsonFile = None,
) -> None:
    """What layers on shares cost against computing them plainly, what they send, and how far they are off."""
    from shardcompute.bench.shares.run import ShareBench, run_share_bench
    from shardcompute.bench.tables import render_results

    counts = tuple(int(each) for each in read_numbers(layers, "--layers", is_whole=True))
    with BenchProgress() as say:
        results = run_share_bench(ShareBench(model_path(model), counts, prompt, steps, shape), say)
    finish(results, render_results(results, "shared"), json_file)


def trust(
    model: Model = "",
    data: Annotated[Path | None, typer.Option(help="Texts as JSON lines with a `text` each.")] = None,
    weights: Annotated[str, typer.Option("--weights", help="Weight form that is served.")] = "int8",
    answers: Annotated[int, typer.Option(min=20, help="Honest answers, of 128 tokens each.")] = 512,
    cheated: Annotated[int, typer.Option(min=4, help="So many of them are computed by every cheat.")] = 80,
    picked: Annotated[int, typer.Option(min=20, help="So many of them also by the last stage.")] = 240,
    json_file: JsonFile = None,
) -> None:
    """Which cheats of a stage audits find, how soon at which rate, and how often they would accuse the honest.

    Needs the torch extra for the auditor of another class. A --json file that an earlier run of the same settings has
    left is gone on from, cheat by cheat.
    """
    from shardcompute.bench.trust.run import TrustBench, run_trust_bench
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    files = resolve(parse_reference(model), load_settings())
    bench = TrustBench(files, data, weights, answers, cheated_answers=cheated, picked_answers=picked)
    with BenchProgress() as say:
        found = run_trust_bench(bench, json_file, say)
    typer.echo(_trust_table(found), nl=False)


def _trust_table(found: dict[str, Any]) -> str:
    lines = [f"{'cheat':32} {'auditor':22} {'rate':>5} {'audits':>7} {'within 1,000 tokens':>20}"]
    for row in found["caught"]:
        if row["machine"] != "new":
            continue
        audits = "never" if row["never"] == 1 else f"{row['audits']:.1f}"
        lines.append(
            f"{row['cheat']:32} {row['auditor']:22} {row['rate']:5} {audits:>7} {row['within']:>20.0%}"
        )
    for codec, honest in found["honest"].items():
        lines.append(
            f"honest, {codec}: {honest['false_alarms_held_out']} false alarms in {honest['windows_held_out']} windows"
        )
    lines.append(f"an audit costs {found['overhead']['ratio']:.2f} of what it audits")
    return "\n".join(lines) + "\n"


def pools(
    networks: Annotated[
        str, typer.Option(help="Networks of the attacker, separated by commas.")
    ] = "1,4,16,64",
    days: Annotated[int, typer.Option(min=2, max=365, help="Days that are simulated.")] = 30,
    trials: Annotated[int, typer.Option(min=1, max=100, help="Runs of each, from seeds of their own.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Attacks on an open pool, simulated around the policy that `up --open` uses: many keys, waiting, covering.

    Seeded, without machines or a model: equal options give equal results.
    """
    from shardcompute.bench.trust.attacks import PoolAttack, attacks_on, run_attack
    from shardcompute.trust.pools import PoolPolicy

    settings = PoolAttack("none", 0, PoolPolicy(), days=days)
    with BenchProgress() as say:
        rows = []
        counts = [int(each) for each in read_numbers(networks, "--networks", is_whole=True)]
        for each in attacks_on(settings, counts):
            say(f"{each.attack} from {each.networks} networks")
            rows.append(run_attack(each, trials))
    said = {
        name: value
        for name, value in asdict(settings).items()
        if name not in ("policy", "attack", "networks")
    }
    said["policy"] = to_builtins(PoolPolicy())
    write_results(json_file, {"settings": {**said, "trials": trials}, "results": rows})
    typer.echo(_pools_table(rows), nl=False)


def _pools_table(rows: list[dict[str, Any]]) -> str:
    head = f"{'attack':14} {'networks':>8} {'policy':10} {'bad answers':>12} {'a day':>7} {'unnoticed':>10} {'keys':>6}"
    lines = [
        head,
        *(
            f"{row['attack']:14} {row['networks']:8} {row['policy']:10} {row['bad_share']:12.3%} "
            f"{row['bad_answers_per_day']:7.2f} {row['unnoticed_share']:10.3%} {row['keys']:6.0f}"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def privacy(
    model: Model = "",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts as JSON lines with a `text` each: the first train attacks, the last are read."
        ),
    ] = None,
    weights: WeightsName = "int8",
    train: Annotated[int, typer.Option(min=1, help="Texts of 128 tokens to train with.")] = 100,
    held_out: Annotated[int, typer.Option(min=1, help="Others, to try attacks on.")] = 12,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few boundaries, texts and levels of noise.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """What a machine that holds some layers reads of the text that passes it, by attacks that anybody can make.

    A linear probe from hidden states to tokens; a search of the vocabulary through the first layers, also where a
    secret rotation has turned rows; rotations undone from weights and known rows; and noise, next to what it costs.
    """
    from shardcompute.bench.privacy.run import PrivacyBench, quickened, run_privacy_bench
    from shardcompute.bench.privacy.tables import privacy_table
    from shardcompute.bench.report import write_json
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    files = resolve(parse_reference(model), load_settings())
    bench = PrivacyBench(files, data, weights, train=train, held_out=held_out)
    bench = quickened(bench) if quick else bench

    def keep(found: dict[str, Any]) -> None:
        if json_file is not None:
            write_json(json_file, {"settings": bench.settings, **found})

    with BenchProgress() as say:
        found = run_privacy_bench(bench, say, keep)
    typer.echo(privacy_table(found), nl=False)
    write_results(json_file, {"settings": bench.settings, **found})
