"""Options of the commands that start and stop a cluster, and the folders in which its nodes live."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.format import parse_duration
from shardcompute.cli.options.https import Https, HttpsChoice, TlsCert, TlsKey
from shardcompute.cli.options.keys import AllowedHost, RequireKey, ServerKeyFile
from shardcompute.core.settings import Settings, check_origin

CLUSTER_PORT = 7420
JOIN_PORT = 7421
RELAY_PORT = 7422
KV_TOKENS = 16_384
CONTEXT = 8192
_CLUSTER = "Cluster"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: smollm2 (the default), a name like qwen3:8b, a folder, a .gguf file or org/repo.",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 for other machines too, :: for those of IPv6 as well.",
    ),
]
Port = Annotated[
    int,
    typer.Option("--port", metavar="N", min=0, max=65535, help="Port of the HTTP API; 0 for any free one."),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="Web origin whose pages may call the models' routes, such as http://localhost:3000; may be repeated. "
        "None by default; * for any.",
    ),
]


class ImageUrls(StrEnum):
    """Which images are fetched that requests name by URL."""

    OFF = "off"
    PUBLIC = "public"
    ANY = "any"


ImageUrlsOption = Annotated[
    ImageUrls,
    typer.Option(
        "--image-urls",
        help="Fetch images that requests name by URL: from public addresses, or from any, also of this machine and its "
        "network. By default none: clients send images themselves.",
    ),
]
ClusterFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="Folder of the cluster, by default `cluster` in the data folder. Each folder is a cluster of its own.",
        rich_help_panel=_CLUSTER,
    ),
]


class Drafting(StrEnum):
    """What drafts tokens for answers that are on their way."""

    AUTO = "auto"
    OFF = "off"
    NGRAM = "ngram"
    MODEL = "model"
    HEAD = "head"


Speculate = Annotated[
    Drafting,
    typer.Option(
        "--speculate",
        help="What may draft tokens ahead, by default whatever pays. It never changes an answer.",
        rich_help_panel=_CLUSTER,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model with the same vocabulary that drafts tokens, on this machine.",
        rich_help_panel=_CLUSTER,
    ),
]


class Preference(StrEnum):
    """What a placement is judged by."""

    LATENCY = "latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


LATENCY_WEIGHTS = {Preference.LATENCY: 1.0, Preference.BALANCED: 0.8, Preference.THROUGHPUT: 0.0}

Prefer = Annotated[
    Preference | None,
    typer.Option(
        "--prefer",
        help="Place layers for one fast stream, for many streams, or for both (balanced, the default).",
        rich_help_panel=_CLUSTER,
    ),
]


class DriverPlacementOption(StrEnum):
    """Where the driver of a chain may sit."""

    AUTO = "auto"
    HERE = "here"


DriverPlacement = Annotated[
    DriverPlacementOption | None,
    typer.Option(
        "--driver-placement",
        help="Where tokens are scheduled: on this machine (here), or on a worker where that makes a token's way "
        "round the ring clearly shorter (auto, the default).",
        rich_help_panel=_CLUSTER,
    ),
]
ReplayMoves = Annotated[
    bool,
    typer.Option(
        "--replay-moves",
        help="When layers move to another machine, compute running answers again there instead of sending what they "
        "hold in memory: a longer pause, and nothing to send.",
        rich_help_panel=_CLUSTER,
    ),
]
WireForm = Annotated[
    str | None,
    typer.Option(
        "--wire",
        metavar="FORM",
        help="How activations travel between machines: exact (the default: the same tokens wherever the model is cut), "
        "auto (narrower where a link is slow), or exact+deflate, bf16, bf16+deflate, fp16, int8, int8+deflate, "
        "int8-outliers, int8-outliers+deflate, fp8.",
        rich_help_panel=_CLUSTER,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Name of a new cluster, by default home.", rich_help_panel=_CLUSTER
    ),
]
ClusterPort = Annotated[
    int | None,
    typer.Option(
        "--cluster-port",
        metavar="N",
        min=0,
        max=65535,
        help=f"Port for links between nodes, by default {CLUSTER_PORT}; 0 for any free one.",
        rich_help_panel=_CLUSTER,
    ),
]
JoinPort = Annotated[
    int | None,
    typer.Option(
        "--join-port",
        metavar="N",
        min=0,
        max=65535,
        help=f"Port at which machines join, by default {JOIN_PORT}; 0 for any free one.",
        rich_help_panel=_CLUSTER,
    ),
]
RelayPort = Annotated[
    int | None,
    typer.Option(
        "--relay-port",
        metavar="N",
        min=0,
        max=65535,
        help="Port of the relay through which nodes reach each other that cannot be dialled, also by WebSocket; "
        f"by default two above the cluster's, {RELAY_PORT}. 443 suits networks that let only the web out.",
        rich_help_panel=_CLUSTER,
    ),
]
NoRelay = Annotated[
    bool,
    typer.Option("--no-relay", help="No relay in this process.", rich_help_panel=_CLUSTER),
]
Relay = Annotated[
    list[str] | None,
    typer.Option(
        "--relay",
        metavar="URL",
        help="Another relay (`shardcompute relay`) that nodes may use, such as tcp://relay.example:7422; several doors "
        "of one are separated by commas. May be repeated.",
        rich_help_panel=_CLUSTER,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST",
        help="Name or address under which other machines reach this one.",
        rich_help_panel=_CLUSTER,
    ),
]
Announce = Annotated[
    bool | None,
    typer.Option(
        "--announce/--no-announce",
        help="Whether machines of the same network find this cluster with `shardcompute join`; by default where it "
        "listens to other machines. Says its name and address, nothing of models.",
        rich_help_panel=_CLUSTER,
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-tokens",
        metavar="N",
        min=16,
        help=f"Tokens of all conversations together that a chain remembers, by default {KV_TOKENS}.",
        rich_help_panel=_CLUSTER,
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="SHAPE",
        help="How to cut the model, where the machines allow it: pp=3 into stages one after the other, tp=2 with so "
        "many machines computing each stage together, tp=2,pp=3 both; tp=1: stages, as many as pay; auto: whatever "
        "measurement says is quickest. By default as was asked for the last time, else tp=1.",
        rich_help_panel=_CLUSTER,
    ),
]
Chains = Annotated[
    int | None,
    typer.Option(
        "--chains",
        metavar="N",
        min=1,
        help="Copies of the model, each on machines of its own; by default one.",
        rich_help_panel=_CLUSTER,
    ),
]
MostChains = Annotated[
    int | None,
    typer.Option(
        "--most-chains",
        metavar="N",
        min=1,
        max=64,
        help="While many ask, add copies of a model on machines that have nothing else to do, up to so many; they are "
        "dropped again when fewer ask. By default none beyond --chains.",
        rich_help_panel=_CLUSTER,
    ),
]
ViaCoordinator = Annotated[
    bool,
    typer.Option(
        "--via-coordinator",
        help="Fetch a model of the hub to the coordinator's disk and send workers their parts from there, for workers "
        "that cannot reach the hub. By default each reads its own part from the hub.",
        rich_help_panel=_CLUSTER,
    ),
]
RecoverJournal = Annotated[
    bool,
    typer.Option(
        "--recover-journal",
        help="Start although the cluster's journal is missing or damaged, with what can still be read of it. "
        "Machines that were thrown out stay out.",
        rich_help_panel=_CLUSTER,
    ),
]


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Keep the cluster's journal in a store that several coordinators share, of which one leads and the others "
        "take over: etcd://host:2379,host2:2379,host3:2379, or etcds:// with ?ca=FILE&cert=FILE&key=FILE. By default "
        "in a file of the cluster's folder.",
        rich_help_panel=_CLUSTER,
    ),
]


ReceiptsOption = Annotated[
    bool,
    typer.Option(
        "--receipts",
        help="Give every answer a receipt that its machines have signed, not only those that ask for one.",
    ),
]


AuditRate = Annotated[
    float,
    typer.Option(
        "--audit-rate",
        min=0.0,
        max=1.0,
        help="Have this share of what machines compute computed again by others, and put cheats in quarantine; "
        "of machines of little reputation more. Every answer has a receipt then. 0: nothing is audited.",
    ),
]


PriceKwh = Annotated[
    float | None,
    typer.Option(
        "--price-kwh",
        metavar="PRICE",
        min=0.0,
        max=1e6,
        help="What a kilowatt-hour costs, for `plan` and the page to say what a million tokens do; in any currency.",
        rich_help_panel=_CLUSTER,
    ),
]

OPEN_AUDIT_RATE = 0.05
"""Of an open cluster, where --audit-rate does not say: those who were promoted are audited still."""

OpenPool = Annotated[
    bool,
    typer.Option(
        "--open",
        help="Let machines in without a token, on probation: a few for each network, with a few inner layers each that "
        "others compute again, until they have a record. The others are audited at 0.05 unless --audit-rate says.",
    ),
]


Canaries = Annotated[
    float | None,
    typer.Option(
        "--canaries",
        metavar="TIME",
        parser=parse_duration,
        help="Ask known prompts about so often, such as 10m, at times that nobody can foresee, and say when answers "
        "are not what they were.",
    ),
]

RequireAttested = Annotated[
    Path | None,
    typer.Option(
        "--require-attested",
        metavar="POLICY",
        help="Take only workers that show the evidence of their hardware (AMD SEV-SNP, Intel TDX) that this TOML file "
        "asks for; they join with --evidence.",
    ),
]


@dataclass(frozen=True, slots=True)
class ServingArguments:
    """Which model to serve, and where clients reach it."""

    model: Model = ""
    host: Host = "127.0.0.1"
    port: Port = 8000
    api_key_file: ServerKeyFile = None
    require_key: RequireKey = False
    allowed_host: AllowedHost = None
    cors_origin: CorsOrigin = None
    image_urls: ImageUrlsOption = ImageUrls.OFF
    https: Https = False
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    @property
    def https_choice(self) -> HttpsChoice:
        return HttpsChoice(self.https, self.tls_cert, self.tls_key)

    def cors_origins(self, settings: Settings) -> tuple[str, ...]:
        """Those of the option, or else of the settings. UsageError for what is none."""
        if self.cors_origin is None:
            return settings.cors_origins
        return tuple(check_origin(origin, "--cors-origin") for origin in self.cors_origin)


@dataclass(frozen=True, slots=True)
class ClusterArguments:
    """What a cluster is told by whoever starts it; None: the default that the option names."""

    data_dir: ClusterFolder = None
    name: ClusterName = None
    cluster_port: ClusterPort = None
    join_port: JoinPort = None
    relay_port: RelayPort = None
    no_relay: NoRelay = False
    relay: Relay = None
    advertise: Advertise = None
    announce: Announce = None
    chains: Chains = None
    most_chains: MostChains = None
    prefer: Prefer = None
    price_kwh: PriceKwh = None
    driver_placement: DriverPlacement = None
    replay_moves: ReplayMoves = False
    wire: WireForm = None
    kv_tokens: KvTokens = None
    speculate: Speculate = Drafting.AUTO
    receipts: ReceiptsOption = False
    audit_rate: AuditRate = 0.0
    open: OpenPool = False
    canaries: Canaries = None
    require_attested: RequireAttested = None
    draft_model: DraftModel = None
    via_coordinator: ViaCoordinator = False
    recover_journal: RecoverJournal = False
    store: StoreOption = None

    @property
    def audited_share(self) -> float:
        return self.audit_rate or (OPEN_AUDIT_RATE if self.open else 0.0)


def draft_heads_folder(settings: Settings) -> Path:
    return (settings.data_dir / "draft-heads").absolute()


def cluster_folder(settings: Settings, given: Path | None) -> Path:
    return (given or settings.data_dir / "cluster").absolute()
