"""Runs `bench trust`: a model in three stages in this process, an honest one, others that cheat, and an auditor.

The audited stage is the middle one, on ONNX Runtime. An auditor of its own class computes its layers again and compares
bits; one of another class (torch) compares distances over windows of 32 rows against thresholds, which are calibrated
on one half of the honest windows and tried on the other. Of the last stage the picked tokens are compared. Then answers
are drawn for audits as a cluster draws them, at several rates. Cheats that the JSON file has already, measured with the
same settings, are not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardcompute.backends.executor import Executor, ExecutorOptions
from shardcompute.backends.matrix import Array
from shardcompute.bench.codecs import cut_evenly
from shardcompute.bench.questions import QUESTIONS, rules
from shardcompute.bench.report import Say, describe_environment
from shardcompute.bench.trust.catching import Find, always, find_among, simulate
from shardcompute.bench.trust.cheats import CHEATS, MiddleStage, Rows, run_rows
from shardcompute.core.batch import Segment
from shardcompute.decoding.noise import gumbel_noise
from shardcompute.models.spec import Stage
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.runtime.shard import open_shard
from shardcompute.trust.calibration import Threshold, calibrate, tail_probability
from shardcompute.trust.distributions import WINDOW, ScoredPick, mean_gap, mean_kl, mean_tv
from shardcompute.trust.fingerprints import (
    fingerprint_distance,
    fingerprint_rows,
    peak_distance,
    row_distance,
)
from shardcompute.trust.thresholds import PICK_GAP_LIMIT
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.resolve import ModelFiles
from shardcompute.wire import find_codec

CODECS = ("exact", "bf16", "int8", "int8-outliers", "fp8")
FALSE_ALARMS = 1e-4
RATES = (0.01, 0.05, 0.2)
_TRIALS = 400
_ALTERED = 0.05
_TEMPERATURE = 0.8
_PICK_CHEATS = (
    "altered picks",
    "one layer skipped (picks)",
    "greedy instead of sampled",
    "a seed of its own",
    "best of 5 instead of all",
)
_BEST = 20
_LEAST_GAP = 1e-2
_GAP_MARGIN = 4.0
"""One token that is far off makes a window: the tail of gaps is heavier than that of distances."""


@dataclass(frozen=True, slots=True)
class TrustBench:
    files: ModelFiles
    data: Path | None = None
    """A JSON-lines file with a `text` each; None: questions and rules that come with the program."""
    form: str = "int8"
    answers: int = 512
    """Honest ones."""
    tokens: int = 128
    cheated_answers: int = 80
    """So many of them are computed by every cheat as well."""
    picked_answers: int = 240
    """So many of them the last stage computes, too, whose logits are large."""

    @property
    def settings(self) -> dict[str, Any]:
        data = "" if self.data is None else self.data.name
        return {
            **{key: value for key, value in asdict(self).items() if key not in ("files", "picked_answers")},
            "data": data,
        }


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of the median row of a window, and of the row that is furthest off."""

    rows: Threshold
    peaks: Threshold


@dataclass(slots=True)
class _Distances:
    """Of all windows, in order: whole rows, that of them which is furthest off, and fingerprints."""

    rows: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    prints: list[float] = field(default_factory=list)


