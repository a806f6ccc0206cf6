"""HTTP retries: trying a request again when that can help, and saying what is wrong when it cannot."""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Callable
from typing import TypeVar

import httpx

from shardcompute.core.errors import SourceError, UnknownModelError

ATTEMPTS = 5
# Someone without a network should hear so soon, not after all attempts.
CONNECT_ATTEMPTS = 3
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
_ADVANCE_BYTES = 1 << 20

T = TypeVar("T")


TRANSIENT = (httpx.HTTPError, httpx.InvalidURL)
"""What httpx raises while a connection is made or used."""
UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout)


class BusyError(Exception):
    """The request failed in a way that may pass. `wait_s` is how long the server asked to wait, if it did."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def retry(
    action: Callable[[], T],
    *,
    what: str,
    host: str,
    sleep: Callable[[float], None],
    position: Callable[[], int],
) -> T:
    """Do `action` until it succeeds: at most `ATTEMPTS` times, unless `position` gains a MiB between."""
    failures = 0
    cause: Exception
    reached = position()
    while True:
        try:
            return action()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            cause, wait_s, limit = error, None, CONNECT_ATTEMPTS
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError) as error:
            cause, wait_s, limit = error, None, ATTEMPTS
        except BusyError as error:
            cause, wait_s, limit = error, error.wait_s, ATTEMPTS
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            cause, wait_s, limit = error, None, 0
        if position() >= reached + _ADVANCE_BYTES:
            failures, reached = 0, position()
        failures += 1
        wait_s = _FIRST_WAIT_S * 2.0 ** (failures - 1) if wait_s is None else wait_s
        if failures >= limit or wait_s > _LONGEST_WAIT_S:
            raise SourceError(
                f"{what} cannot be fetched from {host}: {str(cause) or type(cause).__name__}",
                hint="check the network or try later; models on this machine and local folders need none",
            ) from cause
        sleep(wait_s)


def check_status(response: httpx.Response, what: str, host: str) -> None:
    """Return if the answer is good, raise `BusyError` if another try may help, and one of ours if not."""
    status = response.status_code
    if status in (200, 206):
        return
    if status in (408, 425, 429) or status >= 500:
        raise BusyError(f"it answers {status} {response.reason_phrase}".strip(), _retry_after(response))
    # For a name that does not exist the hub answers 401, not to give away which private ones do.
    if status == 404 or response.headers.get("X-Error-Code") == "RepoNotFound":
        raise UnknownModelError(
            f"{host} has no {what}",
            hint="check the spelling and the revision; if the model is private, set HF_TOKEN",
        )
    if status in (401, 403):
        raise SourceError(
            f"{host} refuses access to {what} ({status})",
            hint="set HF_TOKEN to your access token, and accept the licence on the model's page",
        )
    raise SourceError(
        f"{host} answers {status} for {what}", hint="check SHARDCOMPUTE_HUB_URL and HF_ENDPOINT"
    )


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())
