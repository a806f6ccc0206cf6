"""Takes the pictures of the page that the documentation shows, from a real cluster of three workers on this machine.

    python scripts/screenshots.py [docs/images] [--maps]

The maps of 8 and 24 machines, which `--maps` takes alone, are of clusters that are made up (`tests/support`). Needs
chromium and the package playwright. The real cluster serves the embedded default model, lives in a folder of its own
and is gone afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
PORT = 8137
URL = f"http://127.0.0.1:{PORT}"
WORKERS = ("--workers", "3", "--max-memory", "130M", "--kv-tokens", "2048", "--threads", "1")
QUESTIONS = ("Why is the sky blue?", "Name three rivers of Europe.", "What is a chain of machines good for?")
MACHINES = "workstation-{:02}.second-floor.lab.example.org"
WITHIN_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of the page anew.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/images"))
    parser.add_argument("--maps", action="store_true", help="of made-up clusters alone, which takes seconds")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        show_maps(browser, folder)
    if not options.maps:
        show_cluster(folder)


def show_cluster(folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as data,
        running_cluster(Path(data)) as cluster,
        open_browser() as browser,
    ):
        from shardcompute.security.local_secret import read_local_secret

        key = read_local_secret(Path(data) / "cluster") or ""
        light = open_page(browser, DESKTOP, "light", URL, key)
        light.locator(".chain .pill[data-tone=good]").wait_for()
        for question in QUESTIONS:
            ask(question)
        # Somebody dies and is replaced, so that there is something to tell.
        show_rescue(light, cluster, folder)
        light.goto(f"{URL}/#/cluster")
        light.locator(".chain .pill[data-tone=good]").wait_for()
        dark, phone = (
            open_page(browser, size, scheme, URL, key)
            for size, scheme in ((DESKTOP, "dark"), (PHONE, "light"))
        )
        with asking_on(3):
            light.wait_for_timeout(8000)
            for page, name in ((light, "light"), (dark, "dark"), (phone, "phone")):
                page.goto(f"{URL}/#/cluster")
                page.wait_for_timeout(1500)
                page.screenshot(path=folder / f"cluster-{name}.png", full_page=name != "phone")
        chat(light, folder / "chat-light.png")
        chat(phone, folder / "chat-phone.png")
        show_models(light, folder / "models-light.png")
        show_request(dark, folder / "requests-dark.png")
        for page, view, name in ((light, "usage", "light"), (dark, "connect", "dark")):
            page.goto(f"{URL}/#/{view}")
            page.wait_for_timeout(1200)
            page.screenshot(path=folder / f"{view}-{name}.png")


def show_maps(browser: Any, folder: Path) -> None:
    """Made-up clusters, and one that is lost."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from shardcompute.api import create_app
    from shardcompute.web import page_routes
    from support.api.api_server import ApiServer
    from support.api.bridge import LOCAL_SECRET
    from support.api.crowd import Crowd
    from unit.api.fakes import FakeService

    for count in (8, 24):
        with Crowd(count, 50, stages=count) as crowd:
            for index in range(count):
                crowd.change_node(index, name=MACHINES.format(index))
            app = create_app(FakeService(), admin=crowd, local_secret=LOCAL_SECRET, page=page_routes())  # type: ignore[arg-type]
            with ApiServer(app) as server:
                page = open_page(browser, DESKTOP, "light", f"http://127.0.0.1:{server.port}", LOCAL_SECRET)
                page.locator(".machines > li").first.wait_for()
                crowd.stir()
                page.locator(".token").first.wait_for()
                page.wait_for_timeout(1200)
                page.locator(".map-card").screenshot(path=folder / f"map-{count}.png")
        if count == 8:
            page.locator("#view.is-stale").wait_for()
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(3000)
            page.screenshot(path=folder / "lost-light.png")
        page.context.close()


@contextlib.contextmanager
def running_cluster(data: Path) -> Iterator[int]:
    """The id of the coordinator's process."""
    ports = ("--port", str(PORT), "--cluster-port", "0", "--join-port", "0")
    command = [
        sys.executable,
        "-m",
        "shardcompute",
        "up",
        "--data-dir",
        str(data / "cluster"),
        *ports,
        *WORKERS,
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_server()
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def wait_for_server() -> None:
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            urllib.request.urlopen(f"{URL}/version", timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def ask(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    body = {"model": "default", "messages": messages, "max_tokens": 60, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=WITHIN_S).close()


@contextlib.contextmanager
def asking_on(clients: int) -> Iterator[None]:
    """Keeps the cluster busy until the block ends."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            ask(QUESTIONS[0])

    threads = [threading.Thread(target=go_on) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield browser
        browser.close()


def open_page(browser: Any, size: dict[str, int], scheme: str, url: str = URL, key: str = "") -> Any:
    context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1)
    context.add_init_script(f"sessionStorage.setItem('shardcompute.key', {key!r})")
    context.set_default_timeout(WITHIN_S * 1000)
    page = context.new_page()
    page.goto(url)
    return page


def chat(page: Any, path: Path) -> None:
    page.goto(f"{URL}/#/chat")
    for question in QUESTIONS[:2]:
        page.locator("#chat-text").fill(question)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Stop").wait_for(state="hidden")
        page.locator(".caret").wait_for(state="detached")
    page.screenshot(path=path)


def show_rescue(page: Any, cluster: int, folder: Path) -> None:
    """Kills a worker in the middle of an answer, which says so and goes on."""
    page.goto(f"{URL}/#/chat")
    page.locator("#chat-text").fill("Tell me a long story about a lighthouse.")
    page.keyboard.press("Enter")
    page.locator(".strip rect").nth(30).wait_for()
    worker = next(each for each in psutil.Process(cluster).children() if "worker-2" in each.cmdline())
    worker.kill()
    page.locator(".rescue.is-waiting:visible").wait_for()
    page.screenshot(path=folder / "chat-waiting.png")
    page.locator(".rescues .rescue").wait_for()
    page.wait_for_timeout(1500)
    page.screenshot(path=folder / "chat-rescue.png")
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    page.get_by_role("button", name="New conversation").click()


def show_models(page: Any, path: Path) -> None:
    page.goto(f"{URL}/#/models")
    page.get_by_role("button", name="Choose").first.click()
    page.locator(".plan .layers").wait_for()
    page.screenshot(path=path)


def show_request(page: Any, path: Path) -> None:
    page.goto(f"{URL}/#/requests")
    page.locator(".request button").first.click()
    page.locator("aside .waterfall").first.wait_for()
    page.screenshot(path=path)


if __name__ == "__main__":
    main()
