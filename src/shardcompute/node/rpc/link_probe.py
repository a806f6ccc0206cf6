"""How far away another node is, and how much the way to it carries: measured over a link of role "probe"."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from shardcompute.control.events import LinkMeasured
from shardcompute.core.errors import LinkError
from shardcompute.core.fields import shorten
from shardcompute.node.rpc.commands import Peer
from shardcompute.wire import Link, Ping, Pong
from shardcompute.wire.control import TensorBytes
from shardcompute.wire.links import DIRECT

log = logging.getLogger(__name__)
_PINGS = 5
_SMALL_BYTES = 1 << 16
_LOAD_BYTES = 1 << 20
_SLOW_S = 0.2
"""A line that takes so long for the small load is known by it: the large one would take it away for seconds from those
whom it serves, and time out beside them."""
_MOST_LOAD_BYTES = 4 << 20
_TIMEOUT_S = 10.0
_MOST_GAIN = 8.0
_MOST_REMARK = 300


@dataclass(frozen=True, slots=True)
class LinkQuality:
    rtt_s: float
    bytes_per_s: float
    rung: str = DIRECT
    remark: str = ""
    """Why a better rung was not to be had."""


def answer_probes(link: Link) -> None:
    """The other side: every ping and every load comes back as a pong, until the link ends."""
    while True:
        message, _ = link.receive()
        if isinstance(message, Ping):
            link.send(Pong(message.nonce, message.sent_s))
        elif isinstance(message, TensorBytes) and message.size <= _MOST_LOAD_BYTES:
            link.send(Pong(message.number, 0.0))
        else:
            raise LinkError(f"{type(message).__name__} came on a link for probes")


def probe_links(
    node: str, peers: Iterable[Peer], dial: Callable[[str, str, str], Link]
) -> Iterator[LinkMeasured]:
    """What `node` finds of its links to those whom it can reach; who cannot be is reported when a chain needs it."""
    for peer in peers:
        try:
            quality = probe_link(partial(dial, peer.url, "probe", peer.node))
        except LinkError as error:
            log.info("%s cannot be probed: %s", peer.node, error.message)
            continue
        yield LinkMeasured(
            node,
            peer.node,
            quality.rtt_s,
            quality.bytes_per_s,
            rung=quality.rung,
            remark=shorten(quality.remark, _MOST_REMARK),
        )


def probe_link(dial: Callable[[], Link]) -> LinkQuality:
    """Dial, ask, hang up. Raises LinkError."""
    with dial() as link:
        pings = [Ping(number, 0.0) for number in range(_PINGS)]
        # The quickest counts: whatever else goes on only ever makes one slower.
        rtt_s = min(_time(link, partial(link.send, ping)) for ping in pings)
        load_bytes, sent_s = _SMALL_BYTES, _time_load(link, _SMALL_BYTES)
        if sent_s - rtt_s < _SLOW_S:
            load_bytes, sent_s = _LOAD_BYTES, _time_load(link, _LOAD_BYTES)
        stats = link.stats
    return LinkQuality(rtt_s, bandwidth(load_bytes, sent_s, rtt_s), stats.rung, stats.remark)


def bandwidth(size_bytes: int, sent_s: float, rtt_s: float) -> float:
    """Bytes a second of a load that was acknowledged after `sent_s`, where a ping is after `rtt_s`.

    Where a load is as quick as a ping, their difference is noise and says nothing; what is certain is that it carried
    the load in the time that it took, so no more than a few times that is claimed.
    """
    return size_bytes / max(sent_s - rtt_s, sent_s / _MOST_GAIN, 1e-6)


def _time_load(link: Link, size_bytes: int) -> float:
    load = memoryview(bytes(size_bytes))
    return _time(link, partial(link.send, TensorBytes(_PINGS, size_bytes), (load,)))


def _time(link: Link, send: Callable[[], None]) -> float:
    started = time.perf_counter()
    send()
    try:
        message, _ = link.receive(_TIMEOUT_S)
    except TimeoutError as error:
        raise LinkError(f"{link.peer} did not answer a probe in time") from error
    if not isinstance(message, Pong):
        raise LinkError(f"{link.peer} answered a probe with {type(message).__name__}")
    return time.perf_counter() - started
