"""Randomness that depends on nothing but (seed, position, token id).

Every token id of every position has its own Gumbel noise, computed from these three numbers by SplitMix64
used as a counter-based generator: no state, so any machine can make the noise of any token at any time, in
any order, and for as few ids as it needs. The bits are integer arithmetic and equal everywhere; only the two
logarithms of the last step may differ in their last digit between platforms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_ONE_BITS = np.uint64(0x3FF0000000000000)
_HALF_STEP_BELOW_ONE = 1.0 - 2.0**-53

NOISE_RANGE = 41.0
"""Above the largest difference of two noises: 52 random bits give values from -3.61 to 36.74."""


def derive_seed(seed: int, choice_index: int) -> int:
    """The seed of one of several answers to a request; answer 0 uses the request's own."""
    return seed if choice_index == 0 else _mix((seed + choice_index * _GAMMA) & _MASK)


def random_bits(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """64 random bits for each token id at this position. Any integer is a seed; its low 64 bits count."""
    key = _mix((_mix(seed & _MASK) + (position + 1) * _GAMMA) & _MASK)
    return _stream(key, ids)


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
    z *= np.uint64(_GAMMA)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_A)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_B)
    z ^= z >> np.uint64(31)
    return z


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX_A & _MASK
    z = (z ^ (z >> 27)) * _MIX_B & _MASK
    return z ^ (z >> 31)
