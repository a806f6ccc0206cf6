"""Markdown as the page shows it: what people expect of it, and nothing that a model could do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardcompute.api import create_app
from shardcompute.web import page_routes
from support.api.api_server import ApiServer
from support.api.browser import watched_page

Render = Callable[[str], str]


@pytest.fixture(scope="module")
def page(browser: Any, fakes: Any) -> Iterator[Any]:
    with ApiServer(create_app(fakes.FakeService(), page=page_routes())) as server:
        url = f"http://127.0.0.1:{server.port}"
        with watched_page(browser, url) as (page, watch):
            page.goto(url)
            page.locator("#chat-text").wait_for()
            yield page
            watch.forget("404")


@pytest.fixture
def render(page: Any) -> Render:
    """The HTML that the page makes of a text."""

    def run(text: str) -> str:
        return str(
            page.evaluate(
                """async (text) => {
                  const { render } = await import('/page/markdown.js');
                  const place = document.createElement('div');
                  document.body.append(place);
                  render(place, text);
                  const html = place.innerHTML;
                  place.remove();
                  return html;
                }""",
                text,
            )
        )

    return run


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("a **b** *c* `d`", "<p>a <strong>b</strong> <em>c</em> <code>d</code></p>"),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("~~old~~ **bold *and* more**", "<p><s>old</s> <strong>bold <em>and</em> more</strong></p>"),
        ("`**no**` \\*no\\*", "<p><code>**no**</code> *no*</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
        ("---", "<hr>"),
        (
            "- a\n- b\n  - c\n",
            '<ul class="bullets"><li><span>a</span></li><li><span>b</span>'
            '<ul class="bullets"><li><span>c</span></li></ul></li></ul>',
        ),
        ("3. a\n4. b", '<ol class="bullets" start="3"><li><span>a</span></li><li><span>b</span></li></ol>'),
        ("text\n- a", '<p>text</p><ul class="bullets"><li><span>a</span></li></ul>'),
        (
            "## Title",
            '<p class="heading of-2" role="heading" aria-level="4">Title</p>',
        ),
    ],
)
def test_what_models_write_is_shown_as_they_mean_it(render: Render, text: str, html: str) -> None:
    assert render(text) == html


def test_code_is_kept_as_it_is_and_can_be_copied(page: Any, render: Render) -> None:
    shown = render("```python\nif a < b:\n    **x**\n```\nafter")
    assert '<span class="language">python</span>' in shown
    assert "if a &lt; b:\n    **x**</pre>" in shown
    assert 'aria-label="Copy python code"' in shown
    assert shown.endswith("<p>after</p>")
    assert "<pre" in render("```\nnot closed yet"), "while it is being written it is code already"


def test_tables_have_cells(render: Render) -> None:
    shown = render("| a | b |\n|---|--:|\n| 1 | **2** |\n| 3 |")
    assert shown.count("<tr>") == 3
    assert '<td class="right"><strong>2</strong></td>' in shown


def test_links_lead_to_the_web_and_tell_where(render: Render) -> None:
    shown = render("[here](https://example.org/a?b=1) and https://example.org/c.")
    assert 'href="https://example.org/a?b=1"' in shown
    assert 'rel="noopener noreferrer nofollow"' in shown
    assert 'title="https://example.org/a?b=1"' in shown
    assert ">https://example.org/c</a>." in shown


HOSTILE = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror=window.owned=1>",
    "<svg onload=window.owned=1>",
    "<iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "[x](javascript:window.owned=1)",
    "[x](JaVaScRiPt:window.owned=1)",
    "[x](java\tscript:window.owned=1)",
    "[x](data:text/html,<script>parent.owned=1</script>)",
    "[x](vbscript:x)",
    "[x](blob:https://example.org/x)",
    "![x](https://example.org/pixel.png)",
    "![x](javascript:window.owned=1)",
    '[x](https://example.org" onmouseover="window.owned=1)',
    "[x](https://example.org/'onmouseover='window.owned=1)",
    "<a href='javascript:window.owned=1'>x</a>",
    "`<img src=x onerror=window.owned=1>`",
    "```<img src=x onerror=window.owned=1>\n<img src=x onerror=window.owned=1>\n```",
    "| <img src=x onerror=window.owned=1> |\n|---|\n| <b>x</b> |",
    "- <img src=x onerror=window.owned=1>",
    "> <img src=x onerror=window.owned=1>",
    "# <img src=x onerror=window.owned=1>",
    "**<img src=x onerror=window.owned=1>**",
    "[<img src=x onerror=window.owned=1>](https://example.org)",
    "&lt;img src=x onerror=window.owned=1&gt;",
    "<style>*{display:none}</style>",
    "<form action=https://example.org><button>x</button></form>",
    "\u202e<img src=x onerror=window.owned=1>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_an_answer_is_ever_run_or_fetched(page: Any, render: Render, text: str) -> None:
    found = page.evaluate(
        """async (text) => {
          const { render } = await import('/page/markdown.js');
          const place = document.createElement('div');
          document.body.append(place);
          render(place, text);
          const all = [...place.querySelectorAll('*')];
          const tags = /^(SCRIPT|IMG|SVG|IFRAME|STYLE|FORM|OBJECT|LINK|BASE|META)$/i;
          const bad = all.filter(each => tags.test(each.tagName)
            || [...each.attributes].some(({ name }) => name.startsWith('on') || name === 'style' || name === 'src'));
          const links = all.filter(each => each.tagName === 'A').map(each => each.protocol);
          for (const each of all) each.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
          place.remove();
          return { bad: bad.map(each => each.outerHTML), links, owned: window.owned ?? null };
        }""",
        text,
    )
    assert found["bad"] == []
    assert {*found["links"]} <= {"https:", "http:"}
    assert found["owned"] is None


@pytest.mark.parametrize(
    "text",
    [
        "**a " * 20_000,
        "[" * 50_000,
        "`" * 50_000,
        "> " * 5_000 + "x",
        "- " * 5_000 + "x",
        "_a" * 30_000,
        "|" * 50_000,
        "* " * 30_000,
    ],
    ids=["stars", "brackets", "ticks", "quotes", "lists", "underlines", "bars", "bullets"],
)
def test_no_text_stops_the_page(page: Any, text: str) -> None:
    spent_ms = page.evaluate(
        """async (text) => {
          const { blocksOf } = await import('/page/markdown.js');
          const before = performance.now();
          blocksOf(text).forEach((block) => block.make());
          return performance.now() - before;
        }""",
        text,
    )
    # Generous: what would be wrong takes minutes.
    assert spent_ms < 5_000
