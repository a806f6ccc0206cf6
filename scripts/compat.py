"""`make compat`: unmodified clients, each in an environment of its own, against real servers of this checkout.

Prints one line for each client. Environments are kept under `--cache` and used again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcompute.bench.servers import Server, serving
from shardcompute.cli.options.keys import API_KEY_VARIABLE

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "tests" / "compat" / "clients"
KEY = "compat-key"
MODEL_NAME, MODEL = "smollm2", "SmolLM2-135M-Instruct"
"""As it is asked for, and as it is served."""
ALONE = ("--local",)
SHORT = (*ALONE, "--context", "96")
SERVERS: dict[str, tuple[str, ...]] = {
    "alone": ALONE,
    "three stages": (*ALONE, "--parallel", "pp=3"),
    "swarm": ("--workers", "3", "--cluster-port", "0", "--join-port", "0"),
}
_MINUTES_S = 900.0
_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class Client:
    """What to install, which program to run with it, and what the program is told besides url, key and model."""

    name: str
    packages: tuple[str, ...]
    """Of Python, or of npm for a program of Node's; each at one version, so that a failure is ours."""
    program: str = ""
    has_scores: bool = False
    """It is told a file of texts, and leaves scores that must be equal for all servers."""
    is_wild: bool = False
    """It asks for anything, so it gets a server of its own whose answers are short."""

    @property
    def is_of_node(self) -> bool:
        return self.program.endswith(".mjs")


TABLE = (
    Client("openai", ("openai==3.49.0",), "openai_client.py"),
    Client("openai-previous", ("openai==2.54.0",), "openai_client.py"),
    Client("langchain-openai", ("langchain-openai==1.7.3",), "langchain_client.py"),
    Client("llm", ("llm==0.36",), "llm_client.py"),
    Client("anthropic", ("anthropic==2.8.0",), "anthropic_client.py"),
    Client("ollama", ("ollama==0.6.3",), "ollama_client.py"),
    Client("open-webui", ("aiohttp==3.14.5",), "open_webui_client.py"),
    Client("litellm", ("litellm==1.106.2",), "frameworks/litellm_client.py"),
    Client("instructor", ("instructor==1.17.0",), "frameworks/instructor_client.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.66.0",), "frameworks/pydantic_ai_client.py"),
    Client("openai-agents", ("openai-agents==0.24.0",), "frameworks/openai_agents_client.py"),
    Client("dspy", ("dspy==3.4.1",), "frameworks/dspy_client.py"),
    Client("haystack", ("haystack-ai==3.4.0",), "frameworks/haystack_client.py"),
    Client(
        "llama-index",
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        "frameworks/llama_index_client.py",
    ),
    Client("smolagents", ("smolagents[openai]==1.26.0",), "frameworks/smolagents_client.py"),
    Client("npm-openai", ("openai@6.49.0",), "node/openai_client.mjs"),
    Client(
        "npm-ai",
        ("ai@6.0.326", "@ai-sdk/openai@3.0.139", "@ai-sdk/openai-compatible@2.0.87", "zod@4.6.7"),
        "node/ai_client.mjs",
    ),
    Client("lm-eval", ("lm-eval[api]==0.4.13",), "lm_eval_client.py", has_scores=True),
    Client("schemathesis", ("schemathesis==4.32.5",), is_wild=True),
)


def main() -> int:
    options = _read_options()
    os.environ[API_KEY_VARIABLE] = KEY  # for the servers; a command line is for everybody to see
    clients = [client for client in TABLE if not options.client or client.name in options.client]
    failures = tried = 0
    with contextlib.ExitStack() as stack:
        tame = any(not client.is_wild for client in clients)
        names = (options.server or SERVERS) if tame else ()
        shared = [stack.enter_context(serving(name, MODEL_NAME, SERVERS[name])) for name in names]
        for client in clients:
            started = time.monotonic()
            with contextlib.ExitStack() as own:
                servers = (
                    [own.enter_context(serving("short", MODEL_NAME, SHORT))] if client.is_wild else shared
                )
                try:
                    why = try_client(client, servers, options.cache, options.data)
                except NotInstalledError as error:
                    why = f"cannot be installed: {error}"
                    if options.may_skip:
                        print(f"{client.name:18} SKIPPED, {why}", flush=True)
                        continue
            tried += 1
            failures += bool(why)
            verdict = f"failed: {why}" if why else f"ok ({', '.join(server.name for server in servers)})"
            print(f"{client.name:18} {time.monotonic() - started:5.0f} s  {verdict}", flush=True)
    print(f"{tried - failures} of {len(clients)} clients content, {len(clients) - tried} skipped", flush=True)
    return 1 if failures else 0


