from __future__ import annotations

import re

import pytest

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.security import KeyBook, KeyLimits, KeyRole


def test_key_is_accepted_until_it_is_revoked() -> None:
    book, key = KeyBook().create(label="laptop", now_s=5.0)
    book, other = book.create(label="phone", now_s=6.0)
    assert re.fullmatch(r"sk-sc-[A-Za-z0-9]{40}", key)
    assert key != other
    assert book.verify(key, now_s=9.0).label == "laptop"
    revoked = book.revoke(book.verify(key, now_s=9.0).key_id)
    with pytest.raises(AuthError, match="has been revoked"):
        revoked.verify(key, now_s=9.0)
    assert revoked.verify(other, now_s=9.0).label == "phone"
    assert book.verify(key, now_s=9.0)


@pytest.mark.parametrize("change", ["", "x", "sk-sc-", "\ud800", "ключ", None])
def test_anything_else_is_not_accepted(change: str | None) -> None:
    book, key = KeyBook().create(label="", now_s=5.0)
    offered = key[:-1] if change is None else change
    with pytest.raises(AuthError, match="not one that this server accepts"):
        book.verify(offered, now_s=9.0)
    with pytest.raises(AuthError):
        KeyBook().verify(key, now_s=9.0)


def test_list_shows_ids_that_do_not_help_to_guess_a_key() -> None:
    book, key = KeyBook().create(label="laptop", now_s=5.0)
    book, _ = book.create(label="phone", now_s=6.0)
    first, second = book.summaries()
    assert (first.label, first.created_at_s, first.is_revoked) == ("laptop", 5.0, False)
    assert first.key_id == key[:14]
    assert book.summaries(second.key_id) == (second,)
    assert book.summaries("sk-sc-!") == ()
    for shown in (repr(book), repr(book.summaries()), str(book.to_bytes())):
        assert key[14:] not in shown


def test_keys_are_revoked_by_id_with_or_without_prefix_and_never_by_chance() -> None:
    book, key = KeyBook().create(label="", now_s=5.0)
    for key_id in (key[:14], key[6:14]):
        assert book.revoke(key_id).summaries()[0].is_revoked
    for wrong in ("", "sk-sc-", key[:13], "sk-sc-!!!!!!!!"):
        with pytest.raises(UsageError, match="no API key"):
            book.revoke(wrong)


def test_a_whole_key_pasted_as_an_id_is_not_repeated() -> None:
    book, key = KeyBook().create(label="", now_s=5.0)
    with pytest.raises(UsageError) as caught:
        book.revoke(key)
    assert key[14:] not in str(caught.value)


def test_ids_differ_even_when_chance_repeats() -> None:
    drawn = iter("a" * 40 + "a" * 40 + "b" * 40)
    book, _ = KeyBook().create(label="", now_s=5.0, choose=lambda letters: next(drawn))
    book, second = book.create(label="", now_s=5.0, choose=lambda letters: next(drawn))
    assert second == "sk-sc-" + "b" * 40


@pytest.mark.parametrize("label", ["two\nlines", "x" * 81])
def test_labels_that_break_the_list_are_refused(label: str) -> None:
    with pytest.raises(UsageError, match="label"):
        KeyBook().create(label=label, now_s=5.0)


def test_book_survives_writing() -> None:
    book, key = KeyBook().create(label="laptop", now_s=5.0)
    book = book.create(label="phone", now_s=6.0)[0].revoke(key[:14])
    assert KeyBook.from_bytes(book.to_bytes()) == book
    for damaged in (b"", b"\xc1", b"\x80", b"\x90", b"\x91\x01", b"\x92\x01\x91\x80"):
        with pytest.raises(SourceError, match="damaged"):
            KeyBook.from_bytes(damaged)


def test_roles_include_those_before_them() -> None:
    use, observe, operate = KeyRole
    assert [use.includes(each) for each in KeyRole] == [True, False, False]
    assert [observe.includes(each) for each in KeyRole] == [True, True, False]
    assert all(operate.includes(each) for each in KeyRole)


def test_a_key_only_uses_models_unless_it_is_made_for_more() -> None:
    book, key = KeyBook().create(label="", now_s=5.0)
    assert book.verify(key, now_s=5.0).role is KeyRole.USE
    book, key = book.create(label="", now_s=5.0, role=KeyRole.OPERATE)
    assert book.verify(key, now_s=5.0).role is KeyRole.OPERATE


def test_a_key_expires() -> None:
    book, key = KeyBook().create(label="", now_s=5.0, life_s=10.0)
    assert book.verify(key, now_s=14.9).expires_at_s == 15.0
    with pytest.raises(AuthError, match="has expired"):
        book.verify(key, now_s=15.0)
    for wrong in (0.0, -1.0, float("inf"), float("nan"), 1e12):
        with pytest.raises(UsageError, match="lives"):
            KeyBook().create(label="", now_s=5.0, life_s=wrong)


@pytest.mark.parametrize(
    "limits",
    [
        KeyLimits(models=()),
        KeyLimits(models=("",)),
        KeyLimits(models=("x" * 513,)),
        KeyLimits(models=tuple("abcdefgh" * 9)),
        KeyLimits(requests_per_minute=0),
        KeyLimits(requests_per_minute=10**9),
        KeyLimits(tokens_per_day=0),
    ],
)
def test_limits_that_are_none_are_refused(limits: KeyLimits) -> None:
    with pytest.raises(UsageError):
        KeyBook().create(label="", now_s=5.0, limits=limits)


def test_limits_are_for_those_who_use_models() -> None:
    with pytest.raises(UsageError, match="no limits"):
        KeyBook().create(label="", now_s=5.0, role=KeyRole.OBSERVE, limits=KeyLimits(tokens_per_day=5))


def test_roles_and_limits_survive_writing() -> None:
    limits = KeyLimits(("org/tiny",), 6, 1000)
    book, key = KeyBook().create(label="", now_s=5.0, limits=limits, life_s=60.0)
    book = book.create(label="", now_s=5.0, role=KeyRole.OBSERVE)[0]
    read = KeyBook.from_bytes(book.to_bytes())
    assert read == book
    assert read.verify(key, now_s=6.0).limits == limits
