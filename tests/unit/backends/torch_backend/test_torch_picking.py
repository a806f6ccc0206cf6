"""Picking on the device picks what the host's sampler picks, or says that it is not sure."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.generation import Grammar, Sampling
from shardcompute.decoding import TokenHistory, build_sampler, gumbel_noise
from shardcompute.decoding.noise import stream_key
from shardcompute.decoding.pick_rules import pick_rule

torch = pytest.importorskip("torch")
from shardcompute.backends.torch.picking import MOST_SORTED, _noise, can_draw, draw_rows  # noqa: E402

samplings = st.builds(
    Sampling,
    temperature=st.floats(0.01, 3.0),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**64),
)


def make_rows(kind: str, count: int, size: int, seed: int) -> Any:
    chance = np.random.default_rng(seed)
    rows = chance.standard_normal((count, size)) * 4
    if kind == "equals":
        rows = np.round(rows)
    if kind == "forbidden":
        rows[:, chance.random(size) < 0.5] = -np.inf
        rows[:, 0] = 0
    if kind == "flat":
        rows *= 1e-3
    return rows.astype(np.float32)


def on_host(row: Any, sampling: Sampling, position: int) -> int:
    return build_sampler(sampling)(row, TokenHistory(), position).id


@settings(max_examples=300, deadline=None)
@given(
    st.lists(samplings, min_size=1, max_size=5),
    st.sampled_from(["plain", "equals", "forbidden", "flat"]),
    st.sampled_from([1, 2, 300, 3000]),
    st.integers(0, 2**32),
    st.integers(0, 1 << 20),
)
def test_tokens_are_the_host_sampler_s(
    chosen: list[Sampling], kind: str, size: int, seed: int, position: int
) -> None:
    rows = make_rows(kind, len(chosen), size, seed)
    rules = [pick_rule(sampling, position) for sampling in chosen]
    drawn = [index for index, rule in enumerate(rules) if rule is not None and can_draw(rule)]
    if not drawn:
        return
    tokens, unsure = draw_rows(torch.from_numpy(rows[drawn]), [rules[index] for index in drawn])  # type: ignore[misc]
    for at, index in enumerate(drawn):
        if not unsure[at]:
            assert int(tokens[at]) == on_host(rows[index], chosen[index], position)


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95, "min_p": 0.01}],
)
def test_common_samplings_are_mostly_sure(changes: dict[str, Any]) -> None:
    rows = make_rows("plain", 64, 4000, 1)
    chosen = [Sampling(temperature=0.8, seed=seed, **changes) for seed in range(64)]
    rules = [rule for sampling in chosen if (rule := pick_rule(sampling, 9)) is not None]
    tokens, unsure = draw_rows(torch.from_numpy(rows), rules)
    assert int(unsure.sum()) <= 2
    picked = [on_host(row, sampling, 9) for row, sampling in zip(rows, chosen, strict=True)]
    assert [t for t, u in zip(tokens.tolist(), unsure, strict=True) if not u] == [
        t for t, u in zip(picked, unsure, strict=True) if not u
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["plain", "equals", "forbidden", "flat"])
@pytest.mark.parametrize("size", [1, 300, 5000, 128256])
def test_the_kernel_draws_what_the_host_s_sampler_draws(kind: str, size: int) -> None:
    from shardcompute.backends.torch.kernels.tokens import TokenKernels

    chance = random.Random(size)
    chosen = [
        Sampling(
            temperature=chance.uniform(0.01, 3.0),
            top_k=chance.choice([0, 0, 1, 2, 40, 1000]),
            top_p=chance.choice([1.0, 0.05, 0.5, 0.9, 0.999]),
            min_p=chance.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
            seed=chance.randrange(1 << 64),
        )
        for _ in range(48)
    ]
    rows, slots = make_rows(kind, len(chosen), size, 5), [*range(1, 48), 0]
    rows[7, size // 2] = np.nan
    rules = [rule for sampling in chosen if (rule := pick_rule(sampling, 77)) is not None]
    device = torch.device("cuda")
    picked = torch.zeros(48, dtype=torch.int64, device=device)
    kernels = TokenKernels(device, {"PDL": False})
    drawn = kernels.draw(torch.from_numpy(rows).to(device), rules, slots, picked).cpu()
    assert picked[slots].tolist() == drawn[:, 0].tolist()
    assert drawn[7, 1] == 1
    for row, sampling, (token, unsure) in zip(rows, chosen, drawn.tolist(), strict=True):
        if not unsure:
            assert token == on_host(row, sampling, 77)
    if size <= 300:
        # Of many tokens, as likely as each other, every one is near to top-p's edge.
        assert drawn[:, 1].sum() <= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 300, 5000, 128256])
def test_the_kernel_finds_the_best_token(size: int) -> None:
    from shardcompute.backends.torch.kernels.tokens import TokenKernels

    rows = make_rows("equals", 9, size, 2)
    rows[3, size // 2], rows[4], rows[5, size // 3] = np.nan, -np.inf, np.inf
    device = torch.device("cuda")
    picked = torch.zeros(9, dtype=torch.int64, device=device)
    slots = torch.arange(8, -1, -1, dtype=torch.int32, device=device)
    best = TokenKernels(device, {"PDL": False}).best(torch.from_numpy(rows).to(device), slots, picked).cpu()
    np.testing.assert_array_equal(best[:, 0], rows.max(axis=1))
    sound = [0, 1, 2, 4, 5, 6, 7, 8]
    assert best[sound, 1].tolist() == rows[sound].argmax(axis=1).tolist()
    assert picked.flip(0).tolist() == best[:, 1].long().tolist()


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_rows_are_left_to_the_host(broken: float) -> None:
    rows = make_rows("plain", 2, 50, 0)
    rows[1, 7] = broken
    rule = pick_rule(Sampling(temperature=1.0, top_p=0.9), 3)
    assert rule is not None
    assert draw_rows(torch.from_numpy(rows), [rule, rule])[1].tolist() == [False, True]


def test_mass_beyond_what_is_sorted_is_unsure() -> None:
    rows = np.zeros((1, 3 * MOST_SORTED), dtype=np.float32)
    rule = pick_rule(Sampling(temperature=1.0, top_p=0.9), 3)
    assert rule is not None
    assert draw_rows(torch.from_numpy(rows), [rule])[1].tolist() == [True]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_noise_is_the_host_s(seed: int, position: int) -> None:
    key = stream_key(seed, position)
    keys = torch.tensor([[key - (1 << 64) if key >> 63 else key]])
    ours = _noise(keys, 100)[0].numpy()
    np.testing.assert_allclose(ours, gumbel_noise(seed, position, np.arange(100)), rtol=1e-13, atol=1e-13)


def test_what_only_the_host_can_pick() -> None:
    host_only: list[dict[str, Any]] = [
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"grammar": Grammar("regex", "a+")},
    ]
    for changes in host_only:
        assert pick_rule(Sampling(**changes), 1) is None
    greedy = pick_rule(Sampling(seed=5, top_p=0.5), 1)
    assert greedy is not None
    assert greedy.temperature == 0.0
    cold = pick_rule(Sampling(temperature=1e-9, min_p=0.5), 1)
    assert cold is not None
    assert (cold.temperature, cold.least_score) == (1e-6, math.log(0.5))
