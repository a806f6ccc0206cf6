"""The page over a cluster that computes: workers, real links, one that dies mid-sentence, another model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.core.settings import load_settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.rpc.commands import LoadLayers
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.bridge import LOCAL_SECRET
from support.api.browser import watched_page
from support.swarm.lab import LabSwarm, swarm

LIVE_ROWS = ".chain[data-chain^='tiny#'] .layers:not(.standbys) li"


@pytest.fixture
def lab(tiny: Path, tmp_path: Path) -> Iterator[LabSwarm]:
    """Three machines hold the model, a fourth stands by: none has room for more."""
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        yield lab


@pytest.fixture
def url(lab: LabSwarm, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        settings = replace(load_settings(), data_dir=tmp_path / "data", offline=True)
        admin = stack.enter_context(ClusterAdmin(lab.cluster, settings))
        app = create_app(lab.cluster.pool, admin=admin, local_secret=LOCAL_SECRET, page=page_routes())
        yield f"http://127.0.0.1:{stack.enter_context(ApiServer(app)).port}"


def layer_rows(lab: LabSwarm) -> list[list[str]]:
    names = {worker.node: worker.folder.name for worker in lab.workers}
    return [
        [names[stage.node], f"layers {stage.start}–{stage.stop - 1}"] for stage in lab.chain("tiny").stages
    ]


def shown_rows(page: Any) -> list[list[str]]:
    return [row.inner_text().split("\n")[:2] for row in page.locator(LIVE_ROWS).all()]


def wait_for(page: Any, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for()


def ask(page: Any, text: str, most_tokens: int) -> None:
    page.get_by_role("link", name="Chat").click()
    page.locator("#chat-model option").filter(has_text="tiny").wait_for(state="attached")
    if not page.locator("#chat-most").is_visible():
        page.get_by_text("Settings", exact=True).click()
    page.locator("#chat-most").fill(str(most_tokens))
    page.locator("#chat-heat").fill("0")
    page.locator("#chat-text").fill(text)
    page.keyboard.press("Enter")


def test_machines_their_layers_and_an_answer(browser: Any, url: str, lab: LabSwarm) -> None:
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        page.locator(".machines > li").nth(3).wait_for()
        assert page.locator(".machines > li").count() == 4
        assert page.locator(".map-nodes > g.node:not(.is-hub)").count() == 4
        assert shown_rows(page) == layer_rows(lab)
        wait_for(page, ".standbys li", "stands by")
        page.locator("section[aria-labelledby=ledger-title] tbody tr").nth(3).wait_for()
        ask(page, "Hi", 24)
        page.locator(".strip rect").nth(3).wait_for()
        page.locator(".caret").wait_for(state="detached")
        wait_for(page, ".strip p", "24 tokens")
        page.get_by_role("link", name="Requests").click()
        page.locator(".request button").first.click()
        wait_for(page, "aside dd", "24 out")
        stages = page.locator("aside .waterfall").nth(1).locator("li").all_inner_texts()
        assert [text.split("\n")[0] for text in stages[:3]] == [name for name, _ in layer_rows(lab)]
        page.get_by_role("link", name="Usage").click()
        page.locator("tbody tr td").nth(2).wait_for()
        assert page.locator("tbody tr td").all_inner_texts()[:3] == ["local", "tiny", "1"]


def test_answer_goes_on_while_a_worker_is_replaced(browser: Any, url: str, lab: LabSwarm) -> None:
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        page.locator(LIVE_ROWS).nth(2).wait_for()
        victim, name = lab.stage(1), lab.stage(1).folder.name
        lab.freeze(victim)
        # Nothing comes from a frozen stage, so the answer cannot be over before the worker is.
        ask(page, "Tell me a story", 48)
        page.get_by_role("button", name="Stop").wait_for()
        lab.kill(victim)
        page.get_by_role("link", name="Cluster").click()
        wait_for(page, ".news li", f"{name} is lost")
        wait_for(page, ".news li", "took over")
        assert name not in [row[0] for row in shown_rows(page)]
        assert shown_rows(page) == layer_rows(lab)
        wait_for(page, f".machines li[data-node='{victim.node}'] .pill", "lost")
        page.get_by_role("link", name="Chat").click()
        wait_for(page, ".strip p", "48 tokens")
        # The answer says what it has been through, and the request where that time went.
        wait_for(page, ".rescue", f"{name} was lost before the first token")
        wait_for(page, ".rescue", "took over")
        wait_for(page, ".rescue", "no token was lost")
        page.get_by_role("link", name="Requests").click()
        page.locator(".request button").first.click()
        wait_for(page, "aside .waterfall li", "Rescue")
        wait_for(page, "aside dd", f"{name} was lost")


def test_stop_ends_the_generation(browser: Any, url: str, lab: LabSwarm) -> None:
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        lab.freeze(lab.stage(1))
        ask(page, "Hi", 200)
        page.get_by_role("button", name="Stop").click()
        wait_for(page, ".strip p", "stopped")
        page.get_by_role("button", name="Send").wait_for()
        lab.wait_until(lambda: lab.cluster.pool.load().running == 0, "the end of the generation")
        [view] = lab.cluster.pool.requests.views()
        assert view.state == "cancelled"


def test_another_model_is_planned_loaded_and_unloaded(
    browser: Any, url: str, lab: LabSwarm, tinier: Path
) -> None:
    may_load = threading.Event()

    def wait(command: LoadLayers) -> None:
        if command.model == "tinier":
            assert may_load.wait(60)

    lab.add_worker(4)
    for worker in lab.workers:
        worker.before_load = wait
    lab.wait_until(
        lambda: [n.status for n in lab.state.nodes.values()] == ["ready"] * 5, "a worker with room"
    )
    with watched_page(browser, url) as (page, _):
        page.goto(f"{url}/#/models")
        page.get_by_label("Model", exact=True).fill(str(tinier))
        page.get_by_role("button", name="Preview").click()
        wait_for(page, ".plan .layers li", "layer")
        wait_for(page, ".plan .reasons li", "machine")
        page.get_by_role("button", name="Load", exact=True).click()
        try:
            wait_for(page, ".model[data-model=tinier] .pill", "loading")
            page.get_by_role("progressbar", name="Loading tinier").wait_for()
        finally:
            may_load.set()
        wait_for(page, ".model[data-model=tinier] .pill", "serving")
        page.get_by_role("link", name="Chat").click()
        page.locator("#chat-model option").filter(has_text="tinier").wait_for(state="attached")
        page.get_by_role("link", name="Models").click()
        page.locator(".model[data-model=tinier]").get_by_role("button", name="Unload").click()
        page.locator("dialog").get_by_role("button", name="Unload").click()
        page.locator(".model[data-model=tinier]").wait_for(state="detached")


def test_join_line_lets_a_machine_in(browser: Any, url: str, lab: LabSwarm) -> None:
    from shardcompute.security import parse_token

    with watched_page(browser, url) as (page, _):
        page.goto(url)
        page.get_by_role("button", name="Make a join line").click()
        line = page.locator(".join pre").first.inner_text()
        link = page.locator(".join pre").nth(1).inner_text()
        assert link == f"{url}/#/join/{line.split()[2]}"
        assert page.locator(".join img.qr").bounding_box()["height"] > 100
        with watched_page(browser, url) as (other, _):
            other.goto(link)
            wait_for(other, "#view h1", "You are invited")
            wait_for(other, "#view pre", f"shardcompute join {line.split()[2]}")
            assert "#" not in other.url
        lab.token = parse_token(line.split()[2])
        guest = lab.add_worker(2)
        wait_for(page, ".news li", f"{guest.folder.name} joined")
        page.locator(f".machines li[data-node='{guest.node}']").wait_for()
