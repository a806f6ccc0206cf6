"""Outlines of models that nobody has fetched: their sizes are those that publishers list."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardcompute.core.errors import UnknownModelError
from shardcompute.core.settings import Settings
from shardcompute.models.spec import whole
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.held import held_sizes_of_entries
from shardcompute.weights.outline import RECIPES, outline
from shardcompute.weights.sources.catalogue import KnownModel, find_known, known_models
from shardcompute.weights.sources.reference import GgufReference
from shardcompute.weights.sources.resolve import resolve

# What a publisher counts besides: layers that predict further tokens, and vocabularies of small models.
MOST_BESIDES = 0.04


@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.full_name)
def test_shapes_come_to_what_is_listed(known: KnownModel) -> None:
    entries = outline(known).tensors.entries.values()
    parameters = sum(math.prod(entry.shape) for entry in entries)
    assert parameters == pytest.approx(known.parameters, rel=0.005)
    size_bytes = sum(entry.size_bytes for entry in entries)
    assert known.file_bytes * (1 - MOST_BESIDES) <= size_bytes <= known.file_bytes * 1.005


def test_every_way_to_keep_weights_is_used() -> None:
    assert {known.weights for known in known_models()} == set(RECIPES)


def test_rows_that_large_blocks_do_not_divide_take_small_ones() -> None:
    known = find_known("qwen2.5:72b")
    assert known is not None
    types = {
        entry.dtype for name, entry in outline(known).tensors.entries.items() if name.endswith("mlp.down")
    }
    assert types == {"Q5_0", "Q8_0"}


def test_nothing_can_be_read() -> None:
    known = find_known("llama3.2:1b")
    assert known is not None
    checkpoint = outline(known)
    assert checkpoint.stage_bytes(whole(checkpoint.spec)) > 0.98 * known.file_bytes
    with pytest.raises(UnknownModelError, match="not on this machine") as refused:
        checkpoint.tensors.read_rows("norm")
    assert (
        refused.value.hint == "fetch it first: shardcompute pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
    )


def test_an_outline_is_held_as_the_file_is(smollm2_gguf: Path) -> None:
    known = find_known("smollm2:135m")
    assert known is not None
    with open_checkpoint(
        resolve(GgufReference(smollm2_gguf), Settings(data_dir=smollm2_gguf.parent))
    ) as real:
        found, expected = (
            held_sizes_of_entries(each.spec, each.layout, each.tensors.entries, "native", context_length=2048)
            for each in (outline(known), real)
        )
    assert found == expected
