"""`shardcompute driver`: the API of a cluster on another machine, beside the coordinator's own."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.failures import show_error
from shardcompute.cli.options.cluster import ImageUrls, ImageUrlsOption, ReceiptsOption
from shardcompute.cli.options.https import Https, HttpsChoice, TlsCert, TlsKey
from shardcompute.cli.options.keys import AllowedHost, RequireKey, ServerKeyFile, server_keys
from shardcompute.cli.options.records import with_options
from shardcompute.cli.options.worker import Host, Port, Shape, Through, driver_folder
from shardcompute.cli.serve.addresses import (
    check_ports,
    is_loopback,
    near_host,
    node_addresses,
    reachable_host,
)
from shardcompute.cli.serve.greeting import greeting
from shardcompute.cli.serve.shaping import open_transports
from shardcompute.cli.stopping import exit_at_once
from shardcompute.core.errors import AuthError, UsageError
from shardcompute.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from shardcompute.node.driver.standalone import StandaloneDriver, StandaloneOptions
    from shardcompute.node.enrolment.stored import EnrolledNode
    from shardcompute.node.process.pidfile import PidLock
    from shardcompute.security.https.server import ServerTls
    from shardcompute.security.https.sources import KeyedCertificate

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class DriverArguments:
    """Where a driver is reached: by stages at `host`, by clients at `api_host`."""

    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="FOLDER",
            help="Folder of the driver, by default `driver` in the data folder. Each folder is a driver of its own.",
        ),
    ] = None
    api_host: Annotated[
        str,
        typer.Option(
            "--api-host", metavar="ADDRESS", help="Address of the HTTP API; 0.0.0.0 for other machines too."
        ),
    ] = "127.0.0.1"
    api_port: Annotated[
        int,
        typer.Option(
            "--api-port", metavar="N", min=0, max=65535, help="Port of the HTTP API; 0 for any free one."
        ),
    ] = 8000
    api_key_file: ServerKeyFile = None
    require_key: RequireKey = False
    allowed_host: AllowedHost = None
    image_urls: ImageUrlsOption = ImageUrls.OFF
    receipts: ReceiptsOption = False
    https: Https = False
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    host: Host = None
    port: Port = 0
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise", metavar="HOST", help="Name or address under which other nodes reach this driver."
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="What people call this driver, by default the machine's name."
        ),
    ] = None
    shape: Shape = None

    @property
    def https_choice(self) -> HttpsChoice:
        return HttpsChoice(self.https, self.tls_cert, self.tls_key)

    def names(self, settings: Settings) -> list[str]:
        """By which clients may call the API, besides its address."""
        return [*(self.allowed_host or ()), *settings.allowed_hosts, self.advertise or ""]

    def open_tls(self, folder: Path, settings: Settings) -> ServerTls | None:
        names = [self.api_host, reachable_host(self.api_host), *self.names(settings)]
        return self.https_choice.open(folder, names)

    def needs_key(self, keys: list[str]) -> bool:
        return bool(keys) or self.require_key or not is_loopback(self.api_host)

    def options(self, member: EnrolledNode, settings: Settings) -> StandaloneOptions:
        from shardcompute.node.discovery.again import coordinator_finder
        from shardcompute.node.driver.standalone import StandaloneOptions
        from shardcompute.node.enrolment.stored import authority_of

        credentials = member.credentials
        host, advertise = node_addresses(member.control_urls, self.host, self.advertise)
        return StandaloneOptions(
            host=host,
            port=self.port,
            advertise=advertise,
            name=self.name or "",
            transports=open_transports(self.shape),
            follows_address=self.host is None and self.advertise is None,
            find_again=coordinator_finder(authority_of(credentials), credentials.authority_pem, settings.dht),
        )


@with_options
def driver(
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="TOKEN",
            help="A token of `shardcompute token create`; not needed in a folder that has joined before.",
        ),
    ] = None,
    *,
    through: Through = None,
    arguments: DriverArguments,
) -> None:
    """Serve a cluster's models over HTTP from this machine too, until Ctrl-C.

    A driver holds no layers: it talks to clients and sends their tokens round the cluster's workers, beside the
    coordinator's own driver. One near the workers answers faster than one far away, and those who use it need not
    reach the coordinator's machine.
    """
    from shardcompute.node.enrolment.stored import join_from, open_enrolled
    from shardcompute.node.process.pidfile import DRIVER_FILE, check_free
    from shardcompute.security.names import Role
    from shardcompute.security.tokens import parse_token

    screen = open_screen()
    if through is not None and token is None:
        raise UsageError(
            "--through is for joining with a token",
            hint="leave it out: a driver that has joined knows the doors of its coordinator's relay",
        )
    folder = driver_folder(load_settings(), arguments.data_dir)
    # A wrong key or certificate is said before anything is started.
    server_keys(arguments.api_key_file, load_settings())
    check_free(folder / DRIVER_FILE)
    tls = arguments.open_tls(folder, load_settings())
    if token is None:
        member = open_enrolled(folder, Role.DRIVER)
    else:
        member = join_from(folder, parse_token(token), Role.DRIVER, through or "")
        screen.say(f"joined {member.credentials.own.cluster} as {member.credentials.identity.node_id}")
    run_driver(folder, arguments, member, tls, screen)


def run_driver(
    folder: Path, arguments: DriverArguments, member: EnrolledNode, tls: ServerTls | None, screen: Screen
) -> NoReturn:
    """Until a signal or the coordinator asks to stop."""
    from shardcompute.node.driver.standalone import StandaloneDriver
    from shardcompute.node.process.log_files import logging_to_file
    from shardcompute.node.process.pidfile import DRIVER_FILE, claim
    from shardcompute.node.telemetry.traces import tracing

    with contextlib.ExitStack() as stack:
        held = stack.enter_context(claim(folder / DRIVER_FILE, arguments.name or ""))
        stack.enter_context(logging_to_file(folder, "driver"))
        options = arguments.options(member, load_settings())
        check_ports([(arguments.api_host, arguments.api_port), (options.host, options.port)])
        serving = StandaloneDriver(member.credentials, list(member.control_urls), options)
        stack.enter_context(contextlib.closing(serving))
        stack.enter_context(tracing(load_settings(), serving.pool.requests))
        foreground = _ForegroundDriver(arguments, serving, tls, held, screen, load_settings())
        asyncio.run(foreground.serve())
        serving.leave()
        code = foreground.exit_code()
    exit_at_once(code)


class _ForegroundDriver:
    """Serves the API and says what happens meanwhile."""

    def __init__(
        self,
        arguments: DriverArguments,
        driver: StandaloneDriver,
        tls: ServerTls | None,
        held: PidLock,
        screen: Screen,
        settings: Settings,
    ) -> None:
        self._given = arguments
        self._settings = settings
        self._keys = server_keys(arguments.api_key_file, settings)
        self._driver = driver
        self._tls = tls
        self._scheme = "http" if tls is None else "https"
        self._held = held
        self._screen = screen
        self._url = ""
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        from shardcompute.api import create_app, serve
        from shardcompute.api.access.hosts import hosts_of

        given = self._given
        app = create_app(
            self._driver.pool,
            api_keys=self._keys or None,
            verify_key=self._driver.find_key,
            needs_key=given.needs_key(self._keys),
            quota=self._driver.quota,
            hosts=hosts_of(given.api_host, given.names(self._settings)),
            cors_origins=self._settings.cors_origins,
            image_urls=given.image_urls.value,
            receipts=self._driver.pool.receipts,
            gives_receipts=given.receipts,
        )
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            try:
                await serve(
                    app,
                    given.api_host,
                    given.api_port,
                    on_listening=self._listening,
                    stop=self._stop,
                    tls=self._tls,
                    on_certificate=self._certified,
                )
            finally:
                watcher.cancel()

    def exit_code(self) -> int:
        """0 unless the coordinator will not have us any more."""
        if self._driver.refusal:
            refused = AuthError(
                f"the coordinator refuses this driver: {self._driver.refusal}",
                hint="ask for a new token and join again",
            )
            show_error(self._screen, refused)
            return refused.exit_code
        released = "the coordinator has released this driver" if self._driver.has_left else "stopped"
        self._screen.say(released)
        return 0

    def _listening(self, host: str, port: int) -> None:
        self._url = f"{self._scheme}://{reachable_host(host)}:{port}"
        if self._tls is not None:
            self._certified(self._tls.shown)
        self._held.update(api_url=f"{self._scheme}://{near_host(host)}:{port}")
        self._screen.say(f"the API listens at {self._url}; Ctrl-C stops it")
        self._driver.start(self._url)

    def _certified(self, certificate: KeyedCertificate) -> None:
        self._held.update(api_certificate=certificate.own_pem)

    async def _watch(self) -> None:
        has_greeted = False
        while not (self._driver.refusal or self._driver.has_left):
            if not has_greeted and self._driver.pool.is_ready():
                has_greeted = True
                self._greet(self._driver.pool.models()[0].name)
            await asyncio.sleep(_LOOK_S)
        self._stop.set()

    def _greet(self, model: str) -> None:
        needs_key = self._given.needs_key(self._keys)
        tls = self._given.https_choice.examples(self._tls, self._held.path.parent)
        for line in greeting(model, self._url, needs_key=needs_key, tls=tls):
            self._screen.say(line)
        if needs_key and not self._keys:
            self._screen.say("It is a key of the cluster, such as that which `up` has printed.")
