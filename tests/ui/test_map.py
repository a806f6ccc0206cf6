"""The map of machines: names and numbers that never lie over each other, the driver where it is, tokens running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.node.admin.views import DriverView, LoadView, MemoryParts, RankView
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.bridge import LOCAL_SECRET
from support.api.browser import watched_page
from support.api.crowd import Crowd

LONG = "workstation-in-the-long-corridor-{:02}.lab.example.org"
WIDE = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}

OVERLAPS = """() => {
  const box = element => ({ what: element.textContent || 'a machine', ...element.getBoundingClientRect().toJSON() });
  const texts = [...document.querySelectorAll('.map text')].filter(text => text.textContent).map(box);
  const discs = [...document.querySelectorAll('.map .node .disc')].map(box);
  const frame = box(document.querySelector('.map'));
  const across = (a, b) => a.left < b.right - 0.5 && b.left < a.right - 0.5;
  const meet = (a, b) => across(a, b) && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5;
  const isCut = a => a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1;
  return [
    ...texts.filter(isCut).map(each => `${each.what} is cut`),
    ...texts.flatMap((each, index) => [...texts.slice(index + 1), ...discs].filter(other => meet(each, other))
      .map(other => `${each.what} over ${other.what}`)),
  ];
}"""


@contextmanager
def shown(browser: Any, fakes: Any, crowd: Crowd, **options: Any) -> Iterator[Any]:
    """A page that shows the crowd."""
    app = create_app(fakes.FakeService(), admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]
    with crowd, ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url, **options) as (page, _):
            page.goto(url)
            page.locator(".map-nodes > g").nth(len(crowd.view.nodes)).wait_for()
            yield page


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("count", [1, 3, 8, 9, 24, 64])
def test_no_label_lies_over_another(browser: Any, fakes: Any, count: int, size: dict[str, int]) -> None:
    crowd = Crowd(count, 1, stages=min(count, 16))
    for index in range(count):
        crowd.change_node(index, name=LONG.format(index))
    with shown(browser, fakes, crowd, viewport=size) as page:
        assert page.evaluate(OVERLAPS) == []
        names = page.locator(".map .node:not(.is-hub) .name").all_text_contents()
        assert len({*names}) == count
        titles = page.locator(".map .node:not(.is-hub) title").all_text_contents()
        assert sorted(title.split(",")[0] for title in titles) == [LONG.format(i) for i in range(count)]
        if count <= 9 and size is WIDE:
            # Every hop of the ring is labelled where there is room for it.
            assert page.locator(".map-labels text").count() == (1 if count == 1 else count + 1)
        for index in range(count):
            crowd.change_node(index, name=("n" if index % 2 else "Ünïcode 機械 ") + str(index))
        page.locator(".map title").filter(has_text="機械").first.wait_for(state="attached")
        assert page.evaluate(OVERLAPS) == []


def test_the_driver_is_drawn_where_it_is(browser: Any, fakes: Any) -> None:
    crowd = Crowd(4, 1, stages=3)
    with shown(browser, fakes, crowd) as page:
        assert page.locator(".node.is-driver").get_attribute("data-node") == crowd.view.driver
        (chain,) = crowd.view.chains
        drivers = (DriverView(node=crowd.view.driver, kv_tokens=1), DriverView(node="n01", kv_tokens=9))
        crowd.change(chains=(replace(chain, driver_host="n01", drivers=drivers),))
        page.locator(".node.is-driver[data-node=n01]").wait_for()
        assert page.locator(".node.is-driver").count() == 1
        page.locator(".node[data-node=n01] .line").filter(has_text="driver").wait_for()
        # From the driver through all stages and back: 1 → 0 → 1 → 2 → 1.
        assert page.locator(".way.is-round").count() == 4
        assert page.locator(".way.is-handover").count() == 1


def test_tokens_run_while_there_are_answers(browser: Any, fakes: Any) -> None:
    crowd = Crowd(5, 1, stages=5)
    with shown(browser, fakes, crowd) as page:
        assert page.locator(".token").count() == 0
        crowd.change(load=LoadView(running=3, tokens_per_s=40.0))
        page.locator(".token").nth(2).wait_for()
        places = "[...document.querySelectorAll('.token')].map(dot => dot.getBoundingClientRect().x)"
        before = page.evaluate(places)
        page.wait_for_function(f"before => JSON.stringify({places}) !== JSON.stringify(before)", arg=before)
        crowd.change(load=LoadView())
        page.locator(".token").first.wait_for(state="detached")


def test_nothing_moves_where_less_motion_is_wanted(browser: Any, fakes: Any) -> None:
    crowd = Crowd(5, 1, stages=5)
    with shown(browser, fakes, crowd, reduced_motion="reduce") as page:
        crowd.change(load=LoadView(running=3, tokens_per_s=40.0))
        page.locator(".map.is-answering").wait_for()
        assert page.locator(".token").count() == 0


def test_links_within_a_machine_have_no_bandwidth(browser: Any, fakes: Any) -> None:
    crowd = Crowd(3, 1, stages=3)
    crowd.change(links=tuple(replace(link, is_local=True, bytes_per_s=1e12) for link in crowd.view.links))
    with shown(browser, fakes, crowd) as page:
        assert {*page.locator(".map-labels text").all_text_contents()} == {"local"}
        page.locator(".machines button").first.click()
        assert "GiB/s" not in page.locator(".links").first.inner_text()


def test_memory_is_told_by_what_it_is_for(browser: Any, fakes: Any) -> None:
    crowd, gib = Crowd(2, 1, stages=2), 1 << 30
    for index in range(2):
        parts = MemoryParts(held_weights_bytes=2 * gib, scratch_bytes=gib // 2, kv_reserved_bytes=2 * gib)
        crowd.change_node(
            index,
            memory_bytes=8 * gib,
            used_bytes=5 * gib,
            process_bytes=gib // 2,
            parts=parts,
            kv_used_bytes=gib,
            resident_bytes=4 * gib,
        )
    with shown(browser, fakes, crowd) as page:
        tile = page.locator(".tile").filter(has_text="Held weights")
        assert tile.locator(".value").inner_text() == "4.0 GiB"
        assert tile.locator(".muted").inner_text() == (
            "4.0 GiB KV reserved, 2.0 GiB scratch and processes, 6.0 GiB free of 16.0 GiB"
        )
        page.locator(".machines button").first.click()
        for text in (
            "2.0 GiB held weights, 512 MiB scratch, 2.0 GiB KV reserved, 512 MiB process, 3.0 GiB free",
            "1.0 GiB of 2.0 GiB reserved",
            "4.0 GiB: all that its process takes now",
        ):
            page.locator(".machine-details dd").filter(has_text=text).wait_for()


def test_ranks_are_shown_beside_each_other_with_their_layers(browser: Any, fakes: Any) -> None:
    crowd = Crowd(4, 1, stages=2)
    (chain,) = crowd.view.chains
    ids = [node.id for node in crowd.view.nodes]

    def rank(index: int, weight: int = 1) -> RankView:
        return RankView(node=ids[index], weight=weight, memory_bytes=0)

    seats = [(rank(0), rank(2, 2)), (rank(1), rank(3))]
    stages = tuple(replace(stage, ranks=ranks) for stage, ranks in zip(chain.stages, seats, strict=True))
    crowd.view = replace(crowd.view, chains=(replace(chain, stages=stages),))
    with shown(browser, fakes, crowd, viewport=WIDE) as page:
        lines = [page.locator(f'.map [data-node="{id}"] .line').text_content() for id in ids]
        assert [line.partition(" · ")[2] for line in lines] == ["rank 0", "rank 0", "rank 1", "rank 1"]
        assert lines[0].partition(" · ")[0] == lines[2].partition(" · ")[0]
        assert page.locator(".map .way.is-ranks").count() == 2
        told = page.locator(".layers .ranks li").all_text_contents()
        assert [line.split(":")[0] for line in told] == ["rank 0", "rank 1"] * 2
        assert told[1].endswith("weight 2")
        assert page.evaluate(OVERLAPS) == []