def try_client(client: Client, servers: Sequence[Server], cache: Path, data: Path) -> str:
    """Empty, or why it failed. Raises NotInstalledError."""
    try:
        environment_folder = environment(client, cache)
        with tempfile.TemporaryDirectory(prefix="shardcompute-compat-") as folder:
            scores = []
            for server in servers:
                run(command(client, environment_folder, server, data, Path(folder, server.name)), server.name)
                if client.has_scores:
                    scores.append(Path(folder, server.name).read_text())
    except NotInstalledError:
        raise
    except CompatError as error:
        return str(error)
    if len(set(scores)) > 1:
        return "the log-likelihoods of " + " and ".join(server.name for server in servers) + " differ"
    return ""


class CompatError(Exception):
    """A client could not be installed, or was not content."""


class NotInstalledError(CompatError):
    """The package index did not give what the client needs."""


def environment(client: Client, cache: Path) -> Path:
    """The folder of an environment with the client in it, installed unless it is there already."""
    folder = cache / client.name
    mark = folder / ".installed"
    wanted = "\n".join(client.packages)
    if mark.exists() and mark.read_text() == wanted:
        return folder
    try:
        (_install_npm if client.is_of_node else _install_pip)(folder, client.packages)
    except CompatError as error:
        raise NotInstalledError(str(error)) from error
    mark.write_text(wanted)
    return folder


def _install_pip(folder: Path, packages: Sequence[str]) -> None:
    run([sys.executable, "-m", "venv", "--clear", str(folder)], "venv")
    python = str(folder / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], "pip")


def _install_npm(folder: Path, packages: Sequence[str]) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalledError("node and npm are not on this machine")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true}')
    options = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    run(["npm", "install", *options, "--prefix", str(folder), *packages], "npm")


def command(client: Client, folder: Path, server: Server, data: Path, scores: Path) -> list[str]:
    told = [server.url, KEY, MODEL]
    if client.is_of_node:
        # Node looks for packages beside the program.
        program = shutil.copy(CLIENTS / client.program, folder)
        return ["node", str(program), *told]
    python = folder / "bin" / "python"
    if not client.program:
        # Whether what comes is what the document promises is the suite's concern; here nothing may break.
        return [
            *(str(python.with_name("schemathesis")), "run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--checks", "not_a_server_error"),
            *("--max-examples", "20", "--phases", "fuzzing"),
            *("--generation-deterministic", "--request-timeout", "300"),
        ]
    if client.has_scores:
        told += [str(data / "lambada.jsonl"), str(scores)]
    return [str(python), str(CLIENTS / client.program), *told]


def run(command: Sequence[str], name: str) -> None:
    # The clients must reach this machine, not a proxy.
    surroundings = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    try:
        done = subprocess.run(
            command,
            env=os.environ if name in ("pip", "npm") else surroundings,
            cwd=tempfile.gettempdir(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_MINUTES_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CompatError(f"{name}: no end after {_MINUTES_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in _told(done.stdout) if line.strip()]
        raise CompatError(f"{name}: exit code {done.returncode}\n    " + "\n    ".join(lines[-_SHOWN_LINES:]))


def _told(output: str) -> Iterator[str]:
    for line in output.splitlines():
        yield line[:300]


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [client.name for client in TABLE]
    parser.add_argument("client", nargs="*", metavar="client", help=f"of: {', '.join(names)}; all by default")
    parser.add_argument("--server", action="append", choices=SERVERS, help="may be repeated; all by default")
    parser.add_argument("--may-skip", action="store_true", help="do not fail for what cannot be installed")
    parser.add_argument("--cache", type=Path, default=ROOT / ".venv" / "compat")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    unknown = sorted(set(options.client) - set(names))
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}")
    options.cache = options.cache.absolute()
    options.data = options.data.absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
