from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from shardcompute.core.errors import AuthError, ForbiddenError, SourceError, UsageError
from shardcompute.security import (
    ClusterAuthority,
    Credentials,
    NodeIdentity,
    Revocations,
    Role,
    check_peer,
    needs_renewal,
    read_peer,
)
from shardcompute.security.certificates import certificate_der, parse_certificate, peer_from_certificate
from shardcompute.security.identity import private_key_pem
from shardcompute.security.private_files import create_private, replace_private

DAY_S = 86_400.0


def request_for(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, name: str) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    request = builder.sign(key, None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def test_authority_is_kept_and_found_again(tmp_path: Path) -> None:
    made = ClusterAuthority.create(tmp_path, "lab-2", now_s=1e9)
    loaded = ClusterAuthority.load(tmp_path)
    assert (loaded.name, loaded.fingerprint, loaded.certificate_pem) == (
        "lab-2",
        made.fingerprint,
        made.certificate_pem,
    )
    assert len(made.fingerprint) == 64
    assert stat.S_IMODE((tmp_path / "authority.pem").stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="has a cluster already"):
        ClusterAuthority.create(tmp_path, "lab-2", now_s=1e9)
    assert ClusterAuthority.load(tmp_path).fingerprint == made.fingerprint


def test_missing_authority_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ClusterAuthority.load(tmp_path)
    create_private(tmp_path / "authority.pem", private_key_pem(Ed25519PrivateKey.generate()))
    with pytest.raises(SourceError, match="certificate cannot be used"):
        ClusterAuthority.load(tmp_path)


def test_authority_with_the_key_of_another_is_refused(tmp_path: Path) -> None:
    made = ClusterAuthority.create(tmp_path, "home", now_s=1e9)
    other = private_key_pem(Ed25519PrivateKey.generate())
    replace_private(tmp_path / "authority.pem", other + made.certificate_pem.encode())
    with pytest.raises(SourceError, match="do not belong together"):
        ClusterAuthority.load(tmp_path)


@pytest.mark.parametrize("name", ["", "Home", "a b", "-a", "a-", "a" * 41, "a/b", "a\n"])
def test_cluster_names_that_do_not_fit_an_address_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name of a cluster"):
        ClusterAuthority.create(tmp_path, name, now_s=1e9)
    assert not list(tmp_path.iterdir())


def test_certificate_binds_id_roles_and_cluster(tmp_path: Path, authority: ClusterAuthority) -> None:
    identity = NodeIdentity.open(tmp_path / "n")
    pem = authority.issue(
        identity.certificate_request(),
        node_id=identity.node_id,
        roles=[Role.WORKER, Role.DRIVER],
        now_s=1.8e9,
        days=30,
        addresses=["192.168.1.5", "fd00::5", "box.local"],
    )
    certificate = parse_certificate(pem)
    certificate.verify_directly_issued_by(authority.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["box.local"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.168.1.5", "fd00::5"]
    uri = f"shardcompute://home/{identity.node_id}?role=driver,worker"
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]
    peer = peer_from_certificate(certificate)
    assert (peer.node_id, peer.cluster, peer.roles) == (identity.node_id, "home", {Role.WORKER, Role.DRIVER})
    assert (peer.public_key, peer.expires_at_s) == (identity.public_key, 1.8e9 + 30 * DAY_S)


def test_nobody_gets_a_certificate_for_another_nodes_id(tmp_path: Path, authority: ClusterAuthority) -> None:
    victim, thief = NodeIdentity.open(tmp_path / "victim"), NodeIdentity.open(tmp_path / "thief")
    for request in (thief.certificate_request(), request_for(thief.private_key, victim.node_id)):
        with pytest.raises(AuthError, match=f"key belongs to {thief.node_id}"):
            authority.issue(request, node_id=victim.node_id, roles=[Role.WORKER], now_s=1.8e9)
    request = request_for(thief.private_key, victim.node_id)
    with pytest.raises(AuthError, match="key belongs to"):
        authority.issue(request, node_id=thief.node_id, roles=[Role.WORKER], now_s=1.8e9)


def test_request_without_possession_of_the_key_is_refused(
    tmp_path: Path, authority: ClusterAuthority
) -> None:
    identity = NodeIdentity.open(tmp_path / "n")
    request = x509.load_pem_x509_csr(identity.certificate_request().encode())
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1  # the last byte of the signature
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()
    with pytest.raises(AuthError, match="not signed by the key"):
        authority.issue(forged, node_id=identity.node_id, roles=[Role.WORKER], now_s=1.8e9)


@pytest.mark.parametrize("request_pem", ["", "nonsense", "\ud800", "x" * 20_000, None])
def test_unreadable_requests_are_refused(authority: ClusterAuthority, request_pem: str | None) -> None:
    if request_pem is None:
        request_pem = request_for(ec.generate_private_key(ec.SECP256R1()), "n")
    with pytest.raises(UsageError, match="request for a certificate"):
        authority.issue(request_pem, node_id="n", roles=[Role.WORKER], now_s=1.8e9)


@pytest.mark.parametrize("address", ["box:7070", "a b", "", "a..b", "x" * 254, "bücher.de"])
def test_addresses_that_are_none_are_refused(
    tmp_path: Path, authority: ClusterAuthority, address: str
) -> None:
    identity = NodeIdentity.open(tmp_path / "n")
    with pytest.raises(UsageError, match="neither a host name"):
        authority.issue(
            identity.certificate_request(),
            node_id=identity.node_id,
            roles=[Role.WORKER],
            now_s=1.8e9,
            addresses=[address],
        )


def test_revoked_node_gets_no_new_certificate(tmp_path: Path, authority: ClusterAuthority) -> None:
    identity = NodeIdentity.open(tmp_path / "n")
    revoked = Revocations().with_node(identity.node_id)
    with pytest.raises(ForbiddenError, match="removed from the cluster"):
        authority.issue(
            identity.certificate_request(),
            node_id=identity.node_id,
            roles=[Role.WORKER],
            now_s=1.8e9,
            revocations=revoked,
        )


def test_certificates_end_with_their_authority_and_want_renewal_before(tmp_path: Path) -> None:
    authority = ClusterAuthority.create(tmp_path / "a", "home", now_s=1e9)
    identity = NodeIdentity.open(tmp_path / "n")

    def issue(now_s: float) -> str:
        request = identity.certificate_request()
        return authority.issue(request, node_id=identity.node_id, roles=[Role.WORKER], now_s=now_s, days=30)

    pem = issue(1e9)
    assert not needs_renewal(pem, 1e9 + 19 * DAY_S)
    assert needs_renewal(pem, 1e9 + 21 * DAY_S)
    assert needs_renewal(pem, 1e9 + 31 * DAY_S)
    end_s = authority.certificate.not_valid_after_utc.timestamp()
    last = parse_certificate(issue(end_s - 5 * DAY_S))
    assert last.not_valid_after_utc == authority.certificate.not_valid_after_utc
    for wrong_s in (end_s + 2 * DAY_S, 1e9 - 40 * DAY_S):
        with pytest.raises(AuthError, match="has run out, or the clock is wrong"):
            issue(wrong_s)


def test_peers_are_checked_for_cluster_role_id_date_and_revocation(make_node) -> None:
    peer = make_node("worker", Role.WORKER).own
    none = Revocations()
    check_peer(peer, cluster="home", revocations=none, role=Role.WORKER, node_id=peer.node_id, now_s=1e9)
    with pytest.raises(AuthError, match="belongs to the cluster home"):
        check_peer(peer, cluster="lab", revocations=none)
    with pytest.raises(ForbiddenError, match="may not act as coordinator"):
        check_peer(peer, cluster="home", revocations=none, role=Role.COORDINATOR)
    with pytest.raises(AuthError, match="answered where"):
        check_peer(peer, cluster="home", revocations=none, node_id="n" + "a" * 20)
    with pytest.raises(AuthError, match="has run out"):
        check_peer(peer, cluster="home", revocations=none, now_s=peer.expires_at_s)
    with pytest.raises(ForbiddenError, match="removed from the cluster"):
        check_peer(peer, cluster="home", revocations=none.with_node(peer.node_id))


def test_revocations_survive_the_wire_and_never_shrink() -> None:
    first = Revocations().with_node("n1")
    assert Revocations.from_bytes(first.to_bytes()) == first
    merged = Revocations().with_node("n2").merged(first)
    assert merged.covers("n1")
    assert merged.covers("n2")
    assert not merged.covers("n3")
    for damaged in (
        b"",
        b"\xff",
        b"\x80",
        b"\x90",
        b"\x91\x01",
        b"\x92\x02\x90",
        b"\x92\x01\x91\xa1\xff",
    ):
        with pytest.raises(SourceError, match="damaged"):
            Revocations.from_bytes(damaged)


def test_certificates_of_others_name_nobody(authority: ClusterAuthority) -> None:
    with pytest.raises(AuthError, match="not one of a ShardCompute node"):
        read_peer(certificate_der(authority.certificate))
    with pytest.raises(AuthError, match="showed none"):
        read_peer(None)
    with pytest.raises(AuthError, match="not one of a ShardCompute node"):
        read_peer(b"0\x82")


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("shardcompute://home/{id}?role=king", "{id}"),
        ("shardcompute://home/{id}?role=worker,driver", "{id}"),
        ("shardcompute://home/{id}", "{id}"),
        ("https://home/{id}?role=worker", "{id}"),
        ("shardcompute://home/{id}?role=worker", "somebody"),
        ("shardcompute://home/naaaaaaaaaaaaaaaaaaaa?role=worker", "naaaaaaaaaaaaaaaaaaaa"),
    ],
)
def test_signed_names_in_another_spelling_are_refused(
    tmp_path: Path, authority: ClusterAuthority, uri: str, name: str
) -> None:
    identity = NodeIdentity.open(tmp_path / "n")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name.format(id=identity.node_id))])
    uri = uri.format(id=identity.node_id)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject)
        .public_key(identity.private_key.public_key())
        .serial_number(7)
        .not_valid_before(authority.certificate.not_valid_before_utc)
        .not_valid_after(authority.certificate.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .sign(authority.private_key, None)
    )
    with pytest.raises(AuthError):
        peer_from_certificate(certificate)


def test_credentials_are_kept_beside_the_key(make_node) -> None:
    node = make_node("n")
    assert Credentials.load(node.identity) is None
    node.save()
    assert Credentials.load(node.identity) == node
    path = node.identity.key_path.with_name("certificate.pem")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for content in (b"", b"\xff", node.certificate_pem.encode(), path.read_bytes() * 2):
        replace_private(path, content)
        with pytest.raises(SourceError, match="damaged or belongs to another"):
            Credentials.load(node.identity)


def test_credentials_of_another_node_are_refused(make_node) -> None:
    one, other = make_node("one"), make_node("other")
    with pytest.raises(AuthError, match="not to this node"):
        Credentials(one.identity, other.certificate_pem, other.authority_pem)
