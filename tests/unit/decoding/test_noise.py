from __future__ import annotations

import math

import numpy as np
import pytest

from shardcompute.decoding import noise
from shardcompute.decoding.noise import derive_seed, gumbel_noise, random_bits


def test_stream_is_splitmix64() -> None:
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # the published sequence of seed 0
    assert noise._stream(0, np.arange(3)).tolist() == known


def test_bits_are_those_of_every_release() -> None:
    # Frozen: a change here changes every seeded answer and splits swarms of mixed versions.
    assert random_bits(42, 7, np.array([0, 1, 151_935])).tolist() == [
        14997879488065225630,
        16850096134969094481,
        17480675905595329447,
    ]


def test_noise_is_made_of_the_top_52_bits() -> None:
    ids = np.arange(200)
    uniforms = [((bits >> 12) + 0.5) / 2**52 for bits in random_bits(9, 1, ids).tolist()]
    expected = [-math.log(-math.log(uniform)) for uniform in uniforms]
    assert gumbel_noise(9, 1, ids).tolist() == pytest.approx(expected, rel=1e-12)


def test_noise_belongs_to_the_id_not_to_its_place() -> None:
    whole = gumbel_noise(3, 5, np.arange(1000))
    some = np.array([999, 0, 17, 500])
    assert gumbel_noise(3, 5, some).tolist() == whole[some].tolist()


@pytest.mark.parametrize(("seed", "position"), [(3, 6), (4, 5), (-3, 5), (3 + (1 << 63), 5)])
def test_seed_and_position_both_matter(seed: int, position: int) -> None:
    ids = np.arange(100)
    assert not np.intersect1d(random_bits(3, 5, ids), random_bits(seed, position, ids)).size


def test_seeds_count_by_their_low_64_bits() -> None:
    ids = np.arange(10)
    assert random_bits(-1, 0, ids).tolist() == random_bits((1 << 64) - 1, 0, ids).tolist()


def test_extreme_bits_stay_finite_and_within_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, (1 << 64) - 1], dtype=np.uint64)
    monkeypatch.setattr(noise, "random_bits", lambda *_: extremes.copy())
    low, high = gumbel_noise(0, 0, np.arange(2)).tolist()
    assert low == pytest.approx(-math.log(53 * math.log(2)))
    assert high == pytest.approx(53 * math.log(2))
    assert high - low < noise.NOISE_RANGE


def test_noise_has_the_mean_and_variance_of_a_gumbel() -> None:
    sample = gumbel_noise(1, 1, np.arange(200_000))
    assert sample.mean() == pytest.approx(0.5772, abs=0.01)
    assert sample.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_derived_seeds_differ_and_the_first_is_the_request_s_own() -> None:
    seeds = [derive_seed(-7, index) for index in range(50)]
    assert seeds[0] == -7
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 1 << 64 for seed in seeds[1:])
