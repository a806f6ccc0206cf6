"""CPace against the vectors that draft-irtf-cfrg-cpace publishes for X25519 and SHA-512, and its refusals."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import AuthError
from shardcompute.security.pairing.cpace import (
    OwnShare,
    agree,
    begin_exchange,
    generator,
    generator_string,
    intermediate_key,
    lv_cat,
    proof_of,
)

CODE = b"Password"
CHANNEL = bytes.fromhex("6f630b425f726573706f6e6465720b415f696e69746961746f72")
SESSION = bytes.fromhex("7e4b4791d6a8ef019b936c79fb7f2c57")
SCALAR_A = bytes.fromhex("21b4f4bd9e64ed355c3eb676a28ebedaf6d8f17bdc365995b319097153044080")
SCALAR_B = bytes.fromhex("848b0779ff415f0af4ea14df9dd1d3c29ac41d836c7808896c4eba19c51ac40a")
SHARE_A = "1b02dad6dbd29a07b6d28c9e04cb2f184f0734350e32bb7e62ff9dbcfdb63d15"
SHARE_B = "20cda5955f82c4931545bcbf40758ce1010d7db4db2a907013d79c7a8fcf957f"
SECRET = bytes.fromhex("f97fdfcfff1c983ed6283856a401de3191ca919902b323c5f950c9703df7297a")
KEY = (
    "a051ee5ee2499d16da3f69f430218b8ea94a18a45b67f9e86495b382c33d14a5"
    "c38cecc0cc834f960e39e0d1bf7d76b9ef5d54eecc5e0f386c97ad12da8c3d5f"
)
LOW_ORDER = (
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)


def test_lists_of_parts_are_written_as_the_draft_says() -> None:
    assert lv_cat(b"1234", b"5", b"", b"678").hex() == "043132333401350003363738"
    assert lv_cat(bytes(127))[:1] == b"\x7f"
    assert lv_cat(bytes(128))[:2] == b"\x80\x01"


def test_the_generator_is_that_of_the_draft() -> None:
    text = generator_string(CODE, CHANNEL, SESSION)
    assert len(text) == 172
    assert text.startswith(bytes.fromhex("0843506163653235350850617373776f72646d") + bytes(109))
    expected = "64e8099e3ea682cfdc5cb665c057ebb514d06bf23ebc9f743b51b82242327074"
    assert generator(CODE, CHANNEL, SESSION).hex() == expected


def test_shares_and_the_key_are_those_of_the_draft() -> None:
    a = begin_exchange(CODE, CHANNEL, SESSION, SCALAR_A)
    b = begin_exchange(CODE, CHANNEL, SESSION, SCALAR_B)
    assert (a.public.hex(), b.public.hex()) == (SHARE_A, SHARE_B)
    transcript = lv_cat(a.public, b"ADa") + lv_cat(b.public, b"ADb")
    assert intermediate_key(SESSION, SECRET, transcript).hex() == KEY
    # Ours are without associated data, and with the secret point of the draft.
    expected = intermediate_key(SESSION, SECRET, lv_cat(a.public, b"") + lv_cat(b.public, b""))
    assert agree(a, SESSION, a.public, b.public) == expected
    assert agree(b, SESSION, a.public, b.public) == expected


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_that_would_make_the_key_known_are_refused(point: str) -> None:
    own = OwnShare(
        bytes(32), bytes.fromhex("af46e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449aff")
    )
    with pytest.raises(AuthError, match="does not pair as it should"):
        agree(own, SESSION, b"initiator", bytes.fromhex(point))


@pytest.mark.parametrize(
    "other", [(b"Passwork", CHANNEL, SESSION), (CODE, b"x", SESSION), (CODE, CHANNEL, bytes(16))]
)
def test_another_code_channel_or_session_is_another_key(other: tuple[bytes, bytes, bytes]) -> None:
    a, b = begin_exchange(CODE, CHANNEL, SESSION), begin_exchange(*other)
    assert agree(a, SESSION, a.public, b.public) != agree(b, other[2], a.public, b.public)


def test_each_side_has_a_proof_of_its_own() -> None:
    assert proof_of(b"key", "initiator") != proof_of(b"key", "responder")


def test_nothing_secret_is_in_its_repr() -> None:
    share = begin_exchange(CODE, CHANNEL, SESSION, SCALAR_A)
    assert repr(SCALAR_A) not in repr(share)
    assert repr(share.public) in repr(share)
