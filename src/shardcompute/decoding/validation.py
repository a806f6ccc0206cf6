"""Whether sampling parameters make sense for a model, said in the words of the API that users know."""

from __future__ import annotations

from shardcompute.core.errors import UsageError
from shardcompute.core.generation import Sampling

_BOUNDS: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 2.0, "0 always takes the most likely token, 1 draws as the model was trained"),
    ("top_p", 0.0, 1.0, "1 keeps every token"),
    ("min_p", 0.0, 1.0, "0 keeps every token"),
    ("presence_penalty", -2.0, 2.0, "0 changes nothing"),
    ("frequency_penalty", -2.0, 2.0, "0 changes nothing"),
)
_MAX_REPETITION_PENALTY = 10.0
_MAX_BIAS = 100.0
_MAX_LOGPROBS = 20


def validate_sampling(sampling: Sampling, vocab_size: int) -> None:
    """UsageError naming the first field that is out of range or does not fit the vocabulary."""
    for field, low, high, hint in _BOUNDS:
        value = getattr(sampling, field)
        if not low <= value <= high:  # also refuses NaN
            raise _invalid(field, f"a value between {low:g} and {high:g}", value, hint)
    if not 0.0 < sampling.repetition_penalty <= _MAX_REPETITION_PENALTY:
        expected = f"a value above 0 and at most {_MAX_REPETITION_PENALTY:g}"
        raise _invalid("repetition_penalty", expected, sampling.repetition_penalty, "1 changes nothing")
    if sampling.top_k < 0:
        raise _invalid("top_k", "an integer of at least 0", sampling.top_k, "0 keeps every token")
    if not -(1 << 63) <= sampling.seed < 1 << 64:
        raise _invalid("seed", "a 64-bit integer", sampling.seed, "any signed or unsigned one will do")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= _MAX_LOGPROBS:
        expected = f"an integer between 0 and {_MAX_LOGPROBS}"
        raise _invalid("logprobs", expected, sampling.logprobs, "ask for fewer alternatives")
    _validate_bias(sampling, vocab_size)


def _validate_bias(sampling: Sampling, vocab_size: int) -> None:
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            expected = f"token ids between 0 and {vocab_size - 1}"
            raise _invalid("logit_bias", expected, token, "use ids of this model's own tokenizer")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            expected = f"values between {-_MAX_BIAS:g} and {_MAX_BIAS:g}"
            raise _invalid("logit_bias", expected, bias, f"{-_MAX_BIAS:g} all but bans a token")


def _invalid(field: str, expected: str, value: float, hint: str) -> UsageError:
    return UsageError(f"Invalid '{field}': expected {expected}, but got {value} instead.", hint=hint)
