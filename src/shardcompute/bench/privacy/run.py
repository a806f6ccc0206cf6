"""Runs `bench privacy`: the attacks of a machine that holds some layers, on real text, boundary by boundary.

The attacker has the model's public weights, the rows that pass it, and text of its own to train with. Nothing here is
the best attack there is: what it reads is the least that leaks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.backends.matrix import Array, Float32
from shardcompute.bench.privacy.noise import add_noise, gaussian_epsilon, noise_deviation
from shardcompute.bench.privacy.probe import TokenProbe, fit_probe
from shardcompute.bench.privacy.rotation import (
    align,
    random_permutation,
    random_rotation,
    reading_weights,
    turn_weights,
    turned_back,
)
from shardcompute.bench.privacy.rows import AttackedModel, mean_loss, read_pieces
from shardcompute.bench.privacy.search import (
    Distance,
    distance_to,
    gram_distance_to,
    search_text,
)
from shardcompute.bench.report import Say
from shardcompute.core.errors import UsageError
from shardcompute.models.spec import ModelSpec, Stage
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.resolve import ModelFiles
from shardcompute.wire import find_codec

DEPTHS = (1, 2, 4, 6, 11, 21, 29, 30)
QUICK_DEPTHS = (1, 6, 21)
NOISE_LEVELS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
DELTA = 1e-5
CODECS = ("int8", "fp8")
_PAIRS = (64, 288, 576, 1152)
_CLIPPED_ABOVE = 0.95
"""The clipping norm is the length that so many rows do not exceed."""
_TOLERANCE = 1e-3
"""Of what the engine computes alike to the last bit; rotations round."""
_GRAM_TOLERANCE = 1e-5
_NOISY_CANDIDATES = 64
_COMMON = 8
"""Of so many times as many candidates products alone may choose: one layer is quickly computed."""
_SEED = 17


@dataclass(frozen=True, slots=True)
class PrivacyBench:
    files: ModelFiles
    data: Path | None = None
    form: str = "int8"
    backend: str = "onnx"
    depths: tuple[int, ...] = DEPTHS
    """Boundaries, by how many layers lie before them."""
    train: int = 100
    """Texts of 128 tokens to train with."""
    held_out: int = 12
    """Others, to try attacks on."""
    searched: int = 3
    """So many of these are searched for in the vocabulary, by their first `searched_tokens`."""
    searched_tokens: int = 20
    candidates: int = 512
    """Tokens that a search tries at most at each place."""
    noise_levels: tuple[float, ...] = NOISE_LEVELS
    altered_depth: int = 6
    """The boundary at which packed rows, rotations and noise are tried."""

    @property
    def settings(self) -> dict[str, Any]:
        told = {key: value for key, value in asdict(self).items() if key not in ("files", "data")}
        return {**told, "data": "" if self.data is None else self.data.name}


def quickened(bench: PrivacyBench) -> PrivacyBench:
    """In a minute or two: enough to see that attacks work, not for figures."""
    return replace(
        bench,
        depths=QUICK_DEPTHS,
        train=min(bench.train, 40),
        held_out=min(bench.held_out, 6),
        searched=2,
        searched_tokens=12,
        candidates=128,
        noise_levels=(0.0, 0.2, 1.0),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """What passes a boundary of the texts to train with, and of the others, text by text."""

    depth: int
    train: list[Float32]
    held_out: list[Float32]


@dataclass(frozen=True, slots=True)
class _Attack:
    """All that does not depend on the boundary."""

    bench: PrivacyBench
    model: AttackedModel
    train: list[Array]
    held_out: list[Array]
    embedding: Float32

    @property
    def train_ids(self) -> Array:
        return np.concatenate(self.train)

    @property
    def held_out_ids(self) -> Array:
        return np.concatenate(self.held_out)

    def fit(self, rows: Sequence[Float32]) -> TokenProbe:
        return fit_probe(np.concatenate(rows), self.train_ids, self.embedding)

    def common_tokens(self) -> Array:
        """Those of the training text, frequent ones first."""
        counts = np.bincount(self.train_ids, minlength=len(self.embedding))
        return np.argsort(-counts, kind="stable")[: _COMMON * self.bench.candidates]


def run_privacy_bench(
    bench: PrivacyBench, say: Say, keep: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """`keep` is given what was found so far, boundary by boundary: a long run that is ended was not for nothing."""
    with open_checkpoint(bench.files) as checkpoint:
        _check_plain(checkpoint.spec)
        bench = replace(bench, altered_depth=min(bench.altered_depth, checkpoint.spec.layer_count - 1))
        model = AttackedModel(checkpoint, bench.form, bench.backend)
        pieces = read_pieces(bench.data, checkpoint.tokenizer(), bench.train + bench.held_out)
        held_out = min(bench.held_out, len(pieces) // 2)
        attack = _Attack(bench, model, pieces[:-held_out], pieces[-held_out:], model.embedding())
        found: dict[str, Any] = {
            "model": bench.files.name,
            "layers": model.layers,
            "train_tokens": len(attack.train_ids),
            "held_out_tokens": len(attack.held_out_ids),
            "chance": float(np.bincount(attack.held_out_ids).max() / len(attack.held_out_ids)),
            "boundaries": [],
        }
        rows = _Rows(0, list(attack.train), list(attack.held_out))
        depths = sorted({depth for depth in (*bench.depths, bench.altered_depth) if depth <= model.layers})
        for depth in depths:
            say(f"after {depth} layers")
            rows = _Rows(
                depth,
                model.advance(rows.depth, depth, rows.train),
                model.advance(rows.depth, depth, rows.held_out),
            )
            found["boundaries"].append(_read_boundary(attack, rows, say))
            if depth == bench.altered_depth:
                found["rotation"] = _undo_rotation(attack, rows, say)
                found["noise"] = _add_noise(attack, rows, say)
            keep(found)
        found["gram"] = _search_turned(attack, say)
        found["answers"] = _finish_answers(attack, say)
    return found


def _check_plain(spec: ModelSpec) -> None:
    """What a layer does to rows, and which of its weights meet them, is known of plain decoders."""
    is_dense = not spec.is_parallel and not any(layer.is_sparse for layer in spec.layers)
    is_plain = spec.latent is None and spec.has_gate and spec.norm_placement == "before" and is_dense
    if not is_plain or spec.layer_count < 2:
        raise UsageError(
            "attacks are written for dense decoders of two layers or more with norms before gated blocks",
            hint="use the default model, or another Llama, Mistral, Qwen 2 or Qwen 3 without experts",
        )


def _read_boundary(attack: _Attack, rows: _Rows, say: Say) -> dict[str, Any]:
    probe = attack.fit(rows.train)
    seen, ids = np.concatenate(rows.held_out), attack.held_out_ids
    recall = probe.recall(seen, ids)
    result: dict[str, Any] = {"depth": rows.depth, "probe_top1": recall[1], "probe_top10": recall[10]}
    for codec in CODECS if rows.depth == attack.bench.altered_depth else ():
        packing = find_codec(codec).rows
        packed = packing.unpack(packing.pack(seen), seen.shape[1])
        result[f"probe_top1_{codec}"] = probe.recall(np.asarray(packed, np.float32), ids)[1]
    if rows.depth < attack.model.layers:
        say(f"after {rows.depth} layers: vocabulary search")
        result["search"] = _search(attack, rows.depth, rows.held_out, probe)
    return result


def _search(
    attack: _Attack, depth: int, seen: Sequence[Float32], probe: TokenProbe, *, is_exact: bool = True
) -> dict[str, float]:
    """Tokens are tried in the order in which the probe believes in them; where no row can match, the nearest of few."""
    bench, length = attack.bench, attack.bench.searched_tokens
    most = min(bench.candidates if is_exact else _NOISY_CANDIDATES, len(attack.embedding))
    texts = [
        (
            probe.best(rows[:length], most),
            distance_to(rows[:length]),
            ids[:length],
        )
        for rows, ids in zip(seen[: bench.searched], attack.held_out[: bench.searched], strict=True)
    ]
    return _searched(attack, depth, texts, _TOLERANCE if is_exact else 0.0, is_exact=is_exact)


def _searched(
    attack: _Attack,
    depth: int,
    texts: Sequence[tuple[Sequence[Array] | Array, Distance, Array]],
    tolerance: float,
    *,
    is_exact: bool = True,
) -> dict[str, float]:
    right = tokens = tries = matches = 0
    started = time.thread_time()
    with closing(attack.model.open(0, depth)) as executor:
        for candidates, distance, ids in texts:
            found = search_text(executor, list(candidates), distance, tolerance=tolerance, is_exact=is_exact)
            right += int((found.ids == ids).sum())
            tokens, tries, matches = tokens + len(ids), tries + found.tries, matches + found.matches
    return {
        "tokens": tokens,
        "recovered": right / tokens,
        "matched": matches / tokens,
        "tries_per_token": tries / tokens,
        "seconds_per_token": (time.thread_time() - started) / tokens,
    }


def _undo_rotation(attack: _Attack, rows: _Rows, say: Say) -> dict[str, Any]:
    """Of a rotation that is not undone, from a stage's own weights, and from known rows: what a probe that was trained
    on plain rows reads."""
    say("rotations")
    rng = np.random.default_rng(_SEED)
    probe, ids = attack.fit(rows.train), attack.held_out_ids
    seen, known = np.concatenate(rows.held_out), np.concatenate(rows.train)
    width = seen.shape[1]
    source = attack.model.checkpoint.source(Stage(rows.depth, rows.depth + 1, attack.model.layers))
    public = reading_weights(source, rows.depth)
    result: dict[str, Any] = {"depth": rows.depth, "plain_top1": probe.recall(seen, ids)[1]}
    for name, secret in (
        ("rotation", random_rotation(width, rng)),
        ("permutation", random_permutation(width, rng)),
    ):
        turned, own = seen @ secret, turn_weights(public, secret)
        started = time.thread_time()
        guessed = align(public, own)
        seconds = time.thread_time() - started
        told = {
            "as_it_is_top1": probe.recall(turned, ids)[1],
            "from_weights_top1": probe.recall(turned_back(turned, guessed), ids)[1],
            "from_weights_s": seconds,
        }
        for pairs in _PAIRS:
            rotation = align(known[:pairs], known[:pairs] @ secret)
            told[f"from_{pairs}_known_rows_top1"] = probe.recall(turned_back(turned, rotation), ids)[1]
        result[name] = told
    return result


def _search_turned(attack: _Attack, say: Say) -> dict[str, float]:
    """Behind the first layer, turned by a secret rotation of which nothing is known: by lengths and products alone."""
    say("vocabulary search by norms and products")
    bench, length = attack.bench, attack.bench.searched_tokens
    secret = random_rotation(attack.embedding.shape[1], np.random.default_rng(_SEED + 1))
    texts = attack.held_out[: bench.searched]
    plain = attack.model.advance(0, 1, texts)
    common = attack.common_tokens()
    return {
        "depth": 1,
        **_searched(
            attack,
            1,
            [
                ([common] * length, gram_distance_to(rows[:length] @ secret), ids[:length])
                for rows, ids in zip(plain, texts, strict=True)
            ],
            _GRAM_TOLERANCE,
        ),
    }


def _add_noise(attack: _Attack, rows: _Rows, say: Say) -> dict[str, Any]:
    """Attacks that know of the noise, next to what it does to the model's own predictions."""
    rng = np.random.default_rng(_SEED)
    norm = float(np.quantile(np.linalg.norm(np.concatenate(rows.train), axis=1), _CLIPPED_ABOVE))
    plain = _mean_loss(attack, rows.depth, rows.held_out)
    curve = []
    for level in attack.bench.noise_levels:
        say(f"noise of {level:g} times the clipping norm")
        train = [add_noise(each, norm, level, rng) for each in rows.train]
        seen = [add_noise(each, norm, level, rng) for each in rows.held_out]
        probe = attack.fit(train)
        recall = probe.recall(np.concatenate(seen), attack.held_out_ids)
        loss = _mean_loss(attack, rows.depth, seen)
        searched = _search(attack, rows.depth, seen, probe, is_exact=False)
        sigma = noise_deviation(seen[0].shape[1], norm, level)
        curve.append(
            {
                "level": level,
                "perplexity_change": math.exp(min(loss - plain, 50.0)) - 1,
                "probe_top1": recall[1],
                "probe_top10": recall[10],
                "epsilon_of_one_row": _finite(gaussian_epsilon(2 * norm, sigma, DELTA)),
                "epsilon_of_100_rows": _finite(gaussian_epsilon(20 * norm, sigma, DELTA)),
                "search_recovered": searched["recovered"],
            }
        )
    return {"depth": rows.depth, "clipping_norm": norm, "delta": DELTA, "curve": curve}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean_loss(attack: _Attack, depth: int, rows: Sequence[Float32]) -> float:
    few = slice(max(4, attack.bench.held_out // 2))
    made = attack.model.logits(depth, rows[few])
    return float(
        np.mean([mean_loss(each, ids) for each, ids in zip(made, attack.held_out[few], strict=True)])
    )


def _finish_answers(attack: _Attack, say: Say) -> dict[str, Any]:
    """What comes next is known to whoever sends rows to the last layers: it computes these itself, from weights in
    another form than those that serve."""
    depth = attack.model.layers - 1
    say(f"answers, from behind {depth} layers")
    texts = attack.held_out[: max(4, attack.bench.held_out // 4)]
    rows = attack.model.advance(0, depth, texts)
    right = total = 0
    pairs = zip(attack.model.logits(depth, rows), attack.model.logits(depth, rows, "native"), strict=True)
    for served, guessed in pairs:
        right += int((served.argmax(axis=1) == guessed.argmax(axis=1)).sum())
        total += len(served)
    return {"depth": depth, "next_token_known": right / total, "tokens": total}
