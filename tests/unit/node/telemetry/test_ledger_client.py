"""What a driver tells the coordinator's ledger: until it is heard, and once."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompute.core.errors import CapacityError
from shardcompute.node.driver.ledger_client import LedgerClient
from shardcompute.node.telemetry.quota import QuotaDraw
from shardcompute.node.telemetry.usage import UsageView
from shardcompute.security.api_keys import NO_LIMITS
from shardcompute.wire.control import MOST_USAGE_ROWS, DrawQuota, QuotaGranted, ReportUsage, UsageTaken


class Line:
    """A link to the coordinator that can be cut."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_cut = False
        self.used: list[UsageView] = []
        self.client = LedgerClient(self.send, 3, self.take, answer_s=0.01)

    def send(self, message: Any) -> bool:
        if not self.is_cut:
            self.sent.append(message)
        return not self.is_cut

    def take(self) -> list[UsageView]:
        used, self.used = self.used, []
        return used

    def use(self, tokens: int, keys: int = 1) -> None:
        self.used += [
            UsageView(
                start_s=3600.0,
                span_s=3600,
                key=f"k{number}",
                model="m",
                requests=1,
                prompt_tokens=tokens,
                generated_tokens=0,
            )
            for number in range(keys)
        ]

    def reports(self) -> list[tuple[int, int]]:
        """Number and tokens of each that went out since the last look."""
        found = [each for each in self.sent if isinstance(each, ReportUsage)]
        self.sent.clear()
        return [(each.sequence, sum(row.prompt_tokens for row in each.rows)) for each in found]


def position(key: str = "a", *, held: int, version: int = 1) -> QuotaDraw:
    return QuotaDraw(key, 1, version, 10, held)


def test_a_report_is_told_until_it_is_taken_and_the_next_waits() -> None:
    line = Line()
    line.use(5)
    line.client.turn()
    line.use(7)
    line.client.turn()
    assert line.reports() == [(1, 5), (1, 5)]
    line.client.take(UsageTaken(1))
    line.client.turn()
    line.client.take(UsageTaken(1))  # an old one says nothing of the second
    line.client.turn()
    assert line.reports() == [(2, 7), (2, 7)]
    line.client.take(UsageTaken(2))
    line.client.turn()
    assert line.reports() == []


def test_much_usage_goes_in_several_reports() -> None:
    line = Line()
    line.use(1, keys=MOST_USAGE_ROWS + 3)
    line.client.turn()
    line.client.take(UsageTaken(1))
    line.client.turn()
    assert line.reports() == [(1, MOST_USAGE_ROWS), (2, 3)]


def test_positions_are_told_when_they_change_and_again_while_something_is_held() -> None:
    line = Line()
    line.client.settle(position("a", held=5))
    line.client.settle(position("b", held=0))
    line.client.turn()
    line.client.turn()
    assert [each.key for each in line.sent] == ["a", "b"]
    line.client.turn(is_renewing=True)
    assert [each.key for each in line.sent[2:]] == ["a"]
    assert all(each.number == 0 for each in line.sent)


def test_a_draw_is_answered_or_refused_in_time() -> None:
    line = Line()
    asked = QuotaDraw("a", 1, 1, 0, 0, tokens=9)

    class Answering:
        def __init__(self, answer: QuotaGranted) -> None:
            self.answer = answer

        def __call__(self, message: DrawQuota) -> bool:
            line.client.take(QuotaGranted(999, tokens=1))  # an answer to somebody else
            line.client.take(self.answer)
            return True

    line.client._send = Answering(QuotaGranted(1, 4, 9, 0, 20, 30))
    granted = line.client.draw(asked, NO_LIMITS)
    assert (granted.day, granted.tokens, granted.spent, granted.held) == (4, 9, 20, 30)
    line.client._send = Answering(QuotaGranted(2, error="full"))
    with pytest.raises(CapacityError, match="full"):
        line.client.draw(asked, NO_LIMITS)
    line.client._send = line.send
    for is_cut in (False, True):
        line.is_cut = is_cut
        with pytest.raises(CapacityError, match="the coordinator is away"):
            line.client.draw(asked, NO_LIMITS)


def test_the_last_of_it_is_told_at_the_end() -> None:
    line = Line()
    line.client.start()
    line.use(5)
    line.client.settle(position(held=0))
    line.client.close()
    assert {type(each) for each in line.sent} == {ReportUsage, DrawQuota}
