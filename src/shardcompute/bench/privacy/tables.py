"""Tables of `bench privacy`, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def privacy_table(found: dict[str, Any]) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['model']}: {found['train_tokens']:,} tokens to train with, {found['held_out_tokens']:,} others to "
        f"read; always saying the commonest one reads {found['chance']:.1%}"
    )
    yield ""
    yield f"{'after':>6} {'probe':>7} {'top 10':>7} {'search':>8} {'tries':>7} {'s/token':>8}"
    for row in found["boundaries"]:
        search = row.get("search")
        told = (
            f"{search['recovered']:8.1%} {search['tries_per_token']:7.1f} {search['seconds_per_token']:8.2f}"
            if search
            else f"{'':>8}"
        )
        yield (f"{row['depth']:6} {row['probe_top1']:7.1%} {row['probe_top10']:7.1%} {told}{_packed(row)}")
    gram, rotation, answers = found["gram"], found["rotation"], found["answers"]
    yield ""
    plain = f"{rotation['plain_top1']:.1%}"
    yield f"secret rotation after {rotation['depth']} layers, probe trained on plain rows ({plain} there)"
    for name in ("rotation", "permutation"):
        told = rotation[name]
        pairs = ", ".join(
            f"{key.split('_')[1]}: {value:.1%}"
            for key, value in told.items()
            if key.endswith("known_rows_top1")
        )
        yield (
            f"  {name}: as it is {told['as_it_is_top1']:.1%}, undone from the stage's own weights "
            f"{told['from_weights_top1']:.1%} in {told['from_weights_s']:.2f} s; from known rows {pairs}"
        )
    yield (
        f"  norms and products alone, after {gram['depth']} layer: {gram['recovered']:.1%} by search, "
        f"{gram['tries_per_token']:.0f} tries a token"
    )
    yield f"next tokens known behind {answers['depth']} layers: {answers['next_token_known']:.1%}"
    yield ""
    noise = found["noise"]
    yield (
        f"noise after {noise['depth']} layers, rows clipped to {noise['clipping_norm']:.0f}, δ = {noise['delta']:g}"
    )
    heads = f"{'level':>6} {'perplexity':>11} {'probe':>7} {'top 10':>7} {'search':>8}"
    yield f"{heads} {'ε, 1 row':>10} {'ε, 100 rows':>12}"
    for row in noise["curve"]:
        one, many, searched = row["epsilon_of_one_row"], row["epsilon_of_100_rows"], row["search_recovered"]
        yield (
            f"{row['level']:6g} {row['perplexity_change']:+11.1%} {row['probe_top1']:7.1%} {row['probe_top10']:7.1%} "
            f"{searched:8.1%} "
            f"{'∞' if one is None else f'{one:,.0f}':>10} {'∞' if many is None else f'{many:,.0f}':>12}"
        )


def _packed(row: dict[str, Any]) -> str:
    told = [
        f"{key.rsplit('_', 1)[1]} {value:.1%}" for key, value in row.items() if key.startswith("probe_top1_")
    ]
    return f"   probe of packed rows: {', '.join(told)}" if told else ""