def run_trust_bench(bench: TrustBench, path: Path | None, say: Say) -> dict[str, Any]:
    found = _read(path, bench)
    with open_checkpoint(bench.files) as checkpoint:
        cuts = cut_evenly(checkpoint.spec.layer_count, 2)
        answers = _answers(bench, checkpoint.tokenizer())
        say("the first stage")
        inputs = _stage_rows(checkpoint, cuts[0], "onnx", bench, answers)
        say("the middle stage, honest")
        honest = _stage_rows(checkpoint, cuts[1], "onnx", bench, inputs)
        layers = range(cuts[1].start, cuts[1].stop)
        few = slice(bench.cheated_answers)
        stage = MiddleStage(checkpoint, layers, bench.form, _options(bench), inputs[few], honest[few])
        if "overhead" not in found:
            found["overhead"] = _overhead(stage, say)
            _write(path, bench, found)
        say("the middle stage, another backend")
        torch_rows = _stage_rows(checkpoint, cuts[1], "torch", bench, inputs)
        limits = _calibrated(honest, torch_rows, found)
        _write(path, bench, found)
        for name, cheat in CHEATS.items():
            if name not in found.setdefault("cheats", {}):
                say(f"cheat: {name}")
                found["cheats"][name] = _tried(cheat(stage), stage.honest, torch_rows[few], limits)
                _write(path, bench, found)
        if found.get("picks", {}).get("answers") != bench.picked_answers:
            picks = _picks(checkpoint, cuts[2], bench, honest[: bench.picked_answers], say)
            found["picks"] = {"answers": bench.picked_answers, **picks}
            _write(path, bench, found)
    found["caught"] = _caught(found, bench)
    _write(path, bench, found)
    return found


def _options(bench: TrustBench) -> ExecutorOptions:
    return ExecutorOptions(
        kv_bytes=256 << 20, context_length=bench.tokens + 1, max_logit_rows=bench.tokens, threads=1
    )


def _answers(bench: TrustBench, tokenizer: Tokenizer) -> list[Array]:
    """Equal pieces of text: rows are rows, whoever wrote them."""
    ids: list[int] = []
    for text in _texts(bench.data):
        ids += tokenizer.encode(text)
        if len(ids) >= bench.answers * bench.tokens:
            break
    pieces = [ids[at : at + bench.tokens] for at in range(0, len(ids) - bench.tokens + 1, bench.tokens)]
    return [np.array(piece, dtype=np.int64) for piece in pieces[: bench.answers]]


def _texts(data: Path | None) -> Iterator[str]:
    if data is not None:
        for line in data.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]
        return
    yield from QUESTIONS
    for number in range(100_000):
        yield rules(number)


def _stage_rows(
    checkpoint: Checkpoint, cut: Stage, backend: str, bench: TrustBench, rows: Sequence[Array]
) -> Rows:
    executor = open_shard(checkpoint, stage=cut, backend=backend, form=bench.form, options=_options(bench))
    with closing(executor):
        return list(run_rows(executor, rows))


def _overhead(stage: MiddleStage, say: Say) -> dict[str, float]:
    """What an audit costs of what it audits: rows of a prompt in one step and the others one by one, against all in one
    step; in time of the processor. And whether both have the same bits, as audits in one class ask for."""
    say("what an audit costs")
    served_s = audited_s = 0.0
    is_equal = True
    with closing(stage.part(0, len(stage.layers))) as executor:
        next(run_rows(executor, stage.inputs[:1]))
        for rows in stage.inputs[:8]:
            half = len(rows) // 2
            started = time.thread_time()
            parts = [_step(executor, rows, 0, half)]
            parts += [_step(executor, rows, at, at + 1) for at in range(half, len(rows))]
            served = time.thread_time()
            executor.close_session(0)
            again = _step(executor, rows, 0, len(rows))
            audited = time.thread_time()
            executor.close_session(0)
            served_s, audited_s = served_s + served - started, audited_s + audited - served
            is_equal = is_equal and np.array_equal(np.concatenate(parts), again)
    ratio = audited_s / served_s
    return {"served_s": served_s, "audited_s": audited_s, "ratio": ratio, "is_equal": float(is_equal)}


def _step(executor: Executor, rows: Array, start: int, stop: int) -> Array:
    out = executor.step([Segment(0, start, stop - start, 0)], rows[start:stop])
    return np.array(out, dtype=np.float32)


def _windows(rows: Array) -> Iterator[Array]:
    for start in range(0, len(rows) - WINDOW + 1, WINDOW):
        yield rows[start : start + WINDOW]


