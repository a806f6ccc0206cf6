"""Randomness that depends on nothing but (seed, position, token id).

Every token id of every position has its own Gumbel noise, computed from these three numbers by SplitMix64
used as a counter-based generator: no state, so any machine can make the noise of any token at any time, in
any order, and for as few ids as it needs. The bits are integer arithmetic and equal everywhere; only the two
logarithms of the last step may differ in their last digit between platforms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardcompute.backends.host.splitmix import GAMMA, MASK, MIX_A, MIX_B, mix

_ONE_BITS = np.uint64(0x3FF0000000000000)
_HALF_STEP_BELOW_ONE = 1.0 - 2.0**-53

NOISE_RANGE = 41.0
"""Above the largest difference of two noises: 52 random bits give values from -3.61 to 36.74."""


def derive_seed(seed: int, choice_index: int) -> int:
    """The seed of one of several answers to a request; answer 0 uses the request's own."""
    return seed if choice_index == 0 else mix((seed + choice_index * GAMMA) & MASK)


def random_bits(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """64 random bits for each token id at this position. Any integer is a seed; its low 64 bits count."""
    return _stream(stream_key(seed, position), ids)


def stream_key(seed: int, position: int) -> int:
    """Where the generator of a position starts: 64 bits."""
    return mix((mix(seed & MASK) + (position + 1) * GAMMA) & MASK)


def gumbel_noise(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each token id: adding it to log-probabilities and taking the best samples."""
    bits = random_bits(seed, position, ids)
    # The top 52 bits become the fraction of a number in [1, 2): much faster than converting integers;
    # half a step is added so that neither 0 nor 1 can come out.
    bits >>= np.uint64(12)
    bits |= _ONE_BITS
    values = bits.view(np.float64)
    values -= _HALF_STEP_BELOW_ONE
    for _ in range(2):
        np.log(values, out=values)
        np.negative(values, out=values)
    return values


def _stream(key: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Outputs number `ids` of the SplitMix64 generator that starts at `key`."""
    z = ids.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(GAMMA)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX_A)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX_B)
    z ^= z >> np.uint64(31)
    return z
