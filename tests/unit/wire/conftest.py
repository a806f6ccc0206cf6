"""Nodes to introduce, certificates to trust, and a check that no test leaves a thread behind."""

from __future__ import annotations

import datetime
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardcompute.wire import VERSION_MAX, VERSION_MIN, Hello, Link, LinkOptions, Listener, default_transports

DIALLER = Hello(VERSION_MIN, VERSION_MAX, "dialler", "worker", "home")
ANSWERER = Hello(VERSION_MIN, VERSION_MAX, "answerer", "worker", "home")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A self-signed certificate, its key, and both sides' contexts that trust nothing else."""

    der: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    anonymous_client: ssl.SSLContext


def make_credentials(folder: Path, name: str) -> Credentials:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client, anonymous_client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(path)
        context.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(path)
    client.load_cert_chain(path)
    return Credentials(certificate.public_bytes(serialization.Encoding.DER), server, client, anonymous_client)


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return make_credentials(tmp_path_factory.mktemp("trusted"), "node")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return make_credentials(tmp_path_factory.mktemp("strangers"), "node")


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert not [thread.name for thread in left if thread.is_alive()]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of one link."""

    near: Link
    far: Link


@pytest.fixture(params=["inproc", "tcp", "tls"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(kind: str, credentials: Credentials) -> Iterator[Callable[..., Pair]]:
    """Makes pairs of links of every kind, with options for each side."""
    opened: list[Link | Listener] = []

    def make(near: LinkOptions | None = None, far: LinkOptions | None = None) -> Pair:
        near, far = near or LinkOptions(), far or LinkOptions()
        if kind == "tls":
            near = _with_tls(near, credentials.client)
            far = _with_tls(far, credentials.server)
        transports = default_transports()
        url = "inproc://answerer" if kind == "inproc" else "tcp://127.0.0.1:0"
        listener = transports.listen(url, ANSWERER, far)
        opened.append(listener)
        dialled = transports.dial(listener.address, DIALLER, near)
        opened.append(dialled)
        accepted = listener.accept(10)
        opened.append(accepted)
        return Pair(dialled, accepted)

    yield make
    for each in opened:
        each.close()


def _with_tls(options: LinkOptions, context: ssl.SSLContext) -> LinkOptions:
    return LinkOptions(
        limits=options.limits,
        tls=context,
        server_name="node",
        handshake_timeout_s=options.handshake_timeout_s,
        frame_timeout_s=options.frame_timeout_s,
        slowest_bytes_per_s=options.slowest_bytes_per_s,
    )