def _distances(said: Rows, computed: Rows, codec: str) -> _Distances:
    """Of what was sent in a codec's form from what the auditor would have sent."""
    packing, found = find_codec(codec).rows, _Distances()
    for one, other in zip(said, computed, strict=True):
        a = packing.unpack(packing.pack(one), one.shape[1])
        b = packing.unpack(packing.pack(other), other.shape[1])
        for left, right in zip(_windows(a), _windows(b), strict=True):
            found.rows.append(row_distance(left, right))
            found.peaks.append(peak_distance(left, right))
            found.prints.append(fingerprint_distance(fingerprint_rows(left), right))
    return found


def _calibrated(honest: Rows, other: Rows, found: dict[str, Any]) -> dict[str, _Limits]:
    """Thresholds by codec, and what they do to honest windows that they were not calibrated on."""
    limits: dict[str, _Limits] = {}
    table = {}
    for codec in CODECS:
        distances = _distances(honest, other, codec)
        # Neighbours are alike: whole stretches are held out, not every other window.
        half = len(distances.rows) // 2
        rows = calibrate(distances.rows[:half], FALSE_ALARMS)
        peaks = calibrate(distances.peaks[:half], FALSE_ALARMS)
        limits[codec] = _Limits(rows, peaks)
        prints = calibrate(distances.prints[:half], FALSE_ALARMS)
        held_out = distances.rows[half:]
        table[codec] = {
            "limit": rows.limit,
            "windows_calibrated": half,
            "windows_held_out": len(held_out),
            "false_alarms_held_out": sum(rows.is_beyond(each) for each in held_out),
            "false_alarm_rate_by_fit": tail_probability(distances.rows, rows.limit),
            "peak_limit": peaks.limit,
            "peak_false_alarms_held_out": sum(peaks.is_beyond(each) for each in distances.peaks[half:]),
            "peak_false_alarm_rate_by_fit": tail_probability(distances.peaks, peaks.limit),
            "peak_largest_honest": max(distances.peaks),
            "largest_honest": max(distances.rows),
            "median_honest": float(np.median(distances.rows)),
            "fingerprint_limit": prints.limit,
            "fingerprint_false_alarms_held_out": sum(prints.is_beyond(e) for e in distances.prints[half:]),
            "fingerprint_largest_honest": max(distances.prints),
        }
    found["honest"] = table
    return limits


def _tried(sent: Rows, honest: Rows, other: Rows, limits: dict[str, _Limits]) -> dict[str, Any]:
    """What auditors of the same class and of another find of one cheat, window by window and answer by answer."""
    same = [
        [not np.array_equal(a, b) for a, b in zip(_windows(x), _windows(y), strict=True)]
        for x, y in zip(sent, honest, strict=True)
    ]
    result: dict[str, Any] = {
        "same_class": {"windows": float(np.mean(same)), "answers": _flags([any(each) for each in same])}
    }
    for codec in ("exact", "int8", "fp8"):
        distances = _distances(sent, other, codec)
        per_answer = np.array(distances.rows).reshape(len(sent), -1)
        peaks = np.array(distances.peaks).reshape(len(sent), -1)
        by_median = per_answer > limits[codec].rows.limit
        beyond = by_median | (peaks > limits[codec].peaks.limit)
        result[f"another class, {codec}"] = {
            "windows": float(beyond.mean()),
            "windows_by_median": float(by_median.mean()),
            "answers": _flags([bool(each.any()) for each in beyond]),
            "least": float(per_answer.min()),
            "median": float(np.median(per_answer)),
            "peak_median": float(np.median(peaks)),
            "fingerprint_median": float(np.median(distances.prints)),
            "fingerprint_least": float(np.min(distances.prints)),
        }
    return result


def _flags(caught: Sequence[bool]) -> str:
    return "".join("1" if each else "0" for each in caught)


