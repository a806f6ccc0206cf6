"""The page over a made-up cluster: many machines and requests, hostile text, keys, lost connections, accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.api.access.sign_in import PageSessions
from shardcompute.node.admin.views import CoordinatorView, SpeedView, UnusedDeviceView
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.bridge import LOCAL_SECRET
from support.api.browser import watched_page
from support.api.crowd import Crowd

VIEWS = ("cluster", "models", "chat", "requests", "usage", "connect")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with Crowd() as crowd:
        yield crowd


@pytest.fixture
def app(crowd: Crowd, fakes: Any) -> Any:
    return create_app(fakes.FakeService(), admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]


@pytest.fixture
def url(app: Any) -> Iterator[str]:
    with ApiServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


def wait_for(page: Any, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for()


@pytest.fixture(scope="module")
def axe() -> str:
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_a_serious_accessibility_issue(browser: Any, url: str, axe: str, scheme: str) -> None:
    with watched_page(browser, url, color_scheme=scheme, reduced_motion="reduce") as (page, _):
        for view in VIEWS:
            page.goto(f"{url}/#/{view}")
            page.locator("#connection[data-state=live]").wait_for()
            _fill(page, view)
            page.evaluate(axe)
            found = page.evaluate("async () => (await axe.run()).violations")
            serious = [
                (each["id"], [node["html"][:160] for node in each["nodes"][:3]])
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], view


def _fill(page: Any, view: str) -> None:
    """Let the view show what it has."""
    if view == "cluster":
        page.locator(".machines button").first.click()
        page.get_by_role("button", name="Make a join line").click()
        wait_for(page, ".join pre", "shardcompute join sc1.secret")
    elif view == "models":
        page.get_by_role("button", name="Choose").click()
        wait_for(page, ".plan b", "80.0 tok/s")
    elif view == "chat":
        page.locator("#chat-text").fill("hi")
        page.get_by_role("button", name="Send").click()
        wait_for(page, ".said .text", "Hello")
        page.locator(".caret").wait_for(state="detached")
    elif view == "requests":
        page.locator(".request button").first.click()
        page.get_by_role("heading", name="Request 1000").wait_for()
    elif view == "usage":
        page.locator(".chart rect").first.wait_for()
    else:
        wait_for(page, ".code pre", "curl http://127.0.0.1")
        wait_for(page, ".models h3", "laptop")


def test_many_machines_and_requests_do_not_stop_it(browser: Any, url: str, crowd: Crowd) -> None:
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        page.locator(".machines > li").nth(63).wait_for()
        assert page.locator(".map-nodes > g").count() == 65
        for _ in range(40):
            crowd.stir()
            page.evaluate("() => new Promise(requestAnimationFrame)")
        crowd.change_node(9, status="lost", status_reason="it fell silent")
        crowd.tell("machine-09 is lost: it fell silent", "bad")
        wait_for(page, ".news li[data-tone=bad]", "machine-09 is lost: it fell silent")
        page.get_by_role("link", name="Requests").click()
        wait_for(page, ".head p", "0 running, the last 1000 that ended")
        assert 5 < page.locator(".request").count() < 60
        page.locator(".virtual").evaluate("list => (list.scrollTop = list.scrollHeight)")
        page.locator(".request button[aria-label^='Request 1 ']").wait_for()
        assert page.locator(".request").count() < 60
        crowd.live = [_running(crowd)]
        wait_for(page, ".head p", "1 running")
        assert page.locator("*").count() < 3000


def _running(crowd: Crowd) -> Any:
    return replace(crowd.ended[0], id="1001", state="decode", finish="", queue_s=None, prefill_s=None)


def test_gpus_are_named_and_what_keeps_one_from_being_used(browser: Any, url: str, crowd: Crowd) -> None:
    useless = UnusedDeviceView(
        device="cuda:1", label="Old Card", memory_bytes=0, problem="its driver is too old", fix="update it"
    )
    crowd.change_node(
        0, device="cuda:0", device_label="NVIDIA H200", device_bytes=140 << 30, unused_devices=(useless,)
    )
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        row = page.locator(".machines > li").first
        row.locator(".warn").filter(
            has_text="Old Card cannot be used, its driver is too old; update it"
        ).wait_for()
        row.get_by_text("cuda:0 · NVIDIA H200").wait_for()
        row.get_by_role("button", name="machine-00").click()
        row.get_by_text("140 GiB").wait_for()
        assert page.locator(".machines > li").nth(1).locator("p.warn").is_hidden()


def test_coordinators_that_share_a_store_are_listed(browser: Any, url: str, crowd: Crowd) -> None:
    first = CoordinatorView(node="n-1", status="leads", api_url="http://10.0.0.1:8000", since_s=1e9)
    second = CoordinatorView(node="n-2", status="waits", since_s=1e9)
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        page.locator(".machines > li").first.wait_for()
        assert page.locator(".coordinators").is_hidden()
        crowd.change(coordinators=(first, second))
        row = page.locator(".coordinators li").first
        row.get_by_text("http://10.0.0.1:8000").wait_for()
        row.get_by_text("leads").wait_for()
        row.get_by_text("since ").wait_for()
        wait_for(page, ".coordinators li", "n-2")
        crowd.change(coordinators=(replace(second, status="leads"),))
        wait_for(page, ".coordinators li", "leads")
        page.wait_for_function("document.querySelectorAll('.coordinators li').length === 1")


def test_what_was_measured_on_a_machine_and_why_it_offers_less(browser: Any, url: str, crowd: Crowd) -> None:
    speed = SpeedView(
        model="m", layer_s=0.002, prefill_layer_s=0.0005, layer_count=4, source="service", measured_at_s=1e9
    )
    crowd.change_node(0, speeds=(speed,), memory_reason="memory ran out while a step was computed")
    crowd.change_node(1, weights_bytes_per_s=float(4 << 30), probed_at_s=1e9)
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        rows = page.locator(".machines > li")
        for number in range(3):
            rows.nth(number).get_by_role("button", name=f"machine-0{number}").click()
        rows.nth(0).get_by_text("2.0 ms a layer of m, prompts 500 tok/s, measured in service").wait_for()
        rows.nth(0).get_by_text("memory ran out while a step was computed").wait_for()
        rows.nth(1).get_by_text("4.0 GiB/s of weights, probed").wait_for()
        rows.nth(2).get_by_text("not measured, guessed").wait_for()


def test_what_others_write_is_never_markup(browser: Any, crowd: Crowd, fakes: Any) -> None:
    service = fakes.FakeService(script=fakes.say(HOSTILE, "```\n", HOSTILE, "\n```"))
    app = create_app(service, admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url) as (page, _):
            crowd.change_node(0, name=HOSTILE, status_reason=HOSTILE)
            page.goto(url)
            wait_for(page, ".machine-name", HOSTILE)
            page.get_by_role("link", name="Chat").click()
            page.locator("#chat-text").fill("<b>")
            page.keyboard.press("Enter")
            page.locator(".said:not(.user) .text").filter(has_text=HOSTILE).wait_for()
            assert page.locator("main img, main .text b").count() == 0
            assert page.title() == "Chat · ShardCompute"


def test_key_is_asked_for_kept_in_the_tab_and_sent(browser: Any, crowd: Crowd, fakes: Any) -> None:
    keys = ["operate good-key"]
    app = create_app(fakes.FakeService(), api_keys=keys, admin=crowd, page=page_routes())  # type: ignore[arg-type]
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url, key="") as (page, watch):
            page.goto(url)
            page.get_by_label("API key").fill("bad-key")
            page.keyboard.press("Enter")
            wait_for(page, "dialog p", "not one that this server accepts")
            page.get_by_label("API key").fill("good-key")
            page.keyboard.press("Enter")
            page.locator("#connection[data-state=live]").wait_for()
            page.locator(".machines > li").first.wait_for()
            assert page.evaluate("sessionStorage.length") == 1
            assert "good-key" not in page.evaluate("JSON.stringify(localStorage)")
            page.reload()
            page.locator("#connection[data-state=live]").wait_for()
            page.get_by_role("button", name="Sign out").click()
            page.get_by_label("API key").wait_for()
            assert page.evaluate("sessionStorage.length") == 0
            watch.forget("401")


def test_a_key_for_use_shows_the_chat_alone(browser: Any, crowd: Crowd, fakes: Any) -> None:
    keys = ["use guest-key"]
    app = create_app(fakes.FakeService(), api_keys=keys, admin=crowd, page=page_routes())  # type: ignore[arg-type]
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url, key="guest-key") as (page, watch):
            page.goto(f"{url}/#/cluster")
            page.locator("#connection[data-state=forbidden]").wait_for()
            page.get_by_role("heading", name="Chat").wait_for()
            assert page.locator(".rail a:visible").all_inner_texts() == ["Chat"]
            assert page.locator("#lost").is_hidden()
            _fill(page, "chat")
            watch.forget("403")


def test_a_link_signs_the_tab_in_once_and_leaves_no_trace(browser: Any, crowd: Crowd, fakes: Any) -> None:
    sessions = PageSessions()
    app = create_app(fakes.FakeService(), sessions=sessions, admin=crowd, page=page_routes())  # type: ignore[arg-type]
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        link = f"{url}/#/sign-in/{sessions.create_code().code}"
        with watched_page(browser, url, key="") as (page, watch):
            page.goto(link)
            page.locator("#connection[data-state=live]").wait_for()
            assert "sign-in" not in page.url
            page.reload()
            page.locator("#connection[data-state=live]").wait_for()
            assert page.context.cookies() == []
            # Signed in once: for somebody else the link is worth nothing, and chatting needs none.
            with watched_page(browser, url, key="") as (other, others):
                other.goto(link)
                wait_for(other, ".toast", "This link has been used")
                other.locator("#connection[data-state=forbidden]").wait_for()
                # Another link in the same tab is a change of the hash alone.
                other.goto(f"{url}/#/sign-in/{sessions.create_code().code}")
                other.locator("#connection[data-state=live]").wait_for()
                others.forget("403")
            page.get_by_role("button", name="Sign out").click()
            page.locator("#connection[data-state=forbidden]").wait_for()
            watch.forget("403")


def test_lost_connection_shows_and_heals(browser: Any, app: Any, crowd: Crowd) -> None:
    with ApiServer(app) as server:
        port = server.port
    url = f"http://127.0.0.1:{port}"
    with watched_page(browser, url) as (page, watch):
        with ApiServer(app, port):
            page.goto(url)
            page.locator("#connection[data-state=live]").wait_for()
        page.locator("#connection[data-state=lost]").wait_for()
        wait_for(page, "#lost", "The connection to the server is lost")
        # Nothing that was true a while ago still looks as if it were: it is grey, and its age is said.
        wait_for(page, "#lost", "What you see is")
        page.locator("#view.is-stale").wait_for()
        assert page.evaluate("getComputedStyle(document.querySelector('#view')).filter") == "grayscale(1)"
        crowd.change_node(3, name="renamed-meanwhile")
        with ApiServer(app, port):
            page.locator("#connection[data-state=live]").wait_for()
            page.locator("#lost").wait_for(state="hidden")
            page.locator("#view:not(.is-stale)").wait_for()
            wait_for(page, ".machine-name", "renamed-meanwhile")
        watch.forget("ERR_")


def test_keyboard_alone_is_enough(browser: Any, url: str) -> None:
    with watched_page(browser, url) as (page, _):
        page.goto(url)
        page.locator(".machines > li").first.wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.get_by_role("link", name="Chat").focus()
        page.keyboard.press("Enter")
        page.wait_for_function("document.activeElement.tagName === 'H1'")
        page.locator("#chat-text").focus()
        page.keyboard.type("hi")
        page.keyboard.press("Enter")
        wait_for(page, ".said .text", "Hello")


def test_theme_follows_the_system_until_it_is_chosen(browser: Any, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with watched_page(browser, url, color_scheme="dark") as (page, _):
        page.goto(url)
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Theme: as the system").click()
        light = page.evaluate(ground)
        page.reload()
        assert page.evaluate(ground) == light != dark
        page.get_by_role("button", name="Theme: light").wait_for()


def test_nothing_is_wider_than_a_phone(browser: Any, url: str) -> None:
    with watched_page(browser, url, viewport={"width": 360, "height": 740}, is_mobile=True) as (page, _):
        for view in VIEWS:
            page.goto(f"{url}/#/{view}")
            page.locator("#connection[data-state=live]").wait_for()
            _fill(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view


def test_server_without_a_cluster_has_chat_and_connect(browser: Any, fakes: Any) -> None:
    with ApiServer(create_app(fakes.FakeService(), page=page_routes())) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url, key="") as (page, watch):
            page.goto(url)
            page.get_by_role("heading", name="Chat").wait_for()
            assert page.locator(".rail a:visible").all_inner_texts() == ["Chat", "Connect"]
            _fill(page, "chat")
            watch.forget("404")


def test_snippets_name_this_server_its_model_and_only_routes_that_exist(
    browser: Any, url: str, app: Any
) -> None:
    with watched_page(browser, url) as (page, _):
        page.goto(f"{url}/#/connect")
        page.locator(".chips button").nth(5).wait_for()
        for button in page.locator(".chips button").all():
            button.click()
            shown = page.locator(".code pre").inner_text()
            assert re.search(rf"{re.escape(url)}", shown)
            assert "org/tiny" in shown or "shardcompute.client" in shown
        names = page.locator(".chips button").all_inner_texts()
        paths = {route.path for route in app.routes}
        assert ("Ollama" in names) == ("/api/chat" in paths)
        assert ("Anthropic" in names) == ("/v1/messages" in paths)
