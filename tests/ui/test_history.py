"""What the page shows of the past, with ranges, and what it asks before a served model is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.core.generation import Interruption
from shardcompute.node.admin.views import FetchView, MoveView
from shardcompute.node.telemetry.usage import UsageView
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.bridge import LOCAL_SECRET
from support.api.browser import watched_page
from support.api.crowd import MODEL, START_S, Crowd

HOUR_S = 3600


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with Crowd(3, 3, stages=3) as crowd:
        yield crowd


@pytest.fixture
def page(browser: Any, crowd: Crowd, fakes: Any) -> Iterator[Any]:
    app = create_app(fakes.FakeService(), admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url) as (page, watch):
            page.goto(url)
            page.locator("#connection[data-state=live]").wait_for()
            yield page
            watch.forget("409")


def wait_for(page: Any, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for()


def test_events_of_before_are_read_page_by_page(page: Any, crowd: Crowd) -> None:
    for number in range(150):
        crowd.tell(f"event {number}")
    wait_for(page, ".news li", "event 149")
    assert page.locator(".news li").count() == 40
    news = page.locator(".news-card")
    news.get_by_role("button", name="Week").click()
    page.locator(".news li").nth(99).wait_for()
    news.get_by_role("button", name="Older").click()
    page.locator(".news li").nth(149).wait_for()
    assert news.get_by_role("button", name="Older").is_hidden()
    news.get_by_role("button", name="Lately").click()
    page.locator(".news li").nth(40).wait_for(state="detached")


def test_requests_of_before_a_restart_are_there(page: Any, crowd: Crowd) -> None:
    told = Interruption(("attic",), ("cellar",), 2.5, 7)
    old = replace(crowd.ended[0], id="old-one", interrupted_s=2.5, interruptions=(told,))
    crowd.history.store.write([], [old], [])
    page.get_by_role("link", name="Requests").click()
    wait_for(page, ".head p", "the last 3 that ended")
    page.get_by_role("button", name="All").click()
    wait_for(page, ".head p", "1 that ended")
    page.locator(".request button").click()
    wait_for(page, "aside .waterfall li", "Rescue")
    wait_for(page, "aside dd", "attic was lost after 7 tokens; cellar took over")


def test_usage_is_shown_by_the_hour_and_by_the_day(page: Any, crowd: Crowd) -> None:
    hours = [
        UsageView(
            start_s=START_S - START_S % HOUR_S - HOUR_S * ago,
            span_s=HOUR_S,
            key="",
            model=MODEL,
            requests=1,
            prompt_tokens=10,
            generated_tokens=20,
        )
        for ago in range(48)
    ]
    crowd.history.store.write([], [], hours)
    page.get_by_role("link", name="Usage").click()
    page.get_by_role("button", name="Last week").click()
    wait_for(page, "#totals-title", "Last week")
    wait_for(page, "tbody td", "960")
    assert page.locator(".chart rect").count() == 48
    page.get_by_role("button", name="Last 90 days").click()
    wait_for(page, "#totals-title", "Last 90 days")
    page.wait_for_function("document.querySelectorAll('.chart rect').length < 5")
    wait_for(page, "tbody td", "960")


def test_a_served_model_is_replaced_only_after_asking(page: Any, crowd: Crowd) -> None:
    crowd.in_the_way = "org/served"
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Model", exact=True).fill("org/other")
    load = page.get_by_role("button", name="Load", exact=True)
    load.click()
    dialog = page.locator("dialog[open]")
    wait_for(page, "dialog[open]", "would replace org/served, which is answering 2 requests")
    wait_for(page, "dialog[open]", "Answers that run are finished first")
    dialog.get_by_role("button", name="Cancel").click()
    wait_for(page, "[role=status]", "Nothing was changed")
    assert crowd.orders == [("org/other", False)]
    load.click()
    page.locator("dialog[open]").get_by_role("button", name="Replace").click()
    wait_for(page, "[role=status]", "org/other is on its way")
    assert crowd.orders == [("org/other", False)] * 2 + [("org/other", True)]


def test_a_model_that_was_fetched_first_may_be_let_in_afterwards(page: Any, crowd: Crowd) -> None:
    failed = FetchView(
        model="org/late",
        name="late",
        form="native",
        chains=1,
        status="failed",
        error="serving late would replace org/served, which is answering nothing",
        error_kind="WouldReplaceError",
    )
    crowd.change(fetches=(failed,))
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Replace").click()
    wait_for(page, "dialog[open]", "would replace org/served")
    with page.expect_response("**/cluster/models"):
        page.locator("dialog[open]").get_by_role("button", name="Replace").click()
    assert crowd.orders == [("org/late", True)]


def test_a_model_that_does_not_fit_says_what_is_missing(page: Any, crowd: Crowd) -> None:
    (model,) = crowd.view.models
    reasons = ("filter: machine-00 has too little memory",)
    crowd.change(models=(replace(model, status="unservable", missing_bytes=3 << 30, reasons=reasons),))
    page.get_by_role("link", name="Models").click()
    wait_for(page, ".reasons li", "3.0 GiB of memory are missing")
    wait_for(page, ".reasons li", "machine-00 has too little memory")


def test_a_chain_tells_how_it_has_moved(page: Any, crowd: Crowd) -> None:
    box = page.locator("article.chain details")
    assert box.is_hidden()
    move = MoveView(
        number=3,
        reason="68% better: from lap to attic",
        outcome="",
        expected_before_s=0.021,
        expected_after_s=0.012,
    )
    crowd.change(chains=tuple(replace(chain, moves=(move,)) for chain in crowd.view.chains))
    box.first.wait_for()
    box.first.locator("summary").click()
    wait_for(page, ".moves li", "68% better: from lap to attic")
    wait_for(page, ".moves li", "Expected: a step takes 12 ms instead of 21 ms.")
    wait_for(page, ".moves li", "What came of it is not known yet.")