def _picks(
    checkpoint: Checkpoint, cut: Stage, bench: TrustBench, rows: Sequence[Array], say: Say
) -> dict[str, Any]:
    """The last stage: what it picks greedily, scored by another backend; and with its layers or its picks changed."""
    say("the last stage")
    half = Stage(cut.start + 1, cut.stop, cut.total)
    opened = [
        open_shard(checkpoint, stage=each, backend=backend, form=bench.form, options=_options(bench))
        for each, backend in ((cut, "onnx"), (cut, "torch"), (half, "onnx"))
    ]
    rng = np.random.default_rng(17)
    honest: dict[str, list[float]] = {"greedy": [], "sampled": []}
    gaps: dict[str, list[list[float]]] = {name: [] for name in _PICK_CHEATS}
    exact: dict[str, list[bool]] = {name: [] for name in _PICK_CHEATS}
    kl: dict[str, list[float]] = {"honest": [], "one layer skipped": []}
    tv: dict[str, list[float]] = {"honest": [], "one layer skipped": []}
    for number, each in enumerate(rows):
        own, other, fewer = (next(run_rows(executor, [each], len(each))) for executor in opened)
        noise = _noises(number, *own.shape)
        said = {
            "altered picks": (_altered(own, rng), 0.0),
            "one layer skipped (picks)": (fewer.argmax(axis=1), 0.0),
            "greedy instead of sampled": (own.argmax(axis=1), _TEMPERATURE),
            "a seed of its own": (_sampled(own, _noises(-1 - number, *own.shape)), _TEMPERATURE),
            "best of 5 instead of all": (_sampled(_best_of(own, 5), noise), _TEMPERATURE),
        }
        right = {0.0: own.argmax(axis=1), _TEMPERATURE: _sampled(own, noise)}
        honest["greedy"] += _gaps(right[0.0], other, 0.0, noise)
        honest["sampled"] += _gaps(right[_TEMPERATURE], other, _TEMPERATURE, noise)
        for name, (picked, temperature) in said.items():
            gaps[name].append(_gaps(picked, other, temperature, noise))
            exact[name].append(bool((picked != right[temperature]).any()))
        for a, b, c in zip(_windows(own), _windows(other), _windows(fewer), strict=True):
            kl["honest"].append(mean_kl(b, a))
            tv["honest"].append(mean_tv(b, a))
            kl["one layer skipped"].append(mean_kl(b, c))
            tv["one layer skipped"].append(mean_tv(b, c))
        if number % 10 == 0:
            say(f"the last stage: {number} of {len(rows)} answers")
    for executor in opened:
        executor.close()
    return _judged_picks(honest, gaps, exact, kl, tv)


def _noises(seed: int, rows: int, tokens: int) -> Array:
    ids = np.arange(tokens, dtype=np.int64)
    return np.stack([gumbel_noise(seed, row + 1, ids) for row in range(rows)])


def _sampled(logits: Array, noise: Array) -> Array:
    picked: Array = (logits / _TEMPERATURE + noise).argmax(axis=1)
    return picked


def _best_of(logits: Array, count: int) -> Array:
    """Of each row all but so many tokens are out of the question."""
    least = np.partition(logits, -count, axis=1)[:, -count, None]
    return np.where(logits >= least, logits, -np.inf)


def _altered(logits: Array, rng: np.random.Generator) -> Array:
    """One pick in twenty is the second best."""
    order = np.argsort(-logits, axis=1)[:, :2]
    return np.where(rng.random(len(logits)) < _ALTERED, order[:, 1], order[:, 0])


def _gaps(picked: Array, logits: Array, temperature: float, noise: Array) -> list[float]:
    """Of each window, as an audit judges what was picked: among the best tokens that the auditor finds."""
    scored = []
    for token, row, added in zip(picked, logits, noise, strict=True):
        best = np.argpartition(-row, _BEST)[:_BEST]
        scores = row + temperature * added if temperature else row
        others = {int(id): float(scores[id]) for id in best}
        scored.append(ScoredPick(int(token), float(scores[token]), others))
    return [mean_gap(scored[at : at + WINDOW]) for at in range(0, len(scored) - WINDOW + 1, WINDOW)]


