"""Conversations on the page: asked otherwise, gone on with, told of rescues, and never lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.core.errors import CapacityError
from shardcompute.core.generation import Delta, Interruption
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.bridge import LOCAL_SECRET
from support.api.browser import watched_page
from support.api.crowd import Crowd

ANSWER = ".said:not(.user) .text"
KEPT = "Object.keys(localStorage).filter((key) => key.startsWith('shardcompute.chat.')).length"


@pytest.fixture
def service(fakes: Any) -> Any:
    return fakes.FakeService(served=(replace(fakes.MODEL, context_length=4096),))


@contextmanager
def chatting(browser: Any, service: Any) -> Iterator[tuple[Any, Any]]:
    app = create_app(service, page=page_routes())
    with ApiServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url) as (page, watch):
            page.goto(f"{url}/#/chat")
            page.locator("#chat-model option[value='org/tiny']").wait_for(state="attached")
            yield page, watch
            watch.forget("404")


def ask(page: Any, text: str) -> None:
    page.locator("#chat-text").fill(text)
    page.keyboard.press("Enter")
    page.locator(".said.user").filter(has_text=text).wait_for()


def wait_for(page: Any, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for()


def over(page: Any) -> None:
    page.get_by_role("button", name="Stop").wait_for(state="hidden")


def prompts(service: Any) -> list[str]:
    return [bytes(request.prompt).decode() for request in service.requests]


def test_a_conversation_and_a_draft_survive_a_reload(browser: Any, service: Any) -> None:
    with chatting(browser, service) as (page, _):
        ask(page, "hi")
        over(page)
        page.locator("#chat-text").fill("half a thought")
        page.get_by_role("link", name="Connect").click()
        page.get_by_role("link", name="Chat").click()
        assert page.locator("#chat-text").input_value() == "half a thought"
        page.reload()
        wait_for(page, ANSWER, "Hello")
        assert page.locator("#chat-text").input_value() == "half a thought"
        page.locator("#chat-text").fill("more")
        page.keyboard.press("Enter")
        page.locator(".said").nth(3).wait_for()
        assert prompts(service)[-1] == "u:hi;a:Hello;u:more;a:"


def test_what_was_said_before_a_reload_in_the_middle_is_gone_on_with(
    browser: Any, service: Any, fakes: Any
) -> None:
    never = asyncio.Event()
    service.scripts = {0: [*fakes.say("Once upon")[:1], never], 1: fakes.say(" a time")}
    with chatting(browser, service) as (page, _):
        ask(page, "tell")
        wait_for(page, ANSWER, "Once upon")
        page.reload()
        wait_for(page, ANSWER, "Once upon")
        page.get_by_role("button", name="Continue").click()
        wait_for(page, ANSWER, "Once upon a time")
        over(page)
        assert prompts(service)[-1] == "u:tell;a:Once upon"
        assert page.get_by_role("button", name="Continue").count() == 0, "it is whole now"


def test_an_answer_that_was_cut_off_goes_on(browser: Any, service: Any, fakes: Any) -> None:
    service.scripts = {0: fakes.say("one two", finish="length"), 1: fakes.say(" three")}
    with chatting(browser, service) as (page, _):
        ask(page, "count")
        wait_for(page, ".strip p", "cut off")
        page.get_by_role("button", name="Continue").click()
        wait_for(page, ANSWER, "one two three")


def test_a_failed_request_keeps_the_question_and_can_be_retried(
    browser: Any, service: Any, fakes: Any
) -> None:
    service.scripts = {0: [CapacityError("it is still loading")], 1: fakes.say("fine")}
    with chatting(browser, service) as (page, watch):
        ask(page, "hi")
        wait_for(page, ".said .bad", "it is still loading")
        page.reload()
        wait_for(page, ".said .bad", "it is still loading")
        page.get_by_role("button", name="Retry").click()
        wait_for(page, ANSWER, "fine")
        assert prompts(service) == ["u:hi;a:"] * 2
        watch.forget("503")


def test_a_server_that_went_away_loses_nothing(browser: Any, service: Any) -> None:
    app = create_app(service, page=page_routes())
    with ApiServer(app) as server:
        port = server.port
    url = f"http://127.0.0.1:{port}"
    with watched_page(browser, url) as (page, watch):
        with ApiServer(app, port):
            page.goto(f"{url}/#/chat")
            page.locator("#chat-model option[value='org/tiny']").wait_for(state="attached")
        ask(page, "are you there?")
        wait_for(page, ".said .bad", "cannot be reached")
        with ApiServer(app, port):
            page.get_by_role("button", name="Retry").click()
            wait_for(page, ANSWER, "Hello")
        watch.forget("ERR_")
        watch.forget("404")


def test_a_message_is_edited_and_an_answer_given_anew(browser: Any, service: Any, fakes: Any) -> None:
    service.scripts = {0: fakes.say("first"), 1: fakes.say("second"), 2: fakes.say("third")}
    with chatting(browser, service) as (page, _):
        ask(page, "what")
        wait_for(page, ANSWER, "first")
        page.get_by_role("button", name="Regenerate").click()
        wait_for(page, ANSWER, "second")
        over(page)
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit your message").fill("why")
        page.locator(".editing").get_by_role("button", name="Send").click()
        wait_for(page, ANSWER, "third")
        assert page.locator(".said").count() == 2
        assert prompts(service) == ["u:what;a:", "u:what;a:", "u:why;a:"]


def test_conversations_are_kept_apart_and_can_be_deleted(browser: Any, service: Any) -> None:
    with chatting(browser, service) as (page, _):
        ask(page, "first topic")
        over(page)
        page.get_by_role("button", name="New conversation").click()
        ask(page, "second topic")
        over(page)
        assert page.evaluate(KEPT) == 2
        page.get_by_label("Kept conversations").select_option(label="first topic")
        wait_for(page, ".said.user", "first topic")
        assert page.locator(".said.user").count() == 1
        page.get_by_role("button", name="Delete", exact=True).click()
        page.locator("dialog").get_by_role("button", name="Delete").click()
        wait_for(page, ".said.user", "second topic")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_role("button", name="Delete all conversations").click()
        page.locator("dialog").get_by_role("button", name="Delete all").click()
        page.locator(".said").first.wait_for(state="detached")
        assert "topic" not in page.evaluate("JSON.stringify(localStorage)")


def test_keeping_can_be_switched_off(browser: Any, service: Any) -> None:
    with chatting(browser, service) as (page, _):
        ask(page, "secret")
        over(page)
        assert "secret" in page.evaluate("JSON.stringify(localStorage)")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Keep conversations in this browser").uncheck()
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        ask(page, "another secret")
        over(page)
        page.reload()
        page.locator("#chat-text").wait_for()
        assert page.locator(".said").count() == 0
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_what_is_kept_is_bounded_and_what_is_damaged_left_out(browser: Any, service: Any) -> None:
    with chatting(browser, service) as (page, _):
        old = [
            {"id": f"c{n}", "updated": n, "messages": [{"role": "user", "content": f"old {n}"}]}
            for n in range(70)
        ]
        page.evaluate(
            """(old) => {
              for (const each of old) localStorage.setItem(`shardcompute.chat.${each.id}`, JSON.stringify(each));
              localStorage.setItem('shardcompute.chat.bad', '{"messages": "no list"}');
              localStorage.setItem('shardcompute.chat.worse', 'no JSON');
            }""",
            old,
        )
        page.reload()
        page.locator("#chat-model option[value='org/tiny']").wait_for(state="attached")
        ask(page, "new")
        over(page)
        assert page.evaluate(KEPT) <= 50
        kept = json.dumps(page.evaluate("Object.values(localStorage)"))
        assert "old 69" in kept
        assert "old 3\\" not in kept


def test_the_answer_tells_of_its_rescue(browser: Any, service: Any, fakes: Any) -> None:
    told = Interruption(("attic",), ("cellar",), 1.25, 3)
    first, second, last = fakes.say("Hel", "lo")
    service.script = [first, replace(second, interruption=told), last]
    with chatting(browser, service) as (page, _):
        ask(page, "hi")
        expected = "attic was lost after 3 tokens; cellar took over. The answer paused for 1.25 s; no token was lost."
        wait_for(page, ".rescue", expected)
        page.locator(".strip rect.is-rescued").wait_for(state="attached")
        over(page)
        page.reload()
        wait_for(page, ".rescue", expected)


def test_a_wait_for_another_machine_is_told_while_it_lasts(browser: Any, service: Any, fakes: Any) -> None:
    service.script = [Delta(text="Hel", tokens=(fakes.choice(72),)), asyncio.Event()]
    with Crowd(3, 1, stages=3) as crowd:
        app = create_app(service, admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]
        with ApiServer(app) as server:
            url = f"http://127.0.0.1:{server.port}"
            with watched_page(browser, url) as (page, _):
                page.goto(f"{url}/#/chat")
                page.locator("#chat-model option[value='org/tiny']").wait_for(state="attached")
                ask(page, "hi")
                wait_for(page, ANSWER, "Hel")
                (chain,) = crowd.view.chains
                crowd.change_node(1, status="lost")
                crowd.change(chains=(replace(chain, status="recovering", reason="machine-01 is lost"),))
                wait_for(page, ".rescue.is-waiting", "machine-01 is lost")
                crowd.change(chains=(chain,))
                page.locator(".rescue.is-waiting").wait_for(state="hidden")
                page.get_by_role("button", name="Stop").click()
                over(page)
