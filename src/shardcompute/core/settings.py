"""What the user's environment asks for: the only place that reads environment variables.

    SHARDCOMPUTE_HOME                        where models and state are kept
    SHARDCOMPUTE_HUB_URL, HF_ENDPOINT        address of the hub or of a mirror
    SHARDCOMPUTE_DHT                         nodes (host:port, commas between) of a hash table to find clusters by
    SHARDCOMPUTE_DHT_PORT                    UDP port at which a coordinator is such a node; by default 7422
    SHARDCOMPUTE_HUB_MIRRORS                 further mirrors that workers read weights from, with commas between
    SHARDCOMPUTE_DOWNLOAD_RATE               bytes a second that a worker reads from hub and mirrors at most
    HF_TOKEN                                 access token for private and gated models
    SHARDCOMPUTE_OFFLINE, HF_HUB_OFFLINE     1: never use the network
    SHARDCOMPUTE_API_KEY                     API key that servers started here ask for, and commands with --url send
    SHARDCOMPUTE_ALLOWED_HOSTS               names that clients call servers started here by, with commas between them
    SHARDCOMPUTE_THREADS                     how many CPU threads to compute with
    SHARDCOMPUTE_CPU_BACKEND                 what computes on CPUs without --backend: onnx, llamacpp, auto (measured)
    SHARDCOMPUTE_LOG_FORMAT                  json: log one JSON object per line; text (the default): plain lines
    SHARDCOMPUTE_LOG_LEVEL                   what to log: debug, info (the default), warning or error
    SHARDCOMPUTE_CORS_ORIGINS                web origins whose pages may call the API, with commas between; * for any
    CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES   GPUs that drivers let programs see
    OTEL_EXPORTER_OTLP_ENDPOINT              address of an OpenTelemetry collector to send traces to
    NO_COLOR                                 anything: plain output
    FORCE_COLOR, TTY_COMPATIBLE              1: tables and colours also where the output is no terminal

Where two variables are listed the first one that is set wins; an empty one counts as not set. A value that
cannot be used raises `UsageError` naming its variable. Token and key never show in a repr, a message or a log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit

from shardcompute.core.errors import UsageError

DEFAULT_HUB_URL = "https://huggingface.co"
Choice = TypeVar("Choice", bound=str)
_MAX_THREADS = 4096
DHT_PORT = 7422
MIN_DOWNLOAD_RATE = 1024
"""In bytes a second: at less, servers end what they send."""
LogFormat = Literal["text", "json"]
CpuBackend = Literal["auto", "onnx", "llamacpp"]
LogLevel = Literal["debug", "info", "warning", "error"]
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class Secret:
    """A text that prints as dots; whoever truly needs it asks for `reveal()`."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process, read once."""

    data_dir: Path
    hub_url: str = DEFAULT_HUB_URL
    hub_mirrors: tuple[str, ...] = ()
    download_rate: int | None = None
    hub_token: Secret | None = None
    offline: bool = False
    api_key: Secret | None = None
    allowed_hosts: tuple[str, ...] = ()
    threads: int | None = None
    cpu_backend: CpuBackend = "auto"
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    traces_url: str | None = None
    no_color: bool = False
    forces_terminal: bool = False
    cors_origins: tuple[str, ...] = ()
    dht: tuple[str, ...] = ()
    dht_port: int = DHT_PORT


def load_settings(environ: Mapping[str, str] | None = None, *, platform: str = sys.platform) -> Settings:
    """Settings from `environ` (this process's own unless given)."""
    values = {name: value for name, value in (os.environ if environ is None else environ).items() if value}
    return Settings(
        data_dir=_data_dir(values, platform),
        hub_url=_hub_url(values),
        hub_mirrors=_hub_mirrors(values),
        download_rate=_download_rate(values),
        hub_token=_hub_token(values),
        offline=_flag(values, "SHARDCOMPUTE_OFFLINE", "HF_HUB_OFFLINE"),
        api_key=_api_key(values),
        allowed_hosts=_names(values, "SHARDCOMPUTE_ALLOWED_HOSTS"),
        threads=_threads(values),
        cpu_backend=_choice(values, "SHARDCOMPUTE_CPU_BACKEND", get_args(CpuBackend), "auto"),
        log_format=_choice(values, "SHARDCOMPUTE_LOG_FORMAT", get_args(LogFormat), "text"),
        log_level=_choice(values, "SHARDCOMPUTE_LOG_LEVEL", get_args(LogLevel), "info"),
        traces_url=_address(values, "OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"),
        no_color="NO_COLOR" in values,
        forces_terminal="FORCE_COLOR" in values or values.get("TTY_COMPATIBLE") == "1",
        cors_origins=_cors_origins(values),
        dht=_dht(values),
        dht_port=_dht_port(values),
    )


