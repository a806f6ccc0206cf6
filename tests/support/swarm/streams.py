"""Answers under way in a swarm, while something befalls it."""

from __future__ import annotations

from shardcompute.node.driver.standalone import StandaloneDriver
from support.models.requests import mixture
from support.swarm.lab import Alone, LabSwarm, Talk


def start_streams(
    lab: LabSwarm, alone: Alone, count: int = 4, tokens: int = 200, driver: StandaloneDriver | None = None
) -> list[Talk]:
    """So many answers of a driver (None: the coordinator's own), each of which has begun."""
    talks = [lab.start(request, driver=driver) for request in mixture(alone, count, tokens)]
    lab.wait_until(lambda: all(talk.tokens for talk in talks), "tokens of all streams")
    return talks


def assert_undisturbed(lab: LabSwarm, alone: Alone, talks: list[Talk]) -> None:
    """All of them end as they would have in one process, and leave nothing behind."""
    for talk in talks:
        assert talk.result() == alone.answer(talk.request)
    lab.wait_quiet()
