"""How activations become bytes and back: tensor codecs, chosen by the name that a frame carries.

| name          | bytes a value        | what is lost, at most                                                       |
| ------------- | -------------------- | --------------------------------------------------------------------------- |
| exact         | 4                    | nothing                                                                     |
| bf16          | 2                    | 2⁻⁸ of a value, 2⁻¹³⁴ near zero                                             |
| fp16          | 2                    | 2⁻¹¹ of a value, 2⁻²⁵ near zero; magnitudes beyond 65504 become 65504       |
| int8          | 1 + 2/64             | 1/252 of the largest magnitude among the same 64 columns of the row         |
| int8-outliers | 1 + 34/width         | 1/252 of the row's ninth largest magnitude; the eight largest as in fp16    |
| fp8           | 1 + 4/width          | 2⁻⁴ of a value, or 2⁻¹⁸ of the row's largest magnitude if that is more      |
| …+deflate     | as without, or fewer | nothing more                                                                |

Rows are encoded one by one: what becomes of a row never depends on the rows beside it, so batching changes no
token, whatever the codec, and a row that is sent again is sent in the same bits. NaN stays NaN. The codecs with
scales make a whole row (`int8`: a whole block of 64) NaN if it has a value that is NaN, infinite or beyond 3e38,
so that a computation that broke is seen instead of being rounded into something plausible.

A new codec is one class and one line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardcompute.core.errors import LinkError
from shardcompute.wire.codecs.codec import Codec
from shardcompute.wire.codecs.fp8 import Fp8Rows
from shardcompute.wire.codecs.int8 import Int8OutlierRows, Int8Rows
from shardcompute.wire.codecs.plain import Bf16Rows, ExactRows, Fp16Rows
from shardcompute.wire.codecs.rows import Activations, PackedRows, RowCodec

__all__ = ["CODECS", "Activations", "Codec", "PackedRows", "RowCodec", "find_codec"]

_EXACT, _BF16, _INT8, _OUTLIERS = ExactRows(), Bf16Rows(), Int8Rows(), Int8OutlierRows()

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            Codec(_EXACT),
            Codec(_EXACT, deflated_word_bytes=4),
            Codec(_BF16),
            Codec(_BF16, deflated_word_bytes=2),
            Codec(Fp16Rows()),
            Codec(_INT8),
            Codec(_INT8, deflated_word_bytes=1),
            Codec(_OUTLIERS),
            Codec(_OUTLIERS, deflated_word_bytes=1),
            Codec(Fp8Rows()),
        )
    }
)


def find_codec(name: str) -> Codec:
    """The codec of that name, or `LinkError`."""
    codec = CODECS.get(name)
    if codec is None:
        raise LinkError(
            f"there is no tensor codec {name!r} here, only {', '.join(CODECS)}",
            hint="run the same release on every node",
        )
    return codec
