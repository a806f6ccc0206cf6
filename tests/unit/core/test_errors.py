"""Errors that cross the wire keep their kind, and nothing else becomes one."""

from __future__ import annotations

import pytest

from shardcompute.core.errors import AuthError, CapacityError, ShardComputeError, rebuild_error


def test_an_error_keeps_its_kind() -> None:
    error = rebuild_error("CapacityError", "full", "wait")
    assert (type(error), error.message, error.hint) == (CapacityError, "full", "wait")


@pytest.mark.parametrize("code", ["", "ValueError", "ClassVar", "rebuild_error", "__name__"])
def test_what_is_no_error_of_ours_becomes_none(code: str) -> None:
    assert type(rebuild_error(code, "odd")) is ShardComputeError
    assert type(rebuild_error(code, "odd", otherwise=AuthError)) is AuthError
