"""Sampling is pure, its filters keep what they promise, histories roll back, and drafts change nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardcompute.core.generation import Sampling, TokenChoice
from shardcompute.decoding import TokenHistory, build_sampler, choose_token
from shardcompute.decoding.filters import candidates_of, keep_top_p

VOCAB = 24
# Coarse values make ties common.
logits_rows = arrays.arrays(
    np.float32, VOCAB, elements=st.sampled_from([-np.inf, -30.0, -2.0, -0.5, 0.0, 0.5, 1.0, 1.0009766, 4.0])
).filter(lambda row: bool(np.isfinite(row).any()))
seeds = st.integers(-(1 << 63), (1 << 64) - 1)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    seed=seeds,
    logprobs=st.none() | st.integers(0, 20),
)


@settings(max_examples=150)
@given(logits_rows, samplings, tokens, tokens, st.integers(0, 1 << 20))
def test_same_inputs_give_the_same_choice_and_it_is_allowed(
    logits: np.ndarray, sampling: Sampling, prompt: list[int], generated: list[int], position: int
) -> None:
    history, detour = TokenHistory(prompt), TokenHistory(prompt)
    history.extend(generated)
    detour.extend([*generated, 3, 3, 7, 1])
    detour.truncate(len(history))
    before = logits.copy()
    choice = choose_token(logits, sampling, history, position)
    build_sampler(sampling)(np.zeros(VOCAB, dtype=np.float32), history, position + 1)  # leaves no trace
    assert choose_token(logits.copy(), sampling, detour, position) == choice
    assert np.array_equal(logits, before)
    assert logits[choice.id] > -np.inf


@settings(max_examples=100)
@given(st.lists(logits_rows, min_size=1, max_size=5), samplings, st.randoms(use_true_random=False))
def test_rows_may_be_sampled_in_any_order(rows: list[np.ndarray], sampling: Sampling, random: object) -> None:
    sample = build_sampler(sampling)
    history = TokenHistory([1, 2])
    straight = [sample(row, history, at) for at, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled: dict[int, TokenChoice] = {at: sample(rows[at], history, at) for at in order}
    assert [shuffled[at] for at in range(len(rows))] == straight


@settings(max_examples=100)
@given(logits_rows, samplings)
def test_greedy_is_argmax_and_so_is_top_k_of_one(logits: np.ndarray, sampling: Sampling) -> None:
    best = int(np.argmax(logits))
    assert choose_token(logits, Sampling(), TokenHistory(), 0).id == best
    assert (
        choose_token(logits, Sampling(temperature=1.0, top_k=1, seed=sampling.seed), TokenHistory(), 0).id
        == best
    )
    assert (
        choose_token(logits, Sampling(temperature=1.0, top_p=0.0, seed=sampling.seed), TokenHistory(), 0).id
        == best
    )


@settings(max_examples=150)
@given(
    arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(-20, 20, width=16)),
    st.floats(0, 0.9999),
)
def test_top_p_keeps_the_smallest_leading_set_that_reaches_p(logits: np.ndarray, p: float) -> None:
    everything = candidates_of(logits, float(logits.max()), 1.0)
    kept = keep_top_p(everything, p)
    order = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    assert sorted(order[: kept.ids.size]) == kept.ids.tolist()
    weights = np.exp(logits.astype(np.float64) - logits.max())
    masses = weights[order] / weights.sum()
    assert masses[: kept.ids.size].sum() >= p - 1e-5
    assert kept.ids.size == 1 or masses[: kept.ids.size - 1].sum() < p + 1e-5


@settings(max_examples=150)
@given(tokens, st.lists(st.integers(0, VOCAB - 1) | st.just(-1), max_size=60), st.data())
def test_history_counts_as_a_recount_would(prompt: list[int], moves: list[int], data: st.DataObject) -> None:
    history, generated = TokenHistory(prompt), list[int]()
    for move in moves:
        if move >= 0:
            history.append(move)
            generated.append(move)
        else:
            del generated[data.draw(st.integers(0, len(generated))) :]
            history.truncate(len(prompt) + len(generated))
    counts = Counter(generated)
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {
        token: counts[token] for token in {*prompt, *generated}
    }
    assert len(history) == len(prompt) + len(generated)


def toy_logits(context: list[int]) -> np.ndarray:
    """A stand-in for a model: logits that depend on the last two tokens."""
    mixed = np.arange(VOCAB) * 7 + 13 * context[-1] + 5 * context[-2]
    return ((mixed % 11) / 2.0).astype(np.float32)


@settings(max_examples=60)
@given(samplings, st.lists(tokens, min_size=1, max_size=6))
def test_drafts_of_any_quality_give_the_tokens_of_a_plain_run(
    sampling: Sampling, guesses: list[list[int]]
) -> None:
    sample, prompt, length = build_sampler(sampling), [1, 2], 16
    plain_history = TokenHistory(prompt)
    plain = list(prompt)
    while len(plain) < length:
        plain.append(sample(toy_logits(plain), plain_history, len(plain)).id)
        plain_history.append(plain[-1])

    history, drafted = TokenHistory(prompt), list(prompt)
    for step in range(length):
        guess = guesses[step % len(guesses)]
        # Half of each guess is right, so that some drafts are accepted.
        drafts = [*plain[len(drafted) : len(drafted) + len(guess) // 2], *guess]
        chosen, known = [], len(drafted)
        for count in range(len(drafts) + 1):
            chosen.append(sample(toy_logits([*drafted, *drafts[:count]]), history, known + count).id)
            history.extend(drafts[count : count + 1])
        wrong = [index for index, draft in enumerate(drafts) if draft != chosen[index]]
        accepted = min(wrong, default=len(drafts))
        history.truncate(known + accepted)
        history.append(chosen[accepted])
        drafted += chosen[: accepted + 1]
    assert drafted[:length] == plain
    assert len(history) == len(drafted)
