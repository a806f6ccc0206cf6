from __future__ import annotations

import numpy as np
import pytest

from shardcompute.core.generation import Sampling
from shardcompute.decoding.penalties import (
    Logits,
    TokenHistory,
    build_adjusters,
    penalise_generated,
    penalise_repetition,
)


def counts_of(history: TokenHistory) -> dict[int, int]:
    return dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))


def adjusted(logits: Logits, sampling: Sampling, history: TokenHistory) -> list[float]:
    for adjust in build_adjusters(sampling):
        adjust(logits, history)
    return [float(value) for value in logits]


def test_history_counts_generated_tokens_and_knows_prompt_ones() -> None:
    history = TokenHistory([5, 6, 5])
    history.extend([6, 9, 9])
    assert len(history) == 6
    assert history.prompt_length == 3
    assert counts_of(history) == {5: 0, 6: 1, 9: 2}
    assert history.generated == (6, 9, 9)


def test_truncate_undoes_tokens_but_never_the_prompt() -> None:
    history = TokenHistory([5, 6])
    history.extend([5, 9, 8, 9])
    history.truncate(4)
    assert counts_of(history) == {5: 1, 6: 0, 9: 1}
    history.truncate(2)
    assert counts_of(history) == {5: 0, 6: 0}
    with pytest.raises(ValueError, match="2 of them prompt"):
        history.truncate(1)
    with pytest.raises(ValueError):
        history.truncate(3)


def test_history_outgrows_its_buffers() -> None:
    history = TokenHistory()
    history.extend(range(1000))
    history.truncate(500)
    history.extend([3, 2000])
    assert counts_of(history) == {**dict.fromkeys(range(500), 1), 3: 2, 2000: 1}


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    history = TokenHistory([0])
    history.extend([1, 1])
    logits = np.array([4, -4, 4, -4], dtype=np.float32)
    penalise_repetition(logits, history, 2.0)
    assert logits.tolist() == [2, -8, 4, -4]


def test_presence_and_frequency_ignore_the_prompt() -> None:
    history = TokenHistory([0, 0])
    history.extend([1, 2, 2, 2])
    logits = np.zeros(4, dtype=np.float32)
    penalise_generated(logits, history, presence=0.5, frequency=0.25)
    assert logits.tolist() == [0, -0.75, -1.25, 0]


def test_steps_apply_as_repetition_then_presence_then_bias() -> None:
    history = TokenHistory()
    history.append(0)
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 10.0, 2: -5.0})
    assert adjusted(np.array([4, 0, 0], dtype=np.float32), sampling, history) == [11, 0, -5]


def test_forbidden_tokens_stay_forbidden() -> None:
    history = TokenHistory([0])
    history.append(0)
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=-2.0, logit_bias={0: 100.0})
    assert adjusted(np.array([-np.inf, 1], dtype=np.float32), sampling, history) == [-np.inf, 1]


def test_huge_logits_scale_without_a_warning() -> None:
    logits = np.array([-3e38, 3e38], dtype=np.float32)
    penalise_repetition(logits, TokenHistory([0, 1]), 10.0)
    assert logits[0] == -np.inf
    assert logits[1] == pytest.approx(3e37, rel=1e-6)


def test_neutral_sampling_needs_no_steps() -> None:
    assert build_adjusters(Sampling()) == ()


def test_a_penalty_that_is_zero_in_32_bits_divides_nothing_by_it() -> None:
    logits = np.array([0.0, 1.0, -1.0], dtype=np.float32)
    penalise_repetition(logits, TokenHistory([0, 1, 2]), 5e-324)
    assert logits[0] == 0.0
    assert logits[1] > 1e37
    assert -1e-37 < logits[2] <= 0.0
