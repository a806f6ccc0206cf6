"""Attacks on hidden states of a tiny model: they read what they should, and nothing where there is nothing to read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardcompute.bench.privacy.noise import add_noise, clip_rows, gaussian_epsilon
from shardcompute.bench.privacy.probe import fit_probe
from shardcompute.bench.privacy.rotation import align, random_permutation, random_rotation, turn_weights
from shardcompute.bench.privacy.rows import AttackedModel, read_pieces
from shardcompute.bench.privacy.run import PrivacyBench, run_privacy_bench
from shardcompute.bench.privacy.search import distance_to, gram_distance_to, search_text
from shardcompute.bench.privacy.tables import privacy_table
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings
from shardcompute.core.steps import Frame, SessionRows
from shardcompute.node.rpc.frames import segment_of, step_frame, work_of
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import ModelFiles, resolve
from shardcompute.wire import unpack_ids
from support.models.tiny_checkpoint import VOCABULARY, save_tiny_llama


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return resolve(parse_reference(str(folder)), load_settings())


@pytest.fixture
def model(files: ModelFiles) -> Iterator[AttackedModel]:
    with open_checkpoint(files) as checkpoint:
        yield AttackedModel(checkpoint, "float32")


def texts(seed: int, count: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(32, 96, 64) for _ in range(count)]


def test_a_probe_reads_held_out_text_and_nothing_from_rows_that_are_not_its_own(model: AttackedModel) -> None:
    train, held_out = texts(1, 60), texts(2, 4)
    rows = np.concatenate(model.advance(0, 1, train))
    probe = fit_probe(rows, np.concatenate(train), model.embedding())
    seen, ids = np.concatenate(model.advance(0, 1, held_out)), np.concatenate(held_out)
    read = probe.recall(seen, ids)
    assert read[1] > 0.3, "of 64 tokens, and its random layers are twenty times as loud as its embedding"
    assert read[10] > 0.7
    assert (probe.best(seen, 3)[:, 0] == ids).mean() == pytest.approx(read[1])
    assert probe.recall(seen, np.roll(ids, 7))[1] < 0.1, "of other tokens it must know nothing"


def test_a_probe_reads_tokens_that_its_training_text_does_not_have() -> None:
    random = np.random.default_rng(9)
    table = random.standard_normal((300, 32)).astype(np.float32)
    hidden = table @ random.standard_normal((32, 32)).astype(np.float32)

    def rows(ids: np.ndarray) -> np.ndarray:
        noise = random.standard_normal((len(ids), 32))
        return np.asarray(hidden[ids] + 0.3 * noise, np.float32)

    seen, unseen = random.integers(0, 200, 4000), random.integers(200, 300, 400)
    probe = fit_probe(rows(seen), seen, table)
    assert probe.recall(rows(unseen), unseen)[1] > 0.8


def test_a_search_finds_every_token_and_says_so(model: AttackedModel) -> None:
    [ids] = texts(3, 1)
    [rows] = model.advance(0, 3, [ids])
    length = 8
    candidates = [np.arange(VOCABULARY)] * length
    with closing(model.open(0, 3)) as executor:
        found = search_text(executor, candidates, distance_to(rows), tolerance=1e-5)
        assert (found.ids == ids[:length]).all()
        assert found.matches == length
        assert found.tries < VOCABULARY * length
        blind = search_text(executor, candidates, distance_to(rows[::-1]), tolerance=1e-5)
        assert (blind.ids == ids[:length]).mean() < 0.5


def test_rows_that_are_turned_are_found_by_norms_and_products(model: AttackedModel) -> None:
    [ids] = texts(4, 1)
    [rows] = model.advance(0, 1, [ids])
    secret = random_rotation(rows.shape[1], np.random.default_rng(5))
    with closing(model.open(0, 1)) as executor:
        candidates = [np.arange(VOCABULARY)] * 10
        turned = search_text(executor, candidates, gram_distance_to(rows @ secret), tolerance=1e-5)
    assert (turned.ids == ids[:10]).all()


@pytest.mark.parametrize("make", [random_rotation, random_permutation])
def test_a_secret_rotation_is_undone_from_weights_in_eight_bits(make) -> None:  # type: ignore[no-untyped-def]
    random = np.random.default_rng(6)
    public = random.standard_normal((200, 32)).astype(np.float32)
    secret = make(32, random)
    found = align(public, turn_weights(public, secret))
    assert np.abs(found - secret).max() < 0.02
    assert np.allclose(found @ found.T, np.eye(32), atol=1e-5)


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    # Published with the analytic mechanism: δ(ε = 1, σ = 1) for sensitivity 1 is 0.1269.
    assert gaussian_epsilon(1.0, 1.0, 0.126936737507) == pytest.approx(1.0, abs=1e-6)
    assert gaussian_epsilon(2.0, 2.0, 1e-5) == pytest.approx(gaussian_epsilon(1.0, 1.0, 1e-5))
    assert gaussian_epsilon(1.0, 10.0, 1e-5) < gaussian_epsilon(1.0, 1.0, 1e-5) < 10
    assert 700_000 < gaussian_epsilon(1200.0, 1.0, 1e-5) < 800_000, "large ones do not overflow"
    assert gaussian_epsilon(1.0, 0.0, 1e-5) == math.inf


def test_noise_has_the_norm_that_was_asked_for() -> None:
    random = np.random.default_rng(7)
    rows = random.standard_normal((300, 64)).astype(np.float32) * 9
    clipped = clip_rows(rows, 10.0)
    assert np.linalg.norm(clipped, axis=1).max() <= 10.001
    noise = add_noise(rows, 10.0, 0.5, random) - clipped
    assert np.linalg.norm(noise, axis=1).mean() == pytest.approx(5.0, rel=0.05)


def test_the_whole_bench_on_a_tiny_model(files: ModelFiles, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    random = np.random.default_rng(8)
    lines = ["".join(map(chr, random.integers(97, 123, 128))) for _ in range(24)]
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    bench = PrivacyBench(
        files,
        data,
        "float32",
        depths=(1, 6),
        train=12,
        held_out=3,
        searched=1,
        searched_tokens=3,
        candidates=256,
        noise_levels=(0.0, 3.0),
        altered_depth=2,
    )
    found = run_privacy_bench(bench, lambda _: None)
    assert [row["depth"] for row in found["boundaries"]] == [1, 2, 6]
    assert found["boundaries"][0]["probe_top1"] > 0.5
    assert found["boundaries"][1]["search"]["recovered"] == 1.0
    assert (
        found["rotation"]["rotation"]["from_weights_top1"]
        > 5 * found["rotation"]["rotation"]["as_it_is_top1"]
    )
    assert found["gram"]["recovered"] > 0.5
    assert found["answers"]["next_token_known"] > 0.9
    quiet, loud = found["noise"]["curve"]
    assert quiet["probe_top1"] > loud["probe_top1"]
    assert loud["epsilon_of_one_row"] < loud["epsilon_of_100_rows"]
    assert quiet["epsilon_of_one_row"] is None
    assert "vocabulary" not in (table := privacy_table(found))
    assert "after" in table


def test_too_little_text_is_refused(model: AttackedModel, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(UsageError, match="too few"):
        read_pieces(data, model.checkpoint.tokenizer(), 4)
    with pytest.raises(UsageError, match="cannot read"):
        read_pieces(tmp_path / "none.jsonl", model.checkpoint.tokenizer(), 4)


def test_frames_tell_every_stage_the_tokens_of_their_rows() -> None:
    """Whoever holds layers in between needs no attack at all, as docs/privacy.md says: stages pass on what they got."""
    work = SessionRows(7, 0, (72, 101, 108), 1)
    [segment] = step_frame("tiny#1", 1, Frame(1, (work,), ())).segments
    passed_on = segment_of(work_of(segment))
    assert tuple(unpack_ids(passed_on.ids)) == (72, 101, 108)