def visible_gpus(environ: Mapping[str, str] | None = None) -> str:
    """What the environment says of the GPUs that drivers show to programs: told apart, never read."""
    values = os.environ if environ is None else environ
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return " ".join(f"{name}={values[name]}" for name in names if name in values)


def _first(values: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    return next(((name, values[name].strip()) for name in names if name in values), None)


def _data_dir(values: Mapping[str, str], platform: str) -> Path:
    chosen = values.get("SHARDCOMPUTE_HOME")
    if chosen is None:
        return _default_data_dir(values, platform)
    path = _home(values, platform) / chosen[2:] if chosen[:2] in ("~", "~/", "~\\") else Path(chosen)
    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"SHARDCOMPUTE_HOME is {path}, which is not a folder", hint="set it to a folder")
    return path


def _default_data_dir(values: Mapping[str, str], platform: str) -> Path:
    if platform == "win32":
        local = values.get("LOCALAPPDATA")
        root = Path(local) if local else _home(values, platform) / "AppData" / "Local"
    elif platform == "darwin":
        root = _home(values, platform) / "Library" / "Application Support"
    else:
        # The XDG specification says that a relative path is to be ignored.
        xdg = values.get("XDG_DATA_HOME", "")
        root = Path(xdg) if os.path.isabs(xdg) else _home(values, platform) / ".local" / "share"
    return root / "shardcompute"


def _home(values: Mapping[str, str], platform: str) -> Path:
    home = values.get("USERPROFILE" if platform == "win32" else "HOME")
    if home:
        return Path(home)
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError(
            "no home folder is known for this user", hint="set SHARDCOMPUTE_HOME to a folder for models"
        ) from error


def _hub_url(values: Mapping[str, str]) -> str:
    found = _first(values, "SHARDCOMPUTE_HUB_URL", "HF_ENDPOINT")
    return DEFAULT_HUB_URL if found is None else _check_address(*found, DEFAULT_HUB_URL)


def _hub_mirrors(values: Mapping[str, str]) -> tuple[str, ...]:
    name = "SHARDCOMPUTE_HUB_MIRRORS"
    texts = [text.strip() for text in values.get(name, "").split(",")]
    return tuple(_check_address(name, text, "https://mirror.example") for text in texts if text)


def _dht(values: Mapping[str, str]) -> tuple[str, ...]:
    name = "SHARDCOMPUTE_DHT"
    texts = tuple(text.strip() for text in values.get(name, "").split(",") if text.strip())
    for text in texts:
        host, _, port = text.rpartition(":")
        if not host or not _is_port(port):
            raise UsageError(
                f"{name}: {text[:100]!r} is not host:port", hint="write it like dht.example.org:7422"
            )
    return texts


def _dht_port(values: Mapping[str, str]) -> int:
    name = "SHARDCOMPUTE_DHT_PORT"
    text = values.get(name, str(DHT_PORT)).strip()
    if not _is_port(text):
        raise UsageError(
            f"{name} is {text[:40]!r}, not a port", hint=f"set {name} to a number from 1 to 65535"
        )
    return int(text)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65_536


def _download_rate(values: Mapping[str, str]) -> int | None:
    found = _first(values, "SHARDCOMPUTE_DOWNLOAD_RATE")
    if found is None:
        return None
    name, text = found
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= MIN_DOWNLOAD_RATE):
        raise UsageError(
            f"{name} is {text!r}, not a number of bytes a second",
            hint=f"set {name} to a number from {MIN_DOWNLOAD_RATE} on",
        )
    return int(text)


