"""The tiny checkpoint with a tokenizer of bytes as a GGUF file, its matrices in 8-bit blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from support.models.tiny_checkpoint import save_tiny_llama
from support.models.tiny_gguf import tiny_gguf

_NORMAL, _CONTROL = 1, 3
_TWO_SPACES = "ĠĠ"  # a list of merges must not be empty


def save_tiny_text_gguf(folder: Path) -> Path:
    """The same in every run."""
    metadata, tensors = tiny_gguf("llama", save_tiny_llama(folder / "checkpoint"))
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, _TWO_SPACES, "</s>"])
    writer.add_token_types([_NORMAL] * (len(letters) + 1) + [_CONTROL])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors.items():
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
