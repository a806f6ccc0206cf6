from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import msgspec
import pytest

from shardcompute.core.errors import AuthError, ForbiddenError, SourceError, UsageError
from shardcompute.security import JoinToken, Role, TokenBook, parse_token
from shardcompute.security.token_book import MOST_COMPANIONS

FINGERPRINT = "ab" * 32
NODE, OTHER = "n" + "a" * 20, "n" + "b" * 20
TOKEN = JoinToken(
    token_id="00112233aabb",
    secret=bytes(range(20)),
    addresses=("192.168.1.5:7070", "[fd00::5]:7070", "box.example:443"),
    fingerprint=FINGERPRINT,
    cluster="home",
)


def make(book: TokenBook = TokenBook(), **changes: object) -> tuple[TokenBook, JoinToken]:  # noqa: B008
    options = {"addresses": ["10.0.0.1:7070"], "fingerprint": FINGERPRINT, "cluster": "home", "now_s": 1000.0}
    return book.create(**(options | changes))  # type: ignore[arg-type]


def test_token_is_one_short_printable_word_that_parses_to_itself() -> None:
    text = TOKEN.encode()
    assert text.startswith("sc1.")
    assert text.isascii()
    assert not set(text) & set(" \n'\"$&|;")
    assert len(text) < 200
    assert parse_token(text) == TOKEN


def test_white_space_of_wrapped_lines_is_forgiven() -> None:
    text = TOKEN.encode()
    assert parse_token(f"  {text[:60]}\r\n    {text[60:]}\n") == TOKEN


def test_secret_is_neither_in_repr_nor_in_str() -> None:
    for shown in (repr(TOKEN), str(TOKEN)):
        assert "secret" not in shown
        assert repr(TOKEN.secret) not in shown


def spell(payload: object) -> str:
    """A token with a right checksum around any content."""
    content = msgspec.msgpack.encode(payload)
    checksum = hashlib.sha256(b"shardcompute join token" + content).digest()[:4]
    return "sc1." + base64.urlsafe_b64encode(content + checksum).decode().rstrip("=")


FIELDS = [
    1,
    bytes.fromhex(TOKEN.token_id),
    TOKEN.secret,
    list(TOKEN.addresses),
    bytes.fromhex(FINGERPRINT),
    "home",
]


