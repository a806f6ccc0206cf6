"""No field of a receipt can be changed: not by whoever holds it, and what stages signed not even by its driver."""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import SourceError
from shardcompute.security.receipts import (
    BLOCK_ROWS,
    Receipt,
    ReceiptError,
    read_receipt,
    sign_receipt,
    verify_receipt,
    write_receipt,
)
from support.paper_chain import PaperChain, interrupted_receipt, tokens_of

Path = tuple[str | int, ...]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[PaperChain, Receipt]:
    return interrupted_receipt(tmp_path_factory.mktemp("interrupted"))


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place of a JSON document that holds no further ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    is_empty = True
    for key, each in items:
        is_empty = False
        yield from leaves(each, (*path, key))
    if is_empty:
        yield path


def changed(document: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy in which one value is another."""
    made = copy.deepcopy(document)
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = change(holder[path[-1]])
    return made


def another(value: Any) -> Any:
    """A value of the same kind that is as much like this one as can be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value, "0"]
    try:
        raw = bytearray(base64.b64decode(value, validate=True))
        raw[len(raw) // 2] ^= 1
        return base64.b64encode(raw).decode()
    except (ValueError, IndexError):
        middle = len(value) // 2
        return value[:middle] + ("x" if value[middle : middle + 1] != "x" else "y") + value[middle + 1 :]


def is_refused(document: Any, authority: str, sign: Callable[[bytes], bytes] | None = None) -> bool:
    try:
        receipt = read_receipt(msgspec.json.encode(document))
        verify_receipt(receipt if sign is None else sign_receipt(receipt, sign), authority)
    except (ReceiptError, SourceError):
        return True
    return False


def test_every_single_field(interrupted: tuple[PaperChain, Receipt]) -> None:
    _, receipt = interrupted
    document = msgspec.json.decode(write_receipt(receipt))
    assert not is_refused(document, receipt.authority)
    places = list(leaves(document))
    assert len(places) > 300
    passed = [path for path in places if not is_refused(changed(document, path, another), receipt.authority)]
    assert passed == []


def test_what_stages_signed_cannot_be_changed_by_a_driver_that_signs_again(
    interrupted: tuple[PaperChain, Receipt],
) -> None:
    chain, receipt = interrupted
    document = msgspec.json.decode(write_receipt(receipt))
    places = [path for path in leaves(document) if path[0] in ("tokens", "transcripts", "certificates")]
    passed = [
        path
        for path in places
        if not is_refused(changed(document, path, another), receipt.authority, chain.driver.sign)
    ]
    assert passed == []


LISTS: list[Callable[[list[Any], random.Random], list[Any]]] = [
    lambda items, rng: items[: rng.randrange(len(items))],
    lambda items, rng: items[1:],
    lambda items, rng: [*items, items[rng.randrange(len(items))]],
    lambda items, rng: [items[-1], *items[1:-1], items[0]],
]


def lists(value: Any, path: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, list) and value:
        yield path
    for key, each in items:
        yield from lists(each, (*path, key))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_lists_that_are_cut_doubled_or_turned(interrupted: tuple[PaperChain, Receipt], seed: int) -> None:
    _, receipt = interrupted
    rng = random.Random(seed)
    document = msgspec.json.decode(write_receipt(receipt))
    path = rng.choice(list(lists(document)))
    change = rng.choice(LISTS)
    made = changed(document, path, lambda items: change(items, rng))
    assert made == document or is_refused(made, receipt.authority)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_honest_chain_verifies(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is drafted, however far ahead, whoever is lost and when."""
    chain = PaperChain(tmp_path_factory.mktemp("honest"), stages=data.draw(st.integers(1, 4)))
    prompt, answer = data.draw(st.integers(1, 80)), data.draw(st.integers(2, 120))
    chain.begin(tokens_of(prompt + answer), prompt, chunk=data.draw(st.integers(1, 70)))
    rows, end = prompt, prompt + answer - 1
    for _ in range(data.draw(st.integers(0, 3))):
        stop = data.draw(st.integers(rows, end))
        rows = chain.decode(rows, stop, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3)))
        if chain.start < rows < end and len(chain.stages) > 1:
            chain.lose(data.draw(st.integers(0, len(chain.stages) - 1)), rows)
    rows = chain.decode(rows, end, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3)))
    if chain.start == rows:
        return
    chain.cut(rows)
    receipt = chain.receipt()
    verdict = verify_receipt(receipt, receipt.authority)
    lost = {stage.identity.node_id for stage in chain.lost}
    assert {each.node for each in verdict.unsigned} <= lost
    for each in verdict.unsigned:
        assert each.stop - each.start < 3 * BLOCK_ROWS, "whole blocks are signed for soon"
