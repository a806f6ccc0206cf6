"""The one code that is good: how it is typed, how it ends, and what guessers come to."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import AuthError, QueueFullError, UsageError
from shardcompute.security.pairing.codes import (
    CODE_LIFE_S,
    MOST_BEGUN,
    MOST_WRONG,
    WRONG_SPAN_S,
    PairingDesk,
    parse_code,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> PairingDesk:
    return PairingDesk(clock)


def test_a_code_can_be_typed_with_spaces_and_dashes(desk: PairingDesk) -> None:
    code = desk.open()
    assert parse_code(code.shown) == parse_code(f" {code.digits[:3]}-{code.digits[3:]}\n") == code.digits


def test_every_wrong_digit_and_swap_is_caught_before_it_costs_the_try() -> None:
    digits = PairingDesk(random_below=lambda bound: 9_081_726).open().digits
    slips = [f"{digits[:at]}{other}{digits[at + 1 :]}" for at in range(8) for other in "0123456789"]
    slips += [f"{digits[:at]}{digits[at + 1]}{digits[at]}{digits[at + 2 :]}" for at in range(7)]
    for slip in {*slips} - {digits}:
        with pytest.raises(UsageError, match="no pairing code") as refused:
            parse_code(slip)
        assert slip not in str(refused.value)


@pytest.mark.parametrize("text", ["", "1234567", "12345678901", "abcdefgh", "１２３４５６７８", "9" * 10_000])
def test_what_is_no_code(text: str) -> None:
    with pytest.raises(UsageError, match="no pairing code"):
        parse_code(text)


def test_no_code_is_good_unless_somebody_made_one(desk: PairingDesk) -> None:
    with pytest.raises(AuthError, match="lets nobody pair now"):
        desk.begin()


def test_a_code_is_good_once(desk: PairingDesk) -> None:
    code = desk.open()
    assert desk.begin() is code
    desk.settle(code, is_right=True)
    with pytest.raises(AuthError, match="lets nobody pair now"):
        desk.begin()


def test_a_guesser_has_one_try_however_many_exchanges_were_begun(desk: PairingDesk) -> None:
    code = desk.open()
    for _ in range(5):
        assert desk.begin() is code
    with pytest.raises(AuthError, match="is wrong"):
        desk.settle(code, is_right=False)
    with pytest.raises(AuthError, match="lets nobody pair now"):
        desk.settle(code, is_right=True)


def test_exchanges_that_show_no_proof_use_nothing_up(desk: PairingDesk) -> None:
    code = desk.open()
    for _ in range(5):
        desk.begin()
    desk.settle(code, is_right=True)


def test_a_code_runs_out_and_is_replaced_by_the_next(desk: PairingDesk, clock: Clock) -> None:
    first = desk.open()
    second = desk.open()
    with pytest.raises(AuthError):
        desk.settle(first, is_right=True)
    assert desk.begin() is second
    clock.now_s += CODE_LIFE_S
    with pytest.raises(AuthError):
        desk.settle(second, is_right=True)
    with pytest.raises(AuthError):
        desk.begin()


def test_after_some_wrong_codes_none_is_made_for_a_while(desk: PairingDesk, clock: Clock) -> None:
    for _ in range(MOST_WRONG):
        with pytest.raises(AuthError):
            desk.settle(desk.open(), is_right=False)
        clock.now_s += 60
    with pytest.raises(QueueFullError, match="somebody may be guessing"):
        desk.open()
    clock.now_s += WRONG_SPAN_S
    desk.open()


def test_strangers_begin_few_exchanges_a_minute(desk: PairingDesk, clock: Clock) -> None:
    desk.open()
    for _ in range(MOST_BEGUN):
        desk.begin()
    with pytest.raises(QueueFullError, match="Too many machines"):
        desk.begin()
    clock.now_s += 60.0
    desk.begin()


def test_a_code_is_not_in_its_repr(desk: PairingDesk) -> None:
    code = desk.open()
    assert code.digits not in repr(code)
