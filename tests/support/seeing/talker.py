"""Tiny seeing models that can answer: random weights, bytes as tokens, and chat templates like the families' own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from shardcompute.core.generation import GenerationRequest
from shardcompute.models.spec import VisionSpec
from shardcompute.models.vision.chat import encode_with_pictures
from shardcompute.models.vision.prepare import prepare_picture
from shardcompute.node.local.service import LocalService
from support.models.tiny import _quiet, _randomise
from support.seeing.tiny_seeing import SEEING_PICTURES, _processor, pixels_of

LAYERS = 6
_GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


def save_seeing_talker(name: str, folder: Path) -> Path:
    """The same in every run."""
    row, begin, end = marks = _GEMMA if name == "gemma3" else _QWEN
    pipeline = _bytes_and(("<s>", "</s>", *marks))
    ids = {text: pipeline.token_to_id(text) for text in ("<s>", "</s>", *marks)}
    config = _config(name, pipeline.get_vocab_size(), [ids[each] for each in (row, begin, end)])
    torch.manual_seed(sum(name.encode()))
    with _quiet():
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        _randomise(model)
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.25)
        model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(name).to_dict(), default=str))
    image = begin if name == "gemma3" else begin + row + end
    words = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE.replace("IMAGE", image)}
    (folder / "tokenizer.json").write_text(pipeline.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def _config(name: str, vocabulary: int, marks: Sequence[int]) -> Any:
    config = SEEING_PICTURES[name]()
    text = config.text_config
    text.num_hidden_layers, text.vocab_size, text.max_position_embeddings = LAYERS, vocabulary, 512
    text.bos_token_id, text.eos_token_id, text.tie_word_embeddings = 256, 257, False
    config.tie_word_embeddings = False
    text.intermediate_size = 1024  # so that a layer takes far more memory than the tower
    if name == "gemma3":
        text.layer_types = text.layer_types * 2
        config.image_token_index, config.boi_token_index, config.eoi_token_index = marks
    else:
        if text.layer_types:
            text.layer_types = [text.layer_types[0]] * LAYERS
        config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = marks
    return config


def _bytes_and(specials: Sequence[str]) -> Pipeline:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pipeline = Pipeline(models.BPE(letters, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return pipeline


def ask_about(
    service: LocalService, *said: str | tuple[int, int], tokens: int = 16, seed: int = 0, **options: Any
) -> GenerationRequest:
    """A request of texts and pictures: each of the latter of a height and width, drawn by `seed`."""
    vision = service.models()[0].vision
    assert isinstance(vision, VisionSpec)
    parts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in said]
    sizes = [each for each in said if not isinstance(each, str)]
    prepared = [prepare_picture(vision, pixels_of(*size, seed + i)) for i, size in enumerate(sizes)]
    ids, pictures = encode_with_pictures(
        service.tokenizer, vision, [{"role": "user", "content": parts}], prepared
    )
    return replace(GenerationRequest(tuple(ids), tokens, pictures=pictures), **options)
