"""A model's tokenizer and chat template in one piece, for drivers that hold none of the model's files.

It is an attachment of the served weights (see `weights.attached`): the files themselves where the model has some, or
the keys of a GGUF file that its tokenizer is made from. So the same tokenizer comes out on every machine.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from shardcompute.core.errors import CorruptModelError
from shardcompute.weights.checkpoint import TOKENIZER_FILES, Checkpoint, make_tokenizer, model_eos

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer

TOKENIZER = "tokenizer"
"""What the attachment is called."""
_GGUF_KEYS = ("tokenizer.", "general.name")
_LIMIT_BYTES = 512 << 20


class _PackedTokenizer(msgspec.Struct, frozen=True):
    model: str
    gguf: dict[str, Any] | None = None
    files: dict[str, str] = {}
    eos: Any = None


def pack_tokenizer(checkpoint: Checkpoint) -> bytes:
    if checkpoint.files.kind == "gguf":
        metadata = checkpoint.tensors.metadata
        kept = {key: value for key, value in metadata.items() if key.startswith(_GGUF_KEYS)}
        packed = _PackedTokenizer(checkpoint.name, gguf=kept)
    else:
        texts = {name: checkpoint.files.read_text(name) for name in TOKENIZER_FILES}
        files = {name: text for name, text in texts.items() if text is not None}
        packed = _PackedTokenizer(checkpoint.name, files=files, eos=model_eos(checkpoint.config))
    return zlib.compress(msgspec.msgpack.encode(packed))


def unpack_tokenizer(content: bytes) -> Tokenizer:
    """CorruptModelError for what is no packed tokenizer."""
    try:
        unpacker = zlib.decompressobj()
        packed = msgspec.msgpack.decode(unpacker.decompress(content, _LIMIT_BYTES), type=_PackedTokenizer)
    except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptModelError(
            f"a tokenizer cannot be read: {error}", hint="run the same release on every node"
        ) from error
    if packed.gguf is not None:
        from shardcompute.models.tokenizer import Tokenizer

        return Tokenizer.from_gguf(packed.gguf)
    return make_tokenizer(packed.model, packed.files.get, packed.eos)
