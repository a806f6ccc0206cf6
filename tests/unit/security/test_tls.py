"""Handshakes over real sockets of this machine, both ends with a time limit."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcompute.core.errors import AuthError, ForbiddenError, LinkError, SourceError
from shardcompute.security import (
    JOIN_HELLO,
    ClusterAuthority,
    Credentials,
    NodeIdentity,
    Revocations,
    Role,
    TokenBook,
    answer_join,
    check_peer,
    client_context,
    join_client_context,
    join_greeting,
    join_server_context,
    open_join,
    parse_token,
    peer_identity,
    server_context,
)
from shardcompute.security.certificates import parse_certificate

LIMIT_S = 20.0


class Server:
    """Serves one connection in a thread; `result()` is what `serve` returned, or raises what it raised."""

    def __init__(self, serve: Callable[[socket.socket], object]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        self._outcome: list[object] = []
        self._thread = threading.Thread(target=self._run, args=(serve,))
        self._thread.start()

    def _run(self, serve: Callable[[socket.socket], object]) -> None:
        try:
            with self._listener:
                sock, _ = self._listener.accept()
            with sock:
                sock.settimeout(LIMIT_S)
                self._outcome.append(serve(sock))
        except Exception as error:
            self._outcome.append(error)

    def dial(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), timeout=LIMIT_S)

    def result(self) -> object:
        self._thread.join(LIMIT_S)
        (outcome,) = self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def serve_tls(context: ssl.SSLContext) -> Callable[[socket.socket], object]:
    """Shakes hands, tells the client that it is welcome, and returns who the client is."""

    def serve(sock: socket.socket) -> object:
        with context.wrap_socket(sock, server_side=True) as connection:
            connection.sendall(b"welcome")
            return peer_identity(connection)

    return serve


def converse(server: Server, context: ssl.SSLContext) -> tuple[bytes, object]:
    with context.wrap_socket(server.dial()) as connection:
        # Under TLS 1.3 a client learns of its refusal from its first read.
        return connection.recv(100), peer_identity(connection)


def test_two_nodes_learn_who_the_other_is(make_node) -> None:
    worker, driver = make_node("worker", Role.WORKER), make_node("driver", Role.DRIVER)
    server = Server(serve_tls(worker.server_context()))
    with driver.client_context().wrap_socket(server.dial()) as connection:
        assert connection.recv(100) == b"welcome"
        assert connection.version() == "TLSv1.3"
        assert connection.compression() is None
        # A ticket would let a revoked node come back without showing its certificate.
        assert connection.session is not None
        assert not connection.session.has_ticket
        assert peer_identity(connection) == worker.own
    assert server.result() == driver.own


def test_revoked_peer_is_refused_after_the_handshake(make_node) -> None:
    worker, driver = make_node("worker"), make_node("driver", Role.DRIVER)
    server = Server(serve_tls(worker.server_context()))
    _, peer = converse(server, driver.client_context())
    with pytest.raises(ForbiddenError, match="removed"):
        check_peer(peer, cluster="home", revocations=Revocations().with_node(worker.identity.node_id))
    server.result()


def other_cluster(folder: Path, now_s: float) -> ClusterAuthority:
    """Bears the same name: names prove nothing."""
    return ClusterAuthority.create(folder / "other", "home", now_s=now_s)


def test_node_of_another_cluster_is_refused_by_servers(make_node, tmp_path: Path, now_s: float) -> None:
    worker = make_node("worker")
    stranger = make_node("stranger", signer=other_cluster(tmp_path, now_s))
    server = Server(serve_tls(worker.server_context()))
    context = client_context(stranger.identity, stranger.certificate_pem, worker.authority_pem)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        converse(server, context)
    with pytest.raises(ssl.SSLCertVerificationError):
        server.result()


def test_node_of_another_cluster_is_refused_by_clients(make_node, tmp_path: Path, now_s: float) -> None:
    worker = make_node("worker")
    stranger = make_node("stranger", signer=other_cluster(tmp_path, now_s))
    server = Server(serve_tls(stranger.server_context()))
    with pytest.raises(ssl.SSLCertVerificationError):
        converse(server, worker.client_context())
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.result()


def test_client_without_a_certificate_is_refused(make_node) -> None:
    worker = make_node("worker")
    server = Server(serve_tls(worker.server_context()))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        converse(server, join_client_context(worker.authority_pem))
    with pytest.raises(ssl.SSLError, match=r"(?i)peer.did.not.return.a.certificate"):
        server.result()


def test_certificate_that_has_run_out_is_refused(make_node, tmp_path: Path, now_s: float) -> None:
    old = ClusterAuthority.create(tmp_path / "old", "home", now_s=now_s - 100 * 86_400)
    expired = make_node("expired", signer=old, days=7, at_s=now_s - 50 * 86_400)
    good = make_node("good", signer=old)
    server = Server(serve_tls(expired.server_context()))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        converse(server, good.client_context())
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.result()


def test_node_cannot_sign_certificates_for_others(make_node) -> None:
    worker, friend = make_node("worker"), make_node("friend")
    # A node that plays authority with its own key and certificate.
    certificate = parse_certificate(worker.certificate_pem)
    rogue = ClusterAuthority("home", certificate, worker.identity.private_key)
    forged = make_node("forged", Role.COORDINATOR, signer=rogue)
    chain = forged.certificate_pem + worker.certificate_pem
    server = Server(serve_tls(server_context(forged.identity, chain, friend.authority_pem)))
    with pytest.raises(ssl.SSLCertVerificationError, match=r"(?i)invalid CA"):
        converse(server, friend.client_context())
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.result()


def test_older_tls_is_refused(make_node) -> None:
    worker, driver = make_node("worker"), make_node("driver")
    server = Server(serve_tls(worker.server_context()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=driver.authority_pem)
    context.load_cert_chain(saved_chain(driver), driver.identity.key_path)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        converse(server, context)
    with pytest.raises(ssl.SSLError, match=r"(?i)unsupported.protocol"):
        server.result()


def saved_chain(node: Credentials) -> Path:
    node.save()
    return node.identity.key_path.with_name("certificate.pem")


def test_contexts_leave_no_copies_and_refuse_what_does_not_fit(make_node) -> None:
    one, other = make_node("one"), make_node("other")
    one.server_context()
    folder = one.identity.key_path.parent
    assert [path.name for path in folder.iterdir()] == ["node.key"]
    for certificate_pem in (other.certificate_pem, "nonsense", "é"):
        with pytest.raises(AuthError, match="does not fit its key"):
            client_context(one.identity, certificate_pem, one.authority_pem)
    with pytest.raises(AuthError, match="authority cannot be read"):
        client_context(one.identity, one.certificate_pem, "nonsense")
    assert [path.name for path in folder.iterdir()] == ["node.key"]
    one.identity.key_path.unlink()
    with pytest.raises(SourceError, match="cannot be used"):
        one.server_context()


def token_text(authority: ClusterAuthority, now_s: float) -> tuple[TokenBook, str]:
    book, token = TokenBook().create(
        addresses=["127.0.0.1:7070"], fingerprint=authority.fingerprint, cluster=authority.name, now_s=now_s
    )
    return book, token.encode()


def test_machine_with_only_a_token_becomes_a_node(
    make_node, authority: ClusterAuthority, tmp_path: Path, now_s: float
) -> None:
    coordinator = make_node("coordinator", Role.COORDINATOR)
    book, text = token_text(authority, now_s)

    def admit(sock: socket.socket) -> TokenBook:
        context = join_server_context(coordinator.identity, coordinator.certificate_pem)
        with answer_join(sock, context, authority.certificate_pem) as connection:
            token_id, secret, node_id, request_pem = connection.recv(10_000).decode().split("|")
            used, record = book.use(
                token_id, bytes.fromhex(secret), node_id=node_id, role=Role.WORKER, now_s=now_s
            )
            pem = authority.issue(request_pem, node_id=node_id, roles=record.roles, now_s=now_s)
            connection.sendall(pem.encode())
            return used

    server = Server(admit)
    identity, token = NodeIdentity.open(tmp_path / "new"), parse_token(text)
    connection, authority_pem = open_join(server.dial(), token)
    with connection:
        assert connection.version() == "TLSv1.3"
        parts = (token.token_id, token.secret.hex(), identity.node_id, identity.certificate_request())
        connection.sendall("|".join(parts).encode())
        node = Credentials(identity, connection.recv(10_000).decode(), authority_pem)
    used = server.result()
    assert isinstance(used, TokenBook)
    assert used.records[0].used_by == (identity.node_id,)

    server = Server(serve_tls(coordinator.server_context()))
    assert converse(server, node.client_context())[1] == coordinator.own
    assert server.result() == node.own


def play_coordinator(node: Credentials, authority_pem: str) -> Server:
    """A join endpoint that returns all that the client says after the handshake."""
    context = join_server_context(node.identity, node.certificate_pem)

    def serve(sock: socket.socket) -> bytes:
        with answer_join(sock, context, authority_pem) as connection:
            return connection.recv(100)

    return Server(serve)


def test_impostor_with_an_authority_of_its_own_hears_nothing(
    make_node, authority: ClusterAuthority, tmp_path: Path, now_s: float
) -> None:
    impostor_authority = other_cluster(tmp_path, now_s)
    impostor = make_node("impostor", Role.COORDINATOR, signer=impostor_authority)
    token = parse_token(token_text(authority, now_s)[1])
    server = play_coordinator(impostor, impostor_authority.certificate_pem)
    with pytest.raises(AuthError, match="another cluster than the join token"):
        open_join(server.dial(), token)
    with pytest.raises(LinkError):
        server.result()
    # The true authority's certificate is public, so the impostor may show it, but not use it.
    server = play_coordinator(impostor, authority.certificate_pem)
    with pytest.raises(AuthError, match="certificate is not good"):
        open_join(server.dial(), token)
    with pytest.raises(LinkError):
        server.result()


def test_worker_of_the_cluster_that_plays_coordinator_hears_no_secret(
    make_node, authority: ClusterAuthority, now_s: float
) -> None:
    server = play_coordinator(make_node("worker", Role.WORKER), authority.certificate_pem)
    with pytest.raises(ForbiddenError, match="may not act as coordinator"):
        open_join(server.dial(), parse_token(token_text(authority, now_s)[1]))
    assert server.result() == b""


@pytest.mark.parametrize("answer", [b"", b"\x01", b"\x00\x00", b"\xff\xffxxxx", b"HTTP/1.1 400 Bad Request"])
def test_answers_that_are_no_greeting_end_the_join(
    authority: ClusterAuthority, now_s: float, answer: bytes
) -> None:
    def serve(sock: socket.socket) -> bytes:
        heard = sock.recv(100)
        sock.sendall(answer)
        return heard

    server = Server(serve)
    sock = server.dial()
    with pytest.raises(LinkError):
        open_join(sock, parse_token(token_text(authority, now_s)[1]))
    assert sock.fileno() == -1
    assert server.result() == JOIN_HELLO


def test_callers_that_do_not_greet_are_turned_away(make_node, authority: ClusterAuthority) -> None:
    server = play_coordinator(make_node("c", Role.COORDINATOR), authority.certificate_pem)
    with server.dial() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(LinkError, match="said something else"):
            server.result()


def test_a_caller_that_goes_before_tls_begins_leaves_nothing_open(make_node) -> None:
    node = make_node("c", Role.COORDINATOR)
    for context in (node.server_context(), join_server_context(node.identity, node.certificate_pem)):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            caller = socket.create_connection(listener.getsockname(), LIMIT_S)
            accepted, _ = listener.accept()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()  # with a reset
        with accepted, pytest.raises(ConnectionResetError):
            context.wrap_socket(accepted, server_side=True)
        gc.collect()  # of a socket that was left open it warns


def test_unverified_peers_have_no_identity(make_node, authority: ClusterAuthority, now_s: float) -> None:
    coordinator = make_node("c", Role.COORDINATOR)
    context = join_server_context(coordinator.identity, coordinator.certificate_pem)

    def serve(sock: socket.socket) -> object:
        with answer_join(sock, context, authority.certificate_pem) as connection:
            return peer_identity(connection)

    server = Server(serve)
    connection, _ = open_join(server.dial(), parse_token(token_text(authority, now_s)[1]))
    with connection, pytest.raises(AuthError, match="was not checked"):
        server.result()


def test_greeting_is_the_certificate_after_its_length(authority: ClusterAuthority) -> None:
    greeting = join_greeting(authority.certificate_pem)
    assert int.from_bytes(greeting[:2], "big") == len(greeting) - 2 < 4096
