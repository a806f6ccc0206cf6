"""`shardcompute page`: a link to the dashboard that signs whoever opens it in."""

from __future__ import annotations

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.records import with_options


@with_options
def page(*, at: ClusterLocation) -> None:
    """Print a link to the dashboard that signs in whoever opens it, once and within an hour.

    The tab in which it is opened may then operate the cluster, until it is closed or was not used for 12 hours.
    """
    screen = open_screen()
    address = at.require()
    with address.connect() as client:
        code = client.create_sign_in()
    screen.write(f"{address.url}/#/sign-in/{code}\n")
