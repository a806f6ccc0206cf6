"""Join tokens, API keys and redaction under arbitrary input and at the edges of the clock."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.core.errors import AuthError, SourceError, UsageError
from shardcompute.security import (
    JoinToken,
    KeyBook,
    Revocations,
    Role,
    TokenBook,
    check_cluster_name,
    parse_token,
    redact,
)

NODE = "n" + "a" * 20
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
hosts = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True) | st.just("[fd00::1]")
addresses = st.builds(lambda host, port: f"{host}:{port}", hosts, st.integers(1, 65_535))
clusters = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
tokens = st.builds(
    JoinToken,
    token_id=st.binary(min_size=6, max_size=6).map(bytes.hex),
    secret=st.binary(min_size=20, max_size=20),
    addresses=st.lists(addresses, min_size=1, max_size=8).map(tuple),
    fingerprint=st.binary(min_size=32, max_size=32).map(bytes.hex),
    cluster=clusters,
)
any_text = st.text(st.characters(), max_size=200)
token_like = st.text(ALPHABET, max_size=200).map("sc1.".__add__)


@given(tokens)
def test_tokens_parse_to_themselves(token: JoinToken) -> None:
    assert parse_token(token.encode()) == token


@settings(max_examples=300)
@given(any_text | token_like)
def test_arbitrary_text_is_refused_with_our_error_alone(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_token(text)
    assert caught.value.hint


@settings(max_examples=300)
@given(tokens, st.data())
def test_token_with_any_slip_is_refused(token: JoinToken, data: st.DataObject) -> None:
    text = token.encode()
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from(ALPHABET))
    slip = data.draw(st.sampled_from(["change", "drop", "add", "swap", "cut"]))
    altered = {
        "change": text[:at] + letter + text[at + 1 :],
        "drop": text[:at] + text[at + 1 :],
        "add": text[:at] + letter + text[at:],
        "swap": text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
        "cut": text[:at],
    }[slip]
    if altered == text:
        return
    with pytest.raises(UsageError):
        parse_token(altered)


@given(tokens, st.data())
def test_last_letter_has_one_spelling(token: JoinToken, data: st.DataObject) -> None:
    """Base64 leaves bits of the last letter unused; they must not make a second token."""
    text = token.encode()
    letter = data.draw(st.sampled_from(ALPHABET).filter(lambda one: one != text[-1]))
    with pytest.raises(UsageError):
        parse_token(text[:-1] + letter)


def make(now_s: float, life_s: float, max_uses: int | None = None) -> tuple[TokenBook, JoinToken]:
    return TokenBook().create(
        addresses=["h:1"], fingerprint="00" * 32, cluster="c", now_s=now_s, life_s=life_s, max_uses=max_uses
    )


@given(st.floats(0, 4e9), st.floats(1e-3, 366 * 86_400.0), st.floats(allow_nan=True))
def test_token_is_good_before_its_end_and_never_after(now_s: float, life_s: float, asked_s: float) -> None:
    book, token = make(now_s, life_s)
    end_s = now_s + life_s
    for moment_s in (
        asked_s,
        now_s,
        end_s,
        math.nextafter(end_s, -math.inf),
        math.nextafter(end_s, math.inf),
    ):
        if moment_s < end_s:
            book.verify(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=moment_s)
        else:
            with pytest.raises(AuthError, match="has expired"):
                book.verify(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=moment_s)


@given(st.text(max_size=20), st.binary(max_size=30))
def test_guesses_open_nothing(token_id: str, secret: bytes) -> None:
    book, token = make(0.0, 60.0)
    for offered_id in (token_id, token.token_id):
        with pytest.raises(AuthError, match="not known"):
            book.verify(offered_id, secret, node_id=NODE, role=Role.WORKER, now_s=1.0)


@given(st.integers(1, 5), st.lists(st.sampled_from("abcdefgh"), max_size=20))
def test_no_more_nodes_enter_than_allowed_whoever_asks_how_often(max_uses: int, callers: list[str]) -> None:
    book, token = make(0.0, 60.0, max_uses)
    admitted: set[str] = set()
    for caller in callers:
        may_enter = caller in admitted or len(admitted) < max_uses
        try:
            book, _ = book.use(token.token_id, token.secret, node_id=caller, role=Role.WORKER, now_s=1.0)
            assert may_enter
            admitted.add(caller)
        except AuthError:
            assert not may_enter
    assert set(book.records[0].used_by) == admitted
    assert TokenBook.from_bytes(book.to_bytes()) == book


@given(st.binary(max_size=100), st.data())
def test_damaged_books_are_refused_with_our_error_alone(junk: bytes, data: st.DataObject) -> None:
    book = make(0.0, 60.0)[0].to_bytes()
    at = data.draw(st.integers(0, len(book)))
    for content in (junk, book[:at] + junk + book[at:], book[:at]):
        for kind in (TokenBook, KeyBook, Revocations):
            with contextlib.suppress(SourceError):
                # What can be read after all can be written, too.
                written = kind.from_bytes(content).to_bytes()
                assert kind.from_bytes(written).to_bytes() == written


@given(any_text)
def test_guessed_api_keys_open_nothing(guess: str) -> None:
    book, key = KeyBook().create(label="", now_s=0.0)
    for offered in (guess, guess + key, key + guess):
        if offered != key:
            with pytest.raises(AuthError):
                book.verify(offered, now_s=1.0)


@given(any_text)
def test_cluster_names_are_safe_in_addresses_or_refused(name: str) -> None:
    try:
        check_cluster_name(name)
    except UsageError:
        return
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@settings(max_examples=200)
@given(any_text, any_text, tokens, st.text(ALPHABET, min_size=12, max_size=40))
def test_no_secret_survives_redaction_whatever_stands_around_it(
    before: str, after: str, token: JoinToken, opaque: str
) -> None:
    key = KeyBook().create(label="", now_s=0.0)[1]
    pem = f"-----BEGIN PRIVATE KEY-----\n{opaque}\n-----END PRIVATE KEY-----\n"
    for secret, text in (
        (token.encode()[4:], token.encode()),
        (key[14:], key),
        (opaque, f"Authorization: Bearer {opaque}"),
        (opaque, f"authorization=bearer {opaque}"),
        (opaque, pem),
    ):
        masked = redact(before + text + after)
        if secret not in before + after:
            assert secret not in masked
        assert redact(masked) == masked
