"""Cards: what travels about a model before its weights do."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.core.errors import CorruptModelError
from shardcompute.core.settings import Settings
from shardcompute.models.spec import Stage, whole
from shardcompute.weights.card import Card, decode_card, encode_card, make_card
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve
from support.models.tiny import save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny("llama-tied", tmp_path_factory.mktemp("llama"))
    with open_checkpoint(resolve(parse_reference(str(folder)), Settings(folder))) as opened:
        yield opened


@pytest.fixture(scope="module")
def card(checkpoint: Checkpoint) -> Card:
    return _card(checkpoint)


def _card(checkpoint: Checkpoint, **changes: Any) -> Card:
    parts = {"content": "these weights", "kind": "checkpoint", "form": "native", **changes}
    return make_card("tiny", checkpoint.spec, checkpoint.layout, checkpoint.tensors.entries, **parts)


def test_a_card_survives_the_journey(card: Card) -> None:
    assert decode_card(encode_card(card)) == card


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe-mixed", "phi3-longrope", "gemma3"])
def test_every_kind_of_spec_and_layout_survives(name: str, tmp_path: Path) -> None:
    files = resolve(parse_reference(str(save_tiny(name, tmp_path))), Settings(tmp_path))
    with open_checkpoint(files) as checkpoint:
        card = _card(checkpoint)
        assert decode_card(encode_card(card)) == card
        assert (card.spec, card.layout.layers) == (checkpoint.spec, checkpoint.layout.layers)


def test_the_fingerprint_tells_weights_apart_that_look_alike(checkpoint: Checkpoint, card: Card) -> None:
    others = [
        _card(checkpoint, content="a fine-tune of them"),
        _card(checkpoint, form="int8"),
        make_card(
            "tiny",
            replace(checkpoint.spec, norm_eps=1e-3),
            checkpoint.layout,
            checkpoint.tensors.entries,
            content="these weights",
        ),
    ]
    assert len({card.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert _card(checkpoint).fingerprint == card.fingerprint


def test_the_name_and_place_of_a_model_do_not_change_its_fingerprint(
    checkpoint: Checkpoint, card: Card
) -> None:
    moved = {
        name: replace(entry, offset=entry.offset + 64) for name, entry in checkpoint.tensors.entries.items()
    }
    other = make_card("alias", checkpoint.spec, checkpoint.layout, moved, content="these weights")
    assert other.fingerprint == card.fingerprint


def test_stages_share_the_bytes_and_a_tied_head_counts_at_both_ends(
    checkpoint: Checkpoint, card: Card
) -> None:
    everything = sum(entry.size_bytes for entry in checkpoint.tensors.entries.values())
    assert card.stage_bytes(whole(card.spec)) == everything
    first, middle, last = (Stage(i, i + 1, 3) for i in range(3))
    assert card.embedding_bytes == card.head_bytes
    assert sum(map(card.stage_bytes, (first, middle, last))) == everything + card.head_bytes
    assert card.stage_bytes(middle) == card.layer_bytes(1)
    assert card.stage_bytes(Stage(0, 1, 3)) == card.layer_bytes(0) + card.embedding_bytes


def test_nothing_but_what_the_decoder_reads_is_on_the_card(checkpoint: Checkpoint) -> None:
    entries = dict(checkpoint.tensors.entries)
    stray = next(iter(entries.values()))
    entries["stray"] = replace(stray, name="stray")
    card = make_card("tiny", checkpoint.spec, checkpoint.layout, entries, content="")
    assert set(card.entries) == set(checkpoint.tensors.entries)


def _renamed(card: dict[str, Any]) -> None:
    entry = next(iter(card["entries"].values()))
    entry["name"] = "another"


def _resized(card: dict[str, Any]) -> None:
    next(iter(card["entries"].values()))["size_bytes"] += 4


def _negative(card: dict[str, Any]) -> None:
    next(iter(card["entries"].values()))["shape"] = [-1, 4]


def _without_layer(card: dict[str, Any]) -> None:
    card["layout"]["layers"].pop()


def _without_tensor(card: dict[str, Any]) -> None:
    card["entries"].pop(next(iter(card["entries"])))


def _without_head(card: dict[str, Any]) -> None:
    del card["layout"]["model"]["head"]


def _other_content(card: dict[str, Any]) -> None:
    card["content"] = "other weights"


def _wrong_type(card: dict[str, Any]) -> None:
    card["spec"]["heads"] = "many"


DAMAGES = [
    _renamed,
    _resized,
    _negative,
    _without_layer,
    _without_tensor,
    _without_head,
    _other_content,
    _wrong_type,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_card_that_contradicts_itself_is_refused(
    card: Card, damage: Callable[[dict[str, Any]], None]
) -> None:
    content = json.loads(zlib.decompress(encode_card(card)))
    damage(content)
    with pytest.raises(CorruptModelError, match="card"):
        decode_card(zlib.compress(json.dumps(content).encode()))


@pytest.mark.parametrize("text", [b"", b"{}", b"[1, 2]", b"{" * 5000, b"\xff\xfe"])
def test_what_is_no_card_is_refused(text: bytes) -> None:
    with pytest.raises(CorruptModelError):
        decode_card(zlib.compress(text))
    with pytest.raises(CorruptModelError):
        decode_card(text)


def test_a_card_cut_short_or_blown_up_is_refused(card: Card) -> None:
    with pytest.raises(CorruptModelError):
        decode_card(encode_card(card)[:-8])
    with pytest.raises(CorruptModelError, match="too long"):
        decode_card(zlib.compress(bytes(65 << 20), 1))
