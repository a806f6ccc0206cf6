"""What the page shows of fine-tuning runs: nothing where there are none, and curves that go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.node.finetuning.curves import CurveStep, RunReport
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.bridge import LOCAL_SECRET
from support.api.browser import watched_page
from support.api.crowd import Crowd

CARD = "section[aria-labelledby=finetuning-title]"


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with Crowd(3, 3, stages=3) as crowd:
        yield crowd


@pytest.fixture
def page(browser: Any, crowd: Crowd, fakes: Any) -> Iterator[Any]:
    app = create_app(fakes.FakeService(), admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url) as (page, _):
            page.goto(url)
            page.locator("#connection[data-state=live]").wait_for()
            yield page


def steps(first: int, stop: int) -> RunReport:
    points = tuple(CurveStep(step, 3.0 / step, 0.5, 100.0 + step) for step in range(first, stop))
    return RunReport("a1", "tiny", 200, 2, points)


def test_curves_of_a_run_are_shown_and_go_on(page: Any, crowd: Crowd) -> None:
    page.goto(f"{page.url.split('#')[0]}#/cluster")
    assert page.locator(CARD).is_hidden()
    crowd.finetuning.tell(steps(1, 4))
    crowd.tell("something happens")
    run = page.locator(f"{CARD} article")
    run.filter(has_text="step 3 of 200").wait_for()
    assert "1.0000" in run.inner_text()
    crowd.finetuning.tell(steps(4, 151))
    run.filter(has_text="step 150 of 200").wait_for()
    line = run.locator("polyline").first.get_attribute("points")
    assert len(line.split()) == 120
