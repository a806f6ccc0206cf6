"""Failures of commands as people read them."""

from __future__ import annotations

from shardcompute.cli.console import Screen
from shardcompute.core.errors import CapacityError, ShardComputeError


def show_error(screen: Screen, error: ShardComputeError) -> None:
    screen.say(f"error: {error.message}", "red")
    if error.hint:
        screen.say(f"hint: {error.hint}")


def explain(error: Exception) -> ShardComputeError:
    """Anything that a command may raise, as an error with a message, a hint and an exit code."""
    if isinstance(error, ShardComputeError):
        return error
    if isinstance(error, MemoryError):
        return CapacityError(
            "the memory of this machine is used up",
            hint="try a smaller --context or --kv-memory, or --weights int4",
        )
    return ShardComputeError(
        f"something unforeseen happened: {type(error).__name__}: {error}",
        hint="put --debug after shardcompute to see where, and please report it",
    )
