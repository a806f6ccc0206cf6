"""A rope's sines and cosines for every position of a context, computed one way for every backend."""

from __future__ import annotations

import numpy as np

from shardcompute.backends.host.rotation import rotation_tables
from shardcompute.backends.matrix import Float32
from shardcompute.models.spec import Rope


def rope_tables(rope: Rope, context_length: int) -> tuple[Float32, Float32]:
    """Cosines and sines `[context_length, entries / 2]`, with amplitude and growth worked into them.

    The served context decides between short and long frequencies, not the text so far: keys that are kept were turned
    once, and those of one session must all be turned alike, in whatever pieces and on whatever machines.
    """
    frequencies = rope.inverse_frequencies
    if rope.long_frequencies is not None and context_length > rope.long_beyond:
        frequencies = rope.long_frequencies
    cosines, sines = rotation_tables(frequencies, rope.amplitude, context_length)
    growth = rope.growth
    if growth is None:
        return cosines, sines
    steps = np.floor((np.arange(context_length) + growth.offset) / growth.step)
    factors = (1 + growth.slope * np.log1p(steps)).astype(np.float32)[:, None]
    return cosines * factors, sines * factors
