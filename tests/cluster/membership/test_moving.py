"""Machines that move: another address amid streams, and a coordinator that is found elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.swarm.lab import Alone, swarm
from support.swarm.streams import assert_undisturbed, start_streams

ELSEWHERE = "127.0.0.2"
needs_loopback_net = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux has more addresses on loopback than one"
)


@needs_loopback_net
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_machine_with_another_address_goes_on_with_its_weights(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int
) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start_streams(lab, alone)
        mover = lab.stage(stage)
        loads, before = list(mover.loads), lab.state.nodes[mover.node].address
        mover._endpoint.move(ELSEWHERE)
        lab.wait_until(
            lambda: urlsplit(lab.state.nodes[mover.node].address).hostname == ELSEWHERE, lab.describe
        )
        assert_undisturbed(lab, alone, talks)
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20))
        assert mover.loads == loads
        assert lab.state.nodes[mover.node].address != before


@needs_loopback_net
def test_a_coordinator_that_moved_is_found_again(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(6,), stages=1) as lab:
        [worker] = lab.workers
        told: list[tuple[str, ...]] = []
        worker._control._find_again = lambda: [lab.cluster.url.replace("127.0.0.1", ELSEWHERE)]
        worker._control._on_urls = lambda urls: told.append(tuple(urls))
        lab.cluster._endpoint.move(ELSEWHERE)
        lab.cluster._endpoint.arrived()
        lab.wait_until(lambda: bool(told), "it was found")
        assert ELSEWHERE in {urlsplit(url).hostname for url in told[0]}
        lab.wait_serving(stages=1)
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20))


@needs_loopback_net
def test_a_driver_follows_a_coordinator_that_moved(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    """Amid its answers: they go on, it is found where it is now and written down, and both serve as before."""
    with swarm(tmp_path, tiny, layers=(3, 3), stages=2) as lab:

        def find_again() -> list[str]:
            return [lab.cluster.url.replace("127.0.0.1", ELSEWHERE)]

        driver = lab.add_driver(find_again=find_again)
        lab.wait_driving(driver)
        for worker in lab.workers:
            worker._control._find_again = find_again
        talks = start_streams(lab, alone, driver=driver)
        before = lab.state.nodes[driver.node].incarnation
        lab.cluster._endpoint.move(ELSEWHERE)
        lab.cluster._endpoint.arrived()
        lab.wait_until(lambda: lab.state.nodes[driver.node].incarnation > before, "it has come back")
        written = lab.folder / driver._options.name / "member.json"
        lab.wait_until(lambda: written.exists() and ELSEWHERE in written.read_text(), "it is written down")
        assert_undisturbed(lab, alone, talks)
        lab.wait_serving(stages=2)
        lab.wait_driving(driver)
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20, driver))
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20))


@needs_loopback_net
def test_a_driver_with_another_address_goes_on(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3), stages=2) as lab:
        driver = lab.add_driver()
        lab.wait_driving(driver)
        talks = start_streams(lab, alone, driver=driver)
        driver._endpoint.move(ELSEWHERE)
        lab.wait_until(
            lambda: urlsplit(lab.state.nodes[driver.node].address).hostname == ELSEWHERE, lab.describe
        )
        assert_undisturbed(lab, alone, talks)
        lab.wait_driving(driver)
        assert_undisturbed(lab, alone, start_streams(lab, alone, 2, 20, driver))