def test_spelling_by_hand_gives_the_same_token() -> None:
    assert spell(FIELDS) == TOKEN.encode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("hello", "does not start with sc1."),
        ("sk-sc-abcdefgh", "is an API key"),
        ("sc2.AAAA", "has version 2"),
        ("sc1.", "lacks some"),
        ("sc1.A", "lacks some"),
        ("sc1.AAAA", "checksum"),
        ("sc1.ä", "characters that no token has"),
        ("sc1.\ud800", "characters that no token has"),
        ("sc1." + "A" * 5000, "far too long"),
        (TOKEN.encode()[:-1], "lacks some|checksum"),
        (TOKEN.encode() * 2, "characters that no token has"),
        (spell([]), "unknown content"),
        (spell({"version": 1}), "unknown content"),
        (spell([2, *FIELDS[1:]]), "unknown content"),
        (spell([*FIELDS, "more"]), "unknown content"),
        (spell([*FIELDS[:2], b"short", *FIELDS[3:]]), "unknown content"),
        (spell([*FIELDS[:3], [], *FIELDS[4:]]), "1 to 8 addresses"),
        (spell([*FIELDS[:3], ["a:1"] * 9, *FIELDS[4:]]), "1 to 8 addresses"),
        (spell([*FIELDS[:3], ["host"], *FIELDS[4:]]), "not an address"),
        (spell([*FIELDS[:3], ["host:70000"], *FIELDS[4:]]), "not an address"),
        (spell([*FIELDS[:3], ["user@host:1"], *FIELDS[4:]]), "not an address"),
        (spell([*FIELDS[:5], "Not A Name"]), "name of a cluster"),
        (
            spell(msgspec.Raw(msgspec.msgpack.encode(FIELDS).replace(b"\x96\x01", b"\x96\xcc\x01", 1))),
            "altered",
        ),
    ],
)
def test_what_is_no_token_is_refused_with_a_hint(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_token(text)
    assert caught.value.hint
    assert TOKEN.encode()[10:40] not in str(caught.value)


def test_token_works_for_the_machine_that_shows_its_secret() -> None:
    book, token = make(max_uses=2)
    book, record = book.use(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=1001.0)
    assert record.used_by == (NODE,)
    assert record.roles == {Role.WORKER}
    assert book.summaries(1001.0)[0].used_by == (NODE,)


def test_unknown_id_and_wrong_secret_look_the_same() -> None:
    book, token = make()
    messages = []
    for token_id, secret in ((token.token_id, bytes(20)), ("000000000000", token.secret), ("", b"")):
        with pytest.raises(AuthError) as caught:
            book.verify(token_id, secret, node_id=NODE, role=Role.WORKER, now_s=1001.0)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1


def test_all_zero_digest_of_unknown_ids_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.security.token_book._digest", lambda secret: bytes(32))
    with pytest.raises(AuthError, match="not known"):
        TokenBook().verify("x", b"", node_id=NODE, role=Role.WORKER, now_s=0.0)


def test_spent_tokens_say_what_is_wrong_only_to_who_has_the_secret() -> None:
    book, token = make(max_uses=1, life_s=60.0)
    used, _ = book.use(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=1000.0)
    revoked = book.revoke(token.token_id)
    for state, now_s, said in (
        (book, 1060.0, "has expired"),
        (used, 1001.0, "is used up"),
        (revoked, 1001.0, "is revoked"),
    ):
        with pytest.raises(AuthError, match=said):
            state.verify(token.token_id, token.secret, node_id=OTHER, role=Role.WORKER, now_s=now_s)
        with pytest.raises(AuthError, match="not known"):
            state.verify(token.token_id, bytes(20), node_id=OTHER, role=Role.WORKER, now_s=now_s)


def test_node_whose_answer_got_lost_may_ask_again_until_the_end() -> None:
    book, token = make(max_uses=1, life_s=60.0)
    book, _ = book.use(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=1000.0)
    again, record = book.use(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=1059.0)
    assert again == book
    assert record.used_by == (NODE,)
    with pytest.raises(AuthError, match="has expired"):
        book.use(token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=1060.0)
    with pytest.raises(AuthError, match="is revoked"):
        book.revoke(token.token_id).use(
            token.token_id, token.secret, node_id=NODE, role=Role.WORKER, now_s=1001.0
        )


def test_a_machine_uses_a_token_once_however_many_nodes_it_is() -> None:
    book, token = make(max_uses=1)
    gpus = [f"n{number}" for number in range(MOST_COMPANIONS)]

    def use(book: TokenBook, node: str, companions: list[str]) -> TokenBook:
        used, record = book.use(
            token.token_id, token.secret, node_id=node, role=Role.WORKER, now_s=1001.0, companions=companions
        )
        assert record.used_by == (NODE,)
        return used

    book = use(book, NODE, gpus[:2])
    # The answer got lost, a card was added, one of them comes back alone: all of them are this machine.
    assert use(book, NODE, gpus[:2]) == book
    book = use(book, NODE, gpus)
    assert use(book, gpus[0], []) == book
    assert book.used_by(gpus[0], 1001.0) == (token.token_id,)
    with pytest.raises(AuthError, match="at most 32 nodes"):
        use(book, NODE, ["one more"])
    with pytest.raises(AuthError, match="is used up"):
        use(book, OTHER, [])
    assert TokenBook.from_bytes(book.to_bytes()) == book


def test_token_admits_only_its_roles() -> None:
    book, token = make(roles=[Role.DRIVER])
    book.verify(token.token_id, token.secret, node_id=NODE, role=Role.DRIVER, now_s=1000.0)
    for role in (Role.WORKER, Role.COORDINATOR):
        with pytest.raises(ForbiddenError, match=f"does not admit a {role}"):
            book.verify(token.token_id, token.secret, node_id=NODE, role=role, now_s=1000.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"roles": []},
        {"roles": [Role.COORDINATOR]},
        {"life_s": 0.0},
        {"life_s": -1.0},
        {"life_s": float("nan")},
        {"life_s": float("inf")},
        {"max_uses": 0},
        {"addresses": []},
        {"fingerprint": "00"},
        {"cluster": "Home"},
    ],
)
def test_tokens_that_make_no_sense_are_not_made(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        make(**changes)


def test_ids_in_a_book_differ_even_when_chance_repeats() -> None:
    drawn = iter([b"\1" * 6, b"s" * 20, b"\1" * 6, b"\2" * 6, b"t" * 20])
    book, _ = make(random_bytes=lambda size: next(drawn))
    book, _ = make(book, random_bytes=lambda size: next(drawn))
    assert [record.token_id for record in book.records] == ["01" * 6, "02" * 6]


def test_secrets_are_drawn_anew_for_every_token() -> None:
    book, first = make()
    _, second = make(book)
    assert first.secret != second.secret
    assert len(first.secret) * 8 >= 128


def test_list_and_record_hold_no_secret() -> None:
    book, token = make()
    book, _ = make(book)
    book = book.revoke(token.token_id)
    assert [line.state for line in book.summaries(1000.0)] == ["revoked", "valid"]
    for shown in (repr(book), repr(book.summaries(1000.0)), str(book.to_bytes())):
        assert token.secret.hex() not in shown
        assert repr(token.secret)[2:-1] not in shown
    assert not hasattr(book.summaries(0.0)[0], "secret_sha256")


def test_revoking_an_unknown_token_is_an_error() -> None:
    with pytest.raises(UsageError, match="no join token"):
        make()[0].revoke("ffff")


def test_book_survives_writing() -> None:
    book, token = make(life_s=10.0, max_uses=3, roles=[Role.WORKER, Role.DRIVER])
    book, _ = book.use(token.token_id, token.secret, node_id=NODE, role=Role.DRIVER, now_s=1000.0)
    book, _ = make(book, life_s=20.0)
    assert TokenBook.from_bytes(book.to_bytes()) == book


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc1", b"\x80", b"\x90", b"\x91\x01", b"\x92\x02\x90", b"\x93\x01\x90\x90", b"\x92\x01\x91\x80"],
)
def test_damaged_book_is_refused(content: bytes) -> None:
    with pytest.raises(SourceError, match="damaged"):
        TokenBook.from_bytes(content)


def test_book_in_which_a_revocation_got_lost_is_refused() -> None:
    book, token = make()
    version, records = msgspec.msgpack.decode(book.revoke(token.token_id).to_bytes())
    assert records[0].pop("is_revoked") is True
    with pytest.raises(SourceError, match="is_revoked"):
        TokenBook.from_bytes(msgspec.msgpack.encode([version, records]))


def test_altered_token_object_is_checked() -> None:
    with pytest.raises(UsageError):
        replace(TOKEN, secret=b"short")