def check_download_rate(bytes_per_s: int | None) -> None:
    """UsageError for a limit at which nothing would come."""
    if bytes_per_s is not None and bytes_per_s < MIN_DOWNLOAD_RATE:
        raise UsageError(
            f"{bytes_per_s} bytes a second are too few for weights",
            hint=f"give {MIN_DOWNLOAD_RATE} or more, such as 20M",
        )


def _address(values: Mapping[str, str], name: str, example: str) -> str | None:
    found = _first(values, name)
    return None if found is None else _check_address(*found, example)


def _check_address(name: str, text: str, example: str) -> str:
    hint = f"set {name} to an address like {example}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not text.isprintable() or " " in text or parts.query or parts.fragment:
        raise UsageError(f"{name} is not an http or https address", hint=hint)
    if "@" in parts.netloc:
        # The address is part of messages, so a password must never be part of the address.
        secret = "the token in HF_TOKEN" if example == DEFAULT_HUB_URL else "secrets elsewhere"
        raise UsageError(f"{name} holds a user name or password", hint=f"{hint}, and put {secret}")
    return text.rstrip("/")


def _cors_origins(values: Mapping[str, str]) -> tuple[str, ...]:
    found = _first(values, "SHARDCOMPUTE_CORS_ORIGINS")
    parts = [] if found is None else [part.strip() for part in found[1].split(",")]
    return tuple(check_origin(part, "SHARDCOMPUTE_CORS_ORIGINS") for part in parts if part)


def check_origin(text: str, name: str) -> str:
    """A web origin as browsers send it: scheme, host and port, nothing behind them; or `*`."""
    text = text.strip().lower().rstrip("/")
    try:
        parts = urlsplit(text)
        is_origin = bool(parts.scheme and parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        is_origin = False
    if text != "*" and (
        not is_origin or text != f"{parts.scheme}://{parts.netloc}" or not text.isprintable()
    ):
        hint = "give one such as http://localhost:3000, or *"
        raise UsageError(f"{name}: {text[:100]!r} is not a web origin", hint=hint)
    return text


def _hub_token(values: Mapping[str, str]) -> Secret | None:
    token = values.get("HF_TOKEN", "").strip()
    if not token:
        return None
    # Refused here because a lower layer would quote the whole header in its complaint.
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("HF_TOKEN holds characters that no token has", hint="copy the token again")
    return Secret(token)


def _api_key(values: Mapping[str, str]) -> Secret | None:
    """Perhaps with its role before it, as in a file of keys."""
    key = values.get("SHARDCOMPUTE_API_KEY", "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable():
        raise UsageError("SHARDCOMPUTE_API_KEY holds characters that no key has", hint="copy the key again")
    return Secret(key)


def _names(values: Mapping[str, str], name: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in values.get(name, "").split(",") if part.strip())
    if any(not part.isprintable() or " " in part or "/" in part for part in names):
        raise UsageError(
            f"{name} holds something that is no name of a host", hint="write it like a.lan,b.lan"
        )
    return names


def _flag(values: Mapping[str, str], *names: str) -> bool:
    found = _first(values, *names)
    if found is None:
        return False
    name, text = found
    if text.lower() not in _TRUE | _FALSE:
        raise UsageError(f"{name} is {text!r}, neither yes nor no", hint=f"set {name} to 1 or 0")
    return text.lower() in _TRUE


def _choice(values: Mapping[str, str], name: str, choices: tuple[Choice, ...], default: Choice) -> Choice:
    found = _first(values, name)
    if found is None:
        return default
    for choice in choices:
        if choice == found[1].lower():
            return choice
    raise UsageError(
        f"{name} is {found[1]!r}, which it cannot be", hint=f"set it to one of: {', '.join(choices)}"
    )


def _threads(values: Mapping[str, str]) -> int | None:
    found = _first(values, "SHARDCOMPUTE_THREADS")
    if found is None:
        return None
    name, text = found
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MAX_THREADS):
        raise UsageError(
            f"{name} is {text!r}, not a number of threads",
            hint=f"set {name} to a number from 1 to {_MAX_THREADS}",
        )
    return int(text)
