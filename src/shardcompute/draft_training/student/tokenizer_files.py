"""Tokenizer files of a checkpoint folder: those that a model has, or what the keys of its GGUF file come to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import decoders

from shardcompute.models.gguf_vocabulary import SPACE_MARK, GgufVocabulary, Spelling, read_gguf_vocabulary
from shardcompute.weights.checkpoint import TOKENIZER_FILES, Checkpoint

_TEMPLATE_KEY = "tokenizer.chat_template"


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Texts by name, from which the same tokenizer is made (`Tokenizer.from_hf`)."""
    if checkpoint.files.kind != "gguf":
        texts = {name: checkpoint.files.read_text(name) for name in TOKENIZER_FILES}
        return {name: text for name, text in texts.items() if text is not None}
    metadata = checkpoint.tensors.metadata
    vocabulary = read_gguf_vocabulary(metadata)
    files = {
        "tokenizer.json": _pipeline_json(vocabulary),
        "tokenizer_config.json": json.dumps(_config(vocabulary, metadata), ensure_ascii=False),
    }
    template = metadata.get(_TEMPLATE_KEY)
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files


def _pipeline_json(vocabulary: GgufVocabulary) -> str:
    """With a decoder, which a GGUF file's pipeline does without and others read the spelling from."""
    pipeline = vocabulary.pipeline
    if vocabulary.spelling is Spelling.BYTE_LEVEL:
        pipeline.decoder = decoders.ByteLevel()
    else:
        steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        pipeline.decoder = decoders.Sequence(steps)
    return str(pipeline.to_str())


def _config(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        "bos_token": vocabulary.bos_id,
        "eos_token": metadata.get("tokenizer.ggml.eos_token_id", min(vocabulary.eos_ids, default=None)),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    texts = {
        name: vocabulary.pipeline.id_to_token(i) for name, i in named.items() if isinstance(i, int) and i >= 0
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        **{name: text for name, text in texts.items() if text is not None},
    }
