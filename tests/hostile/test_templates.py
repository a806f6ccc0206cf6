"""Chat templates of models from strangers: they may neither hold up nor exhaust the server that renders them."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardcompute.core.errors import CapacityError, UnsupportedModelError, UsageError
from shardcompute.models.chat_template import ChatTemplate
from shardcompute.models.templates.sandbox import SandboxLimits
from support.api.api_server import ask_port, request
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.processes import Started

HASTY = SandboxLimits(wall_s=3.0, cpu_s=1.0, memory_bytes=128 << 20, cool_down_s=0.0)
PATIENCE_S = 30.0
GROWTH_KB = 200_000
USER = [{"role": "user", "content": "Hi"}]
GROW = (
    "{% set n = namespace(x=%s) %}{% for i in range(99999) %}{% set n.x = %s %}{% endfor %}{{ n.x | length }}"
)


def grow(start: str, step: str) -> str:
    return GROW.replace("%s", start, 1).replace("%s", step, 1)


ATTACKS = {
    "a large number": grow("9", "n.x * n.x"),
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a number in text": "{{ ('9' * 10000000) | int | string | length }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "widths": "{% for i in range(99) %}{% set x = '%100000000d' % 1 %}{% endfor %}",
    "a format": "{{ '{:>1000000000}'.format('x') }}",
    "a format by filter": "{{ '%1000000000s' | format('x') }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "center": "{{ 'x'.center(1000000000) | length }}",
    "zfill": "{{ 'x'.zfill(2000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) | length }}",
    "indent": "{{ '\\n\\n' | indent(1000000000) | length }}",
    "slices": "{{ range(99999) | slice(10000000) | list | length }}",
    "batches": "{{ range(99999) | batch(100000000, 'x') | list | length }}",
    "join": grow("'0123456789'", "[n.x, n.x, n.x] | join(n.x)"),
    "replace": grow("'0123456789'", "n.x.replace('', n.x)"),
    "repetition": grow("'0123456789'", "n.x * 1000"),
    "addition": grow("'0123456789'", "n.x + n.x"),
    "concatenation": grow("'0123456789'", "n.x ~ n.x"),
    "lists": grow("[1]", "n.x + n.x"),
    "lists in lists": grow("[1]", "[n.x, n.x]") + "{{ n.x | string }}",
    "equal lists in lists": (
        "{% set n = namespace(x=[], y=[]) %}{% for i in range(40) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    ),
    "sorted lists in lists": (
        "{% set n = namespace(x=[], y=[]) %}{% for i in range(40) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ [n.x, n.y] | sort }}"
    ),
    "JSON of lists in lists": (
        "{% set n = namespace(x=[]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x | tojson }}"
    ),
    "lists that grow": (
        "{% set x = [] %}{% for i in range(99999) %}{% for j in range(999) %}{% set _ = x.append('x' * 999) %}"
        "{% endfor %}{% endfor %}"
    ),
    "appended lists in lists": (
        "{% set n = namespace(x=[]) %}{% for i in range(40) %}{% set y = [] %}{% set _ = y.append(n.x) %}"
        "{% set _ = y.append(n.x) %}{% set n.x = y %}{% endfor %}{{ n.x | tojson }}"
    ),
    "a list that holds itself": "{% set x = [] %}{% set _ = x.append(x) %}{{ x | tojson }}{{ x | string }}{{ x == x }}",
    "JSON of long generators": (
        "{% for i in range(99999) %}{{ range(99999) | map('string') | tojson | length }}{% endfor %}"
    ),
    "JSON with an indent": "{{ [1] | tojson(indent=2000000000) | length }}",
    "a sum": "{{ range(99999) | map('string') | list | map('length') | sum }}{{ [[0] * 9999999] | sum(start=[]) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops without bodies": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a loop that calls itself": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}"),
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "words": "{{ ('a ' * 8000000) | wordwrap(1) | length }}",
    "titles": "{% for i in range(9999) %}{% set x = ('ab ' * 5000000) | title %}{% endfor %}",
    "urls": "{{ ('http://a.b ' * 1000000) | urlize | length }}",
    "tags": "{{ ('<' * 8000000) | striptags | length }}",
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_it_ends_and_takes_nothing_of_ours(source: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.monotonic()
    with contextlib.suppress(UnsupportedModelError, UsageError):
        assert len(ChatTemplate(source, sandbox_limits=HASTY).render(USER)) < 10_000
    assert time.monotonic() - started_s < PATIENCE_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < GROWTH_KB


def test_a_template_goes_on_after_it_had_to_be_ended() -> None:
    template = ChatTemplate("{{ '%' ~ messages[0].content ~ 'd' }}{{ ('%' ~ messages[0].content ~ 'd') % 1 }}",
                            sandbox_limits=HASTY)  # fmt: skip
    for _ in range(2):
        assert template.render([{"role": "user", "content": "3"}]) == "%3d  1"
        with pytest.raises(UnsupportedModelError, match="too much"):
            template.render([{"role": "user", "content": "999999999"}])


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_asking_again_and_again_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    limits = SandboxLimits(wall_s=PATIENCE_S, cpu_s=0.5, cool_down_s=10.0, longest_cool_down_s=15.0)
    template = ChatTemplate("{{ 'x' * 1 }}{% for i in range(messages[0].content | int) %}{{ 'x'.ljust(9999999)[0] }}"
                            "{% endfor %}", sandbox_limits=limits)  # fmt: skip
    template._sandbox._clock = clock

    def ask(count: int) -> str:
        return template.render([{"role": "user", "content": str(count)}])

    assert ask(2) == "xxx"
    with pytest.raises(UnsupportedModelError, match="too much"):
        ask(90_000)
    with pytest.raises(CapacityError, match="a moment ago") as caught:
        ask(2)
    assert "10 s" in caught.value.hint
    clock.now_s += 11
    with pytest.raises(UnsupportedModelError, match="too much"):
        ask(90_000)  # which is remembered
    assert template._sandbox._process is None, "nobody was asked"
    assert ask(3) == "xxxx"
    with pytest.raises(UnsupportedModelError, match="too much"):
        ask(90_001)
    with pytest.raises(CapacityError, match="a moment ago"):
        ask(2)


def test_a_process_that_was_ended_by_others_is_replaced() -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate("{{ 2 * 3 }}", sandbox_limits=HASTY)
    assert template.render(USER) == "6"
    [helper] = set(psutil.Process().children()) - before
    helper.kill()
    helper.wait(10)
    assert template.render(USER) == "6"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_llama(tmp_path_factory.mktemp("poisoned") / "tiny")
    path = folder / "tokenizer_config.json"
    words = json.loads(path.read_text())
    words["chat_template"] = grow("9", "n.x * n.x")
    path.write_text(json.dumps(words))
    return folder


@pytest.fixture
def server(poisoned: Path) -> Iterator[Started]:
    started = Started("up", poisoned, "--local", "--port", "0")
    try:
        started.wait_for("Ctrl-C")
        yield started
    finally:
        started.process.kill()
        started.end()


def test_a_server_goes_on_and_ends(server: Started) -> None:
    """It answers others meanwhile, says what is wrong, and obeys a signal while a template is at work."""
    port = int(server.wait_for(r"http://127\.0\.0\.1:(\d+)")[1])
    body = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    chat = request("/v1/chat/completions", body, host="127.0.0.1")
    answers: list[tuple[int, bytes]] = []

    def ask() -> None:
        answers.append(ask_port(port, chat))

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        started_s = time.monotonic()
        assert ask_port(port, request("/health", method="GET", host="127.0.0.1"))[0] == 200
        assert time.monotonic() - started_s < 3.0
        asking.join(0.05)
    assert answers[0][0] == 400
    assert b"used too much time or memory" in answers[0][1]
    raw = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    assert ask_port(port, request("/v1/completions", raw, host="127.0.0.1"))[0] == 200
    other = json.dumps({"messages": [*USER, *USER], "max_tokens": 1}).encode()
    asking = threading.Thread(target=ask_port, args=(port, chat.replace(body, other)))
    asking.start()
    started_s = time.monotonic()
    assert server.signal(signal.SIGTERM) == 0
    assert time.monotonic() - started_s < 15.0
    asking.join()


def test_what_it_says_itself_comes_through() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        ChatTemplate("{{ 2 * 3 }}{{ raise_exception('roles must alternate') }}").render(USER)
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        ChatTemplate("{{ 2 * 3 / 0 }}").render(USER)