def _judged_picks(
    honest: dict[str, list[float]],
    cheats: dict[str, list[list[float]]],
    exact: dict[str, list[bool]],
    kl: dict[str, list[float]],
    tv: dict[str, list[float]],
) -> dict[str, Any]:
    """Picks by the limit that audits use; what the first half of honest windows would suggest stands beside it."""
    half = len(honest["greedy"]) // 2
    limits = {
        "kl": calibrate(kl["honest"][:half], FALSE_ALARMS),
        "tv": calibrate(tv["honest"][:half], FALSE_ALARMS),
    }
    for name, found in honest.items():
        suggested = calibrate(found[:half], FALSE_ALARMS, floor=_LEAST_GAP, margin=_GAP_MARGIN)
        limits[f"gap, {name}"] = suggested
    held_out = {"kl": kl["honest"][half:], "tv": tv["honest"][half:]}
    of_windows = {
        "kl": [limits["kl"].is_beyond(each) for each in kl["one layer skipped"]],
        "tv": [limits["tv"].is_beyond(each) for each in tv["one layer skipped"]],
    }
    return {
        "limits": {name: asdict(limit) for name, limit in limits.items()},
        "gap_limit_in_use": PICK_GAP_LIMIT,
        "honest": {
            name: {
                "windows": len(found),
                "beyond_limit_in_use": sum(each > PICK_GAP_LIMIT for each in found),
                "largest": max(found),
                "median": float(np.median(found)),
            }
            for name, found in honest.items()
        },
        "windows_held_out": len(held_out["kl"]),
        "false_alarms_held_out": {
            name: sum(limits[name].is_beyond(each) for each in values) for name, values in held_out.items()
        },
        "one layer skipped, windows beyond": {name: float(np.mean(of)) for name, of in of_windows.items()},
        "cheats": {
            name: {
                "same_class": {"windows": float(np.mean(exact[name])), "answers": _flags(exact[name])},
                "another class, exact": {
                    "windows": float(np.mean(np.array(found) > PICK_GAP_LIMIT)),
                    "answers": _flags([max(each) > PICK_GAP_LIMIT for each in found]),
                    "least": float(np.min(found)),
                    "median": float(np.median(found)),
                },
            }
            for name, found in cheats.items()
        },
    }


def _caught(found: dict[str, Any], bench: TrustBench) -> list[dict[str, Any]]:
    """Cheat × who audits × rate."""
    rows = []
    for name, kinds in {**found["cheats"], **found["picks"]["cheats"]}.items():
        for kind, measured in kinds.items():
            find = find_among([flag == "1" for flag in measured["answers"]])
            rows += _at_rates(name, kind, find, bench)
    # Whoever sent the rows that would convict its neighbour does not show them.
    rows += _at_rates("two neighbours who collude", "rows withheld", always("withheld"), bench)
    return rows


def _at_rates(name: str, kind: str, find: Find, bench: TrustBench) -> list[dict[str, Any]]:
    made = []
    for rate in RATES:
        for standing, reputation in (("new", 0.3), ("long honest", 0.95)):
            caught = simulate(find, rate, bench.tokens, trials=_TRIALS, reputation=reputation)
            labels = {"cheat": name, "auditor": kind, "rate": rate, "machine": standing}
            made.append({**labels, **asdict(caught)})
    return made


def _read(path: Path | None, bench: TrustBench) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if content.get("settings") == json.loads(json.dumps(bench.settings)) else {}


def _write(path: Path | None, bench: TrustBench, found: dict[str, Any]) -> None:
    if path is None:
        return
    found.setdefault("environment", describe_environment())
    found["settings"] = bench.settings
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
