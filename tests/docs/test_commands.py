"""The documentation tells the truth: its commands run, its options exist, its links and quoted messages too.

Blocks of `bash`, `console` and `python` are run against one cluster, in the order of the page, each page in a folder of
its own. A block that cannot be run says why after its language: ```bash no-run: needs a second machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from shardcompute.cli.main import build_app
from support.swarm.processes import COMMAND, FREE_PORTS, Started, Swarm, run

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("ops/**/*.md")])
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RUNNABLE = ("bash", "console", "python")
NO_RUN = "no-run:"
SHOWS = r"shardcompute (status|nodes|show|plan|doctor|list|logs)\b"
SERVERS = ("up", "coordinator", "worker", "join", "driver")
"""Commands that run until they are stopped: the cluster that the tests have started stands for them."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    mark: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Commands, one per line."""
        text = self.text.replace("\\\n", " ")
        if self.language != "console":
            return text.splitlines()
        return [line[2:] for line in text.splitlines() if line.startswith("$ ")]


def _blocks() -> Iterator[Block]:
    for page in PAGES:
        for language, mark, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if language in RUNNABLE:
                yield Block(str(page.relative_to(ROOT)), language, mark.strip(), text)


BLOCKS = list(_blocks())
RUN = [block for block in BLOCKS if not block.mark]


@dataclass(frozen=True)
class Desk:
    """Where a reader sits: a cluster that runs, and a folder."""

    port: int
    environment: dict[str, str]
    folder: Path
    shown: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def desk(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("reader")
    home = folder / "shardcompute"
    shutil.copytree(smollm2_gguf.parent, home / "models" / "smollm2", copy_function=_link)
    commands = folder / "bin"
    commands.mkdir()
    program = commands / "shardcompute"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    (commands / "python3").symlink_to(sys.executable)
    environment = {
        **os.environ,
        "HOME": str(folder),
        "SHARDCOMPUTE_HOME": str(home),
        "SHARDCOMPUTE_OFFLINE": "1",
        "SHARDCOMPUTE_THREADS": "1",
        "NO_COLOR": "1",
        "no_proxy": "*",
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
    }
    options = ("--data-dir", home / "cluster", *FREE_PORTS, "--workers", "2", "--kv-tokens", "4096")
    command = Started("up", home / "models" / "smollm2" / smollm2_gguf.name, *options)
    try:
        swarm = Swarm(command, home / "cluster")
        yield Desk(int(swarm.url.rpartition(":")[2]), environment, folder)
    finally:
        run("down", "--data-dir", home / "cluster")
        command.end()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.mark.parametrize("block", RUN, ids=[f"{block.page}-{number}" for number, block in enumerate(RUN)])
def test_commands_run(block: Block, desk: Desk) -> None:
    folder = desk.folder / block.page.replace("/", "_")
    folder.mkdir(exist_ok=True)
    words = [line for line in _to_run(block) if line not in desk.shown]
    if not words:
        return
    for tool in ("curl",):
        if any(line.startswith(tool) for line in words) and shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    script = "\n".join(words).replace("127.0.0.1:8000", f"127.0.0.1:{desk.port}")
    program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*program, script],
        cwd=folder,
        env=desk.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    assert '"error"' not in done.stdout, done.stdout
    # What only shows something need not be shown again on another page.
    desk.shown.update(line for line in words if re.match(SHOWS, line))


def _to_run(block: Block) -> list[str]:
    if block.language == "python":
        return block.text.splitlines()
    return [line for line in block.lines if not _is_server(line)]


def _is_server(line: str) -> bool:
    words = shlex.split(line, comments=True)
    return len(words) > 1 and words[0] == "shardcompute" and words[1] in SERVERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in targets if not (page.parent / link).exists()]
    assert not missing


def test_every_mark_gives_a_reason() -> None:
    marked = [block for block in BLOCKS if block.mark]
    assert all(block.mark.startswith(NO_RUN) and block.mark[len(NO_RUN) :].strip() for block in marked)
    assert len(RUN) > len(marked) / 2


def test_options_in_every_block_exist() -> None:
    found = 0
    for block in BLOCKS:
        for line in block.lines if block.language != "python" else ():
            for words in _our_commands(line):
                found += 1
                _parse(words, f"{block.page}: {line}")
    assert found > 40


def _our_commands(line: str) -> Iterator[list[str]]:
    """The arguments of each `shardcompute` in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] | None = None
    for word in lexer:
        if set(word) <= set("|&;<>"):
            if words is not None:
                yield words
            words = None
        elif words is not None:
            words.append(word)
        elif word == "shardcompute":
            words = []
    if words is not None:
        yield words


def _parse(words: list[str], where: str) -> None:
    command: Any = typer.main.get_command(build_app())
    while words and (child := getattr(command, "commands", {}).get(words[0])) is not None:
        command, words = child, words[1:]
    if not words and hasattr(command, "commands"):
        return
    if command.name == "install":
        return  # the options are those of another command, which it checks itself
    try:
        command.make_context(command.name, list(words), resilient_parsing=False)
    except typer.Exit:
        return  # --help, --version
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error


def test_quoted_messages_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    code = "\n".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")
    )
    quoted = [
        quote
        for line in text.splitlines()
        if line.startswith("### ")
        for quote in re.findall("`([^`]+)`", line)
    ]
    assert len(quoted) > 20
    for quote in quoted:
        for part in (part.strip(" (,:") for part in quote.split("…")):
            assert part in code, f"{part!r} of {quote!r} is in no message"
