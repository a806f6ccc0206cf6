"""Options of the commands that start a worker, or another node that joins a cluster."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.format import parse_size
from shardcompute.cli.options.engine import Backend, BackendName, Device, Threads
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import Settings

_MOST_TOKEN = 4096

WorkerFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="Folder of the worker, by default `worker` in the data folder. Each folder is a worker of its own.",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on, by default the one that this machine uses towards the coordinator.",
    ),
]
Port = Annotated[
    int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 for any free one.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise", metavar="HOST", help="Name or address under which other nodes reach this worker."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="What people call this worker, by default the machine's name."
    ),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        parser=parse_size,
        help="All that a worker may take, such as 8G: its whole process where it computes in the machine's own memory, "
        "of the GPU's memory elsewhere; by default what is free on its GPU less a reserve, or most of the machine's.",
    ),
]
_OWNER = "When and how much"
MaxDownload = Annotated[
    int | None,
    typer.Option(
        "--max-download",
        metavar="SIZE",
        parser=parse_size,
        help="Bytes a second of weights that this worker fetches at most, from the hub, mirrors and other machines, "
        "such as 20M; by default as SHARDCOMPUTE_DOWNLOAD_RATE says, else as they come.",
        rich_help_panel=_OWNER,
    ),
]
MaxUpload = Annotated[
    int | None,
    typer.Option(
        "--max-upload",
        metavar="SIZE",
        parser=parse_size,
        help="Bytes a second of weights that other machines get from this worker at most, such as 5M; by default as "
        "many as they take.",
        rich_help_panel=_OWNER,
    ),
]
OnlyWhenIdle = Annotated[
    bool,
    typer.Option(
        "--only-when-idle",
        help="Work only while nobody uses this machine: no input for five minutes where the system tells, and other "
        "programs that leave most of the processors alone.",
        rich_help_panel=_OWNER,
    ),
]
OnlyOnMains = Annotated[
    bool, typer.Option("--only-on-mains", help="Do not work on a battery.", rich_help_panel=_OWNER)
]
NotMetered = Annotated[
    bool,
    typer.Option(
        "--not-metered",
        help="Do not work while this machine's link is metered, as NetworkManager or Windows say.",
        rich_help_panel=_OWNER,
    ),
]
NoSeed = Annotated[
    bool,
    typer.Option(
        "--no-seed",
        help="Keep no weights on this disk for other machines. By default a machine that no model's ring needs keeps "
        "some, in at most a quarter of what is free, and gives them to whoever joins.",
        rich_help_panel=_OWNER,
    ),
]
Watts = Annotated[
    float | None,
    typer.Option(
        "--watts",
        metavar="N",
        min=0.1,
        max=1e6,
        help="What this machine draws while it works, at the wall. By default what energy counters of its processors "
        "or its card say, where they can be read; else nobody knows what its tokens cost.",
        rich_help_panel=_OWNER,
    ),
]
PriceHour = Annotated[
    float | None,
    typer.Option(
        "--price-hour",
        metavar="PRICE",
        min=0.0,
        max=1e6,
        help="What an hour of this machine costs, electricity and all, for one that is rented.",
        rich_help_panel=_OWNER,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", metavar="MACHINE@FILE", hidden=True, help="Send as an emulated network would."),
]
Through = Annotated[
    str | None,
    typer.Option(
        "--through",
        metavar="URL",
        help="Door of the coordinator's relay, such as wss://HOST:443, for networks that let only the web out; an "
        "HTTP proxy is used where the environment names one.",
    ),
]
Found = Annotated[
    str | None,
    typer.Option("--found", metavar="JSON", hidden=True, help="Devices that whoever starts this has found."),
]


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """How a worker is to take part; None: chosen from what the machine is."""

    host: Host = None
    port: Port = 0
    advertise: Advertise = None
    name: Name = None
    max_memory: MaxMemory = None
    max_download: MaxDownload = None
    max_upload: MaxUpload = None
    only_when_idle: OnlyWhenIdle = False
    only_on_mains: OnlyOnMains = False
    not_metered: NotMetered = False
    no_seed: NoSeed = False
    watts: Watts = None
    price_hour: PriceHour = None
    threads: Threads = None
    backend: BackendName = Backend.AUTO
    device: Device = "auto"
    shape: Shape = None
    found: Found = None


def worker_folder(settings: Settings, given: Path | None) -> Path:
    return (given or settings.data_dir / "worker").absolute()


def driver_folder(settings: Settings, given: Path | None) -> Path:
    return (given or settings.data_dir / "driver").absolute()


def given_token(token: str | None) -> str | None:
    """The token of a command line, where others could see it, or for `-` the first line of standard input."""
    if token != "-":
        return token
    line = sys.stdin.readline(_MOST_TOKEN).strip()
    if not line:
        raise UsageError("there is no token on standard input", hint="write one line into it")
    return line
