"""Network of a cluster's first machine: its endpoint for members, where machines join, and the relay beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from shardcompute.core.errors import LinkError
from shardcompute.core.sockets.hosts import NEAR_HOSTS, bracketed
from shardcompute.node.cluster.access import ClusterAccess
from shardcompute.node.cluster.addresses import ClusterAddresses
from shardcompute.node.cluster.options import ClusterOptions
from shardcompute.node.coordinator.shared import Candidate, Leadership
from shardcompute.node.enrolment.admission import Admission, Application
from shardcompute.node.enrolment.certificate_issuer import CertificateIssuer
from shardcompute.node.enrolment.join_server import JoinServer
from shardcompute.node.reach.attendance import RelayAttendance
from shardcompute.node.reach.cluster_relays import ClusterRelays
from shardcompute.node.reach.rungs import RELAYED
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.relay.client import RelayPass
from shardcompute.security import ClusterAuthority, join_server_context
from shardcompute.wire import Link, join_address


class ClusterNetwork:
    """Listens from the beginning; serves links once its `endpoint` is started, and lets machines join after
    `open_doors`."""

    join_server: JoinServer
    relays: ClusterRelays
    addresses: ClusterAddresses

    def __init__(
        self,
        options: ClusterOptions,
        authority: ClusterAuthority,
        access: ClusterAccess,
        services: Mapping[str, Callable[[Link], None]],
    ) -> None:
        """`services` answer members, each what it is asked for by name."""
        self._options = options
        self._attendance: RelayAttendance | None = None
        self._authority = authority
        self._access = access
        self.issuer = CertificateIssuer(authority, options.folder / "coordinator", lambda: access.revocations)
        credentials = self.issuer.own()
        credentials.save()
        self._join_tls = join_server_context(credentials.identity, credentials.certificate_pem)
        self.endpoint = Endpoint(
            credentials,
            join_address(options.host, options.port),
            services,
            advertise=options.advertise,
            transports=options.transports,
        )
        self.endpoint.revocations = access.revocations

    def open_doors(self, leadership: Leadership | None, meet: Callable[[str, bytes], bytes]) -> None:
        """Let machines join, and nodes meet that cannot dial each other; `meet` carries an offer to a node."""
        options = self._options
        with contextlib.ExitStack() as on_error:
            self.join_server = JoinServer(
                options.host,
                options.join_port,
                self._join_tls,
                self._authority.certificate_pem,
                self._admit,
                pairing=self._access.pairing_server(),
            )
            on_error.callback(self.join_server.close)
            host, join_port = NEAR_HOSTS.get(options.host, options.host), self.join_server.port
            self.relays = ClusterRelays(
                self._authority,
                options.relays,
                host=options.host,
                advertise=(options.advertise or options.host, *options.also_at),
                # For networks that let only the web out.
                entries={
                    "links": (host, urlsplit(self.endpoint.url).port or 0),
                    "join": (host, join_port),
                },
            )
            on_error.callback(self.relays.close)
            if self.endpoint.reach is not None:
                self.endpoint.reach.meet_through(meet)
            link_port = urlsplit(self.endpoint.url).port or 0
            own, *also = (
                Candidate(
                    self.endpoint.node,
                    join_address(each, link_port),
                    f"{bracketed(each)}:{join_port}",
                    options.api_url,
                )
                for each in (options.advertise or options.host, *options.also_at)
            )
            self.addresses = ClusterAddresses(own, leadership, also=also)
            on_error.pop_all()

    def attend(self) -> None:
        """Wait for members and newcomers at relays elsewhere. Once links are served."""
        self._attendance = RelayAttendance(
            self.relays.others,
            self._attending_pass,
            {
                "links": lambda sock: self.endpoint.answer_over(sock, RELAYED, None, b""),
                "join": lambda sock: self.join_server.serve_connection(sock, "a relay"),
            },
        )

    def _attending_pass(self) -> RelayPass:
        credentials = self.endpoint.credentials
        return RelayPass(credentials.identity, self.relays.attend_as(credentials.own))

    def renew_pass(self) -> bool:
        """This process is a member like others where it has to meet one. Whether there is anything to renew."""
        credentials, reach = self.endpoint.credentials, self.endpoint.reach
        access = self.relays.grant(credentials.own)
        if access is None or reach is None:
            return False
        reach.learn(RelayPass(credentials.identity, access.ticket), access.relays)
        return True

    def check_certificates(self) -> None:
        self.issuer.check_own(self.endpoint, self._join_tls)

    def answer_meeting(self, caller: str, offer: bytes) -> bytes:
        if self.endpoint.reach is None:
            raise LinkError("the coordinator is reached by its address alone")
        return self.endpoint.reach.answer(caller, offer)

    def _admit(self, application: Application, peer: str) -> Admission:
        certificate, *others = self._access.admit(application, self.issuer, peer)
        return Admission(certificate, [*self.addresses.control_urls(), *self.relays.doors], others)

    def close_doors(self) -> None:
        if self._attendance is not None:
            self._attendance.close()
        self.relays.close()
        self.join_server.close()
