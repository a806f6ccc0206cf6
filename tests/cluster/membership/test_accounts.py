"""Quotas and usage of keys over real links: two drivers and the coordinator count together, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.api.access.metering import KeyMeter
from shardcompute.api.errors import RequestError
from shardcompute.core.settings import Settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.driver.standalone import StandaloneDriver, StandaloneOptions
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.telemetry.history_store import HistoryRange
from shardcompute.security import KeyLimits, KeySummary, Role, parse_token
from support.network.lab_links import wait_until


@contextlib.contextmanager
def opened(options: ClusterOptions, folder: Path) -> Iterator[tuple[Cluster, ClusterAdmin]]:
    with (
        Cluster(options) as cluster,
        ClusterAdmin(cluster, Settings(data_dir=folder), history=folder / "history.sqlite") as admin,
    ):
        yield cluster, admin


def spend(meter: KeyMeter, caller: KeySummary, prompt: int, answer: int) -> int:
    """A generation that uses all it may; the tokens that it was given."""

    async def run() -> int:
        await meter.admit(caller)
        hold = await meter.hold(caller, prompt, answer)
        hold.settle(hold.prompt + hold.answer)
        return hold.prompt + hold.answer

    return asyncio.run(run())


def test_two_drivers_and_a_restart(tmp_path: Path) -> None:
    options = ClusterOptions(tmp_path / "cluster", port=0, join_port=0)
    with contextlib.ExitStack() as drivers:
        with opened(options, tmp_path) as (cluster, admin):
            options = replace(options, port=int(cluster.url.rpartition(":")[2]))
            token = parse_token(cluster.access.create_token())
            two = []
            for name in ("one", "two"):
                credentials, urls = join_cluster(token, tmp_path / name, Role.DRIVER)
                driver = StandaloneDriver(credentials, urls, StandaloneOptions(name=name))
                two.append(drivers.enter_context(contextlib.closing(driver)))
                driver.start()
            key = cluster.access.create_key("a user", limits=KeyLimits(tokens_per_day=300))
            wait_until(lambda: all(driver.find_key(key) for driver in two), "the drivers know the key", 30.0)
            caller = two[0].find_key(key)
            assert caller is not None
            meters = [KeyMeter(driver.quota) for driver in two]
            own = KeyMeter(admin.quota)
            assert spend(meters[0], caller, 10, 90) == 100
            assert spend(own, caller, 10, 40) == 50
            assert spend(meters[1], caller, 10, 190) == 150, "all that is left"
            for meter in (*meters, own):
                with pytest.raises(RequestError, match="0 of the 300 tokens"):
                    spend(meter, caller, 1, 1)
            two[0].pool.requests.usage.add(
                caller.key_id, "m", requests=1, prompt_tokens=10, generated_tokens=90
            )
            two[0].quota.turn()
            wait_until(
                lambda: _told(admin, caller) == 100, "the coordinator counts what a driver answered", 30.0
            )
        # While the coordinator is away a driver goes on with nothing it does not have.
        two[1].pool.requests.usage.add(caller.key_id, "m", requests=1, prompt_tokens=10, generated_tokens=140)
        two[1].quota.turn()
        with opened(options, tmp_path) as (cluster, admin):
            with pytest.raises(RequestError, match="0 of the 300 tokens"):
                spend(KeyMeter(admin.quota), caller, 1, 1)
            wait_until(
                lambda: _told(admin, caller) == 250, "what was used meanwhile is told later, and once", 30.0
            )


def _told(admin: ClusterAdmin, caller: KeySummary) -> int:
    page = admin.history.usage(HistoryRange(limit=100))
    return sum(view.prompt_tokens + view.generated_tokens for view in page.data if view.key == caller.key_id)
