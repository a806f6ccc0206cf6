"""Health checks of `doctor`. Each gives findings: what is, whether that is good, and what to do if not."""

from __future__ import annotations

import email.utils
import importlib.util
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from shardcompute.backends.device_problems import RESTART_DRIVER
from shardcompute.backends.devices import ComputeDevice, find_devices, host_device
from shardcompute.backends.llamacpp.library import PACKAGE, VERSION, installed_version
from shardcompute.core.sockets.connecting import connect
from shardcompute.node.worker.backend_trial import remembered_choices
from shardcompute.weights.sources.disk import format_bytes

PACKAGES = ("shardcompute", "numpy", "onnxruntime", "tokenizers", "cryptography", "starlette", "uvicorn")
_LEAST_PYTHON = (3, 11)
_LEAST_DISK_BYTES = 2 << 30
_LEAST_MEMORY_BYTES = 1 << 30
_MOST_SKEW_S = 60.0
_MOST_DRIFT_S = 1.0
_BEGINNING_S = 1_735_689_600.0  # 2025: no release is older, so no right clock shows less
_TIMEOUT_S = 3.0
_LEAST_FILES = 1024
_FAST_CONGESTION = "bbr"
Level = Literal["good", "tip", "bad"]
_SECRETS = ("*.key", "certificate.pem", "cluster.json", "worker.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` says what to do, and is empty when there is nothing to do. `is_tip`: it works without that, too."""

    subject: str
    text: str
    fix: str = ""
    is_tip: bool = False

    @property
    def level(self) -> Level:
        if not self.fix:
            return "good"
        return "tip" if self.is_tip else "bad"

    @property
    def is_good(self) -> bool:
        return self.level != "bad"


def check_versions() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    is_old = sys.version_info < _LEAST_PYTHON
    yield Finding("python", version, "install Python 3.11 or newer" if is_old else "")
    for name in PACKAGES:
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            is_there = importlib.util.find_spec(name) is not None
            yield Finding(
                name,
                "there, of unknown version" if is_there else "missing",
                "" if is_there else "install it again: pip install --force-reinstall shardcompute",
            )


def check_llamacpp(
    version: str | None = None, *, home: Path | None = None, threads: int = 1
) -> Iterator[Finding]:
    """Nothing where its wheel is not installed: it is an extra. Else what was measured from the data folder `home` with
    so many threads, and what followed from it."""
    found = version or installed_version()
    if found is None:
        return
    if found != VERSION:
        fix = f"pip install '{PACKAGE}=={VERSION}'"
        yield Finding("llama.cpp", f"{PACKAGE} {found} cannot be used", fix, is_tip=True)
        return
    tried = remembered_choices(host_device(), threads, home) if home is not None else []
    for model, choice in tried:
        yield Finding("llama.cpp", f"{model} is computed by {choice.backend}: {choice.reason}")
    if not tried:
        yield Finding("llama.cpp", f"{PACKAGE} {found}: tried with each model where no --backend is named")


def check_clock(
    wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
) -> Callable[[], Iterator[Finding]]:
    """Look at the clocks now, and again when the returned function is called."""
    wall_s, steady_s = wall(), steady()

    def again() -> Iterator[Finding]:
        fix = "set the clock, or turn on time synchronisation (timedatectl set-ntp true)"
        passed_s, really_s = wall() - wall_s, steady() - steady_s
        if wall_s < _BEGINNING_S:
            yield Finding("clock", f"shows {time.strftime('%Y-%m-%d', time.gmtime(wall_s))}", fix)
        elif abs(passed_s - really_s) > _MOST_DRIFT_S:
            yield Finding("clock", f"jumped by {passed_s - really_s:+.1f} s while it was watched", fix)
        else:
            yield Finding("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s + passed_s)))

    return again


def check_skew(date_header: str, now_s: float) -> Iterator[Finding]:
    """This machine's clock against the Date that the coordinator's HTTP server sends."""
    try:
        skew_s = now_s - email.utils.parsedate_to_datetime(date_header).timestamp()
    except ValueError:
        return
    is_far = abs(skew_s) > _MOST_SKEW_S
    fix = "set the clocks of both machines: certificates are only good at the right time" if is_far else ""
    yield Finding("clock and coordinator", f"{skew_s:+.0f} s apart", fix)


def check_disk(
    folder: Path,
    free_bytes: int | None = None,
    *,
    subject: str = "disk",
    elsewhere: str = "choose another --data-dir",
) -> Iterator[Finding]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    fix = f"free some space, or {elsewhere} than {folder}" if free < _LEAST_DISK_BYTES else ""
    yield Finding(subject, f"{format_bytes(free)} free for {folder}", fix)
    if not os.access(existing, os.W_OK):
        yield Finding(
            "folder", f"{existing} cannot be written to", f"{elsewhere}, or change the owner of this one"
        )


def check_memory(available_bytes: int | None = None) -> Iterator[Finding]:
    available = int(psutil.virtual_memory().available) if available_bytes is None else available_bytes
    is_short = available < _LEAST_MEMORY_BYTES
    fix = "close other programs, or start fewer workers with --workers 1" if is_short else ""
    yield Finding("memory", f"{format_bytes(available)} available", fix)


def check_devices(found: Sequence[ComputeDevice] | None = None) -> Iterator[Finding]:
    """What this machine can compute on, and each GPU that it cannot. Work goes on without those."""
    for device in find_devices(asks_anew=True) if found is None else found:
        memory = f", {format_bytes(device.total_bytes)}" if device.total_bytes else ""
        if device.problem:
            text = f"{device.label}{memory}: {device.problem}"
            yield Finding(f"device {device.name}", text, device.fix, is_tip=True)
            continue
        free = f", {format_bytes(device.free_bytes)} free, computed on by {device.backend}"
        yield Finding(f"device {device.name}", f"{device.label}{memory}{free}")
        if device.remark:
            yield Finding(f"device {device.name}", device.remark, RESTART_DRIVER, is_tip=True)


def check_open_files(limit: int | None = None) -> Iterator[Finding]:
    """How many files and sockets this process may have open; there is no such limit on Windows."""
    if limit is None:
        limit = _files_limit()
        if limit is None:
            return
        if limit < 0:
            yield Finding("open files", "any number")
            return
    fix = "raise the limit before starting: ulimit -n 65536" if limit < _LEAST_FILES else ""
    yield Finding("open files", f"{limit} at once", fix)


def _files_limit() -> int | None:
    """-1: none; None: the system knows no such thing."""
    if sys.platform == "win32":
        return None
    else:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return -1 if limit == resource.RLIM_INFINITY else limit


def check_congestion(probe: Callable[[str], bool] | None = None) -> Iterator[Finding]:
    """Whether links may use bbr, which is several times faster than others over networks that lose packets."""
    if probe is None:
        if not hasattr(socket, "TCP_CONGESTION"):
            return
        probe = _can_use_congestion
    if probe(_FAST_CONGESTION):
        yield Finding("congestion control", f"{_FAST_CONGESTION} is available")
        return
    yield Finding(
        "congestion control",
        f"{_FAST_CONGESTION} is not available: far links will be slower than they could be",
        "sudo modprobe tcp_bbr, and add tcp_bbr to /etc/modules-load.d/bbr.conf",
        is_tip=True,
    )


def _can_use_congestion(name: str) -> bool:
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError:
                return False
        return True
    else:
        return False


def check_certificate(
    subject: str, cluster: str, starts_at_s: float, expires_at_s: float, now_s: float
) -> Iterator[Finding]:
    """Whether this machine's clock is within the time for which its certificate is good."""
    if now_s < starts_at_s:
        yield Finding(
            subject,
            f"joined {cluster}, with a certificate that by this clock begins only in "
            f"{(starts_at_s - now_s) / 3600:.1f} hours",
            "set this machine's clock: it is behind, and no TLS connection will be made",
        )
        return
    days = (expires_at_s - now_s) / 86_400
    fix = "set this machine's clock, or join again with a new token" if days <= 0 else ""
    good = (
        f"a certificate good for {days:.0f} days"
        if days > 0
        else f"a certificate that ran out {-days:.0f} days ago"
    )
    yield Finding(subject, f"joined {cluster}, {good}", fix)


def check_ports_free(
    wanted: Iterable[tuple[str, int, str]], holder: Callable[[int], str | None]
) -> Iterator[Finding]:
    """Of a cluster that is not running: (what for, port, the option that changes it)."""
    for purpose, port, option in wanted:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                yield Finding(f"port {port}", f"free ({purpose})")
            except OSError as error:
                who = holder(port)
                text = f"busy, held by {who}" if who else f"cannot be used: {error.strerror}"
                yield Finding(f"port {port}", f"{text} ({purpose})", f"stop that process, or add {option} 0")


def check_reachable(addresses: Iterable[str]) -> Iterator[Finding]:
    """Coordinators by URL (`tcp://host:port`, `http://host:port`)."""
    yield from check_all_reachable([("coordinator", address) for address in addresses])


def check_all_reachable(wanted: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Subjects with the URL that each of them has told others to use; all at once, as each may take seconds."""
    if wanted:
        with ThreadPoolExecutor(min(16, len(wanted))) as threads:
            yield from threads.map(lambda each: _check_port(*each), wanted)


def _check_port(subject: str, address: str) -> Finding:
    parts = urlsplit(address)
    where = f"{parts.hostname}:{parts.port}"
    try:
        connect(parts.hostname or "", parts.port or 0, _TIMEOUT_S).close()
        return Finding(subject, f"{where} answers")
    except OSError as error:
        return Finding(
            subject,
            f"{where} does not answer: {error.strerror or error}",
            "start it, and check that its firewall lets this port through (--advertise and --port choose another)",
        )


def check_node_versions(own: str, versions: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Names and versions of nodes against the version of their coordinator."""
    others = [(name, version) for name, version in versions if version != own]
    for name, version in others:
        yield Finding(
            f"version of {name}",
            f"{version}, and the coordinator has {own}",
            f"on {name}: pip install shardcompute=={own}, then start it again",
        )
    if versions and not others:
        nodes = "1 node has" if len(versions) == 1 else f"all {len(versions)} nodes have"
        yield Finding("versions", f"{nodes} that of the coordinator, {own}")


def check_permissions(folder: Path) -> Iterator[Finding]:
    """Files with secrets that other users can read."""
    if os.name != "posix":
        return
    secrets = sorted({path for pattern in _SECRETS for path in folder.rglob(pattern) if path.is_file()})
    loose = [path for path in secrets if stat.S_IMODE(path.stat().st_mode) & 0o077]
    for path in loose:
        yield Finding("secrets", f"{path} can be used by other users", f"chmod 600 {path}")
    if secrets and not loose:
        yield Finding("secrets", f"{len(secrets)} files, for their owner alone")
