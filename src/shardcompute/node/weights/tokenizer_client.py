"""A model's tokenizer from afar, for drivers that hold none of its files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcompute.core.errors import CorruptModelError
from shardcompute.node.weights.client import RemoteTensors, fetch_card
from shardcompute.node.weights.pieces import Supplier
from shardcompute.weights.attached import read_attachment
from shardcompute.weights.tokenizer_pack import TOKENIZER, unpack_tokenizer
from shardcompute.wire import Link

if TYPE_CHECKING:
    from shardcompute.models.tokenizer import Tokenizer


def fetch_tokenizer(dial: Callable[[], Link], node: str, model: str) -> Tokenizer:
    """From `node`, which serves the model. LinkError or SourceError where it cannot be had."""
    card = fetch_card(dial, model)
    with RemoteTensors(card, [Supplier(node, dial, is_origin=True)]) as tensors:
        content = read_attachment(tensors, TOKENIZER)
    if content is None:
        raise CorruptModelError(
            f"{node} serves {model} without its tokenizer", hint="run one release on all nodes"
        )
    return unpack_tokenizer(content)
