"""Certificates of HTTP servers: what operators give is looked at closely, what is made here is made anew in time."""

from __future__ import annotations

import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardcompute.core.errors import SourceError, UsageError
from shardcompute.security.https.clients import check_pin
from shardcompute.security.https.server import ServerTls
from shardcompute.security.https.sources import MadeCertificate, OperatorFiles

DAY_S = 86_400.0


def write_pair(
    folder: Path, *, start_days: float = -1, stop_days: float = 30, password: bytes | None = None
) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "example")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=start_days))
        .not_valid_after(now + timedelta(days=stop_days))
        .sign(key, hashes.SHA256())
    )
    protection = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    folder.mkdir(exist_ok=True)
    paths = folder / "server.crt", folder / "server.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    )
    return paths


def test_files_of_the_operator(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path)
    found = OperatorFiles(certificate, key).read(time.time())
    assert found.pin.startswith("sha256//")
    assert check_pin(found.pin) == found.pin
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    assert OperatorFiles(both).read(time.time()) == found
    assert "PRIVATE" not in repr(found)


def test_what_is_wrong_with_files_is_said(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path / "good")
    other = write_pair(tmp_path / "other")[1]
    expired = write_pair(tmp_path / "expired", start_days=-9, stop_days=-2)
    early = write_pair(tmp_path / "early", start_days=2)
    locked = write_pair(tmp_path / "locked", password=b"x")
    junk = tmp_path / "junk"
    junk.write_bytes(b"\0junk")
    for pair, said in (
        ((tmp_path / "none", key), "cannot be read"),
        ((certificate, tmp_path / "none"), "cannot be read"),
        ((junk, key), "no certificate in PEM form"),
        ((certificate, junk), "no private key in PEM form"),
        ((certificate, None), "no private key in PEM form"),
        ((certificate, other), "does not belong to"),
        (expired, "expired on"),
        (early, "not valid before"),
        (locked, "passphrase"),
    ):
        with pytest.raises(SourceError, match=said) as caught:
            OperatorFiles(*pair).read(time.time())
        assert caught.value.hint


def test_a_made_certificate_is_kept_and_made_anew_in_time(tmp_path: Path) -> None:
    names = ["localhost", "127.0.0.1", "0.0.0.0", "[::1]", "Box.lan.", "*.lan", "*", "no name", ""]
    source = MadeCertificate(tmp_path / "https", lambda: names)
    now_s = time.time()
    first = source.read(now_s)
    assert source.read(now_s + 200 * DAY_S) == first
    assert stat.S_IMODE((tmp_path / "https" / "key.pem").stat().st_mode) == 0o600
    told = first.own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert told.get_values_for_type(x509.DNSName) == ["localhost", "box.lan", "*.lan"]
    assert "::1" in map(str, told.get_values_for_type(x509.IPAddress))
    later = source.read(now_s + 250 * DAY_S)
    assert later.fingerprint != first.fingerprint
    assert later.pin == first.pin, "clients go on knowing it"
    names.append("porch.example")
    moved = source.read(now_s + 250 * DAY_S)
    assert moved.fingerprint != later.fingerprint
    assert moved.pin == first.pin
    (tmp_path / "https" / "certificate.pem").write_text("damaged")
    assert source.read(now_s).pin == first.pin


def test_a_reload_that_fails_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = write_pair(tmp_path)
    tls = ServerTls(OperatorFiles(certificate, key))
    before = tls.shown
    assert tls.look() is None
    certificate.write_text("half a fi")
    assert tls.look() is None
    assert tls.look() is None
    assert caplog.text.count("stays as it is") == 1
    write_pair(tmp_path)
    found = tls.look()
    assert found is not None
    assert tls.shown == before, "it is shown by whoever accepts connections"
    tls.show(found)
    assert tls.shown == found
    assert tls.look() is None


def test_a_certificate_that_runs_out_soon_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServerTls(OperatorFiles(*write_pair(tmp_path, stop_days=3)))
    assert "runs out in 3.0 days" in caplog.text


@pytest.mark.parametrize("pin", ["", "sha256//", "sha256//AAAA", "md5//AAAA", "sha256//" + "%" * 44])
def test_what_is_no_pin(pin: str) -> None:
    with pytest.raises(UsageError, match="is not the pin"):
        check_pin(pin)
