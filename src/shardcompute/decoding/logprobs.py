"""Log-probabilities of a token and of the most likely alternatives.

They are the log-softmax at temperature 1 of the logits after penalties and biases, before temperature and
filters: what the model thinks of the tokens, comparable between requests of any temperature.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shardcompute.core.generation import TokenChoice
from shardcompute.decoding.ranking import best_token, largest


def score_token(logits: npt.NDArray[np.float32], token: int, top: int, position: int) -> TokenChoice:
    """`token` with its log-probability and those of the `top` most likely tokens, likelier first, then by id.

    Forbidden tokens (logit -inf) are never among the alternatives; `token` itself may score -inf.
    """
    best = float(logits[best_token(logits, position)])
    relative = _relative_to_best(logits, best)
    # Single precision terms are exact enough for a sum in double precision, and many times cheaper.
    log_total = math.log(float(np.exp(relative).sum(dtype=np.float64)))
    likely = largest(relative, top)
    alternatives = tuple(
        (int(other), float(relative[other]) - log_total) for other in likely if relative[other] > -np.inf
    )
    return TokenChoice(token, float(relative[token]) - log_total, alternatives)


def _relative_to_best(logits: npt.NDArray[np.float32], best: float) -> npt.NDArray[np.float32]:
    if best == np.inf:
        return np.where(logits == np.inf, np.float32(0), np.float32(-np.inf))
    with np.errstate(over="ignore"):  # too far below the best to have any probability
        return logits - np.float32(best)
