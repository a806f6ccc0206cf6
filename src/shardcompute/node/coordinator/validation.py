"""Validation of what nodes say, before the cluster's state is built on it.

A member may be broken or lie. What it claims is bounded here, so that placement computes with sane numbers, the
journal stays small and people's terminals show plain text. Whether a claim is true shows later, in use.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit

from msgspec.structs import replace

from shardcompute.control.events import (
    Event,
    LinkBroken,
    LinkMeasured,
    MemoryRegained,
    NodeDrained,
    NodeJoined,
    NodeLeft,
    NodeMeasured,
    NodeRested,
    RingTimed,
    ShardFailed,
    ShardLoaded,
    ShardProgressed,
    StageTimed,
    place_in,
)
from shardcompute.control.state import LayerShape, LayerTime, Node, NodeRole, RankPlace, UnusedDevice
from shardcompute.core.errors import UsageError
from shardcompute.core.fields import shorten
from shardcompute.node.rpc.session_ids import MOST_NAMESPACES
from shardcompute.security.names import Role

_MOST_BYTES = 1 << 50
_MOST_THREADS = 1 << 16
_MOST_LAYERS = 1 << 14
_MOST_RANGES = 4096
_MOST_RANKS = 256
_MOST_WEIGHT = 1 << 20
_MOST_OF_A_KIND = 256
"""Shards, loads, refusals and measured models of one node."""
_MOST_CHARACTERS = 300
_MOST_CODECS = 64
_MOST_DEVICES = 32
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.%]{2,64}")
_LINK_SCHEMES = ("tcp",)
_API_SCHEMES = ("http", "https")
_MOST_REASON_CHARACTERS = 1000
_REPORTABLE = (
    LinkBroken,
    LinkMeasured,
    MemoryRegained,
    NodeDrained,
    NodeLeft,
    NodeMeasured,
    NodeRested,
    RingTimed,
    ShardFailed,
    ShardLoaded,
    ShardProgressed,
    StageTimed,
)
# From a hundred times faster than any memory to a byte in a second.
_SECONDS_PER_BYTE = (1e-15, 1.0)
_LAYER_S = (1e-9, 3600.0)
_MOST_WIDTH = 1 << 24
_MOST_REMEMBERED = 64
_MOST_BACKENDS = 8
# Of a clock that may be wrong by a lot.
_AT_S = (0.0, 1e12)
_OVERHEAD_S = (0.0, 3600.0)
_RTT_S = (0.0, 3600.0)
_BYTES_PER_S = (1.0, 1e15)
_STEP_S = (0.0, 3600.0)
_WATTS = (0.0, 1e6)
_PRICE = (0.0, 1e6)


def validate_join(event: NodeJoined) -> str | None:
    """A reason to refuse a node that describes itself like this, or None."""
    problems = [
        _out_of("memory", event.memory_bytes, 0, _MOST_BYTES),
        _out_of("wattage", event.stated_watts, *_WATTS),
        _out_of("disk for others", event.seed_bytes, 0, _MOST_BYTES),
        _out_of("price of an hour", event.price_per_hour, *_PRICE),
        _out_of("process's memory", event.process_bytes, 0, _MOST_BYTES),
        _unwordly("holding", event.holding or "-"),
        _out_of("threads", event.threads, 1, _MOST_THREADS),
        _out_of("seconds per byte", event.seconds_per_byte, *_SECONDS_PER_BYTE),
        _out_of("overhead", event.overhead_s, *_OVERHEAD_S),
        _out_of("seconds per byte", event.prefill_seconds_per_byte, *_SECONDS_PER_BYTE),
        _out_of("time of its probe", event.probed_at_s, *_AT_S),
        _out_of("number of remembered models", len(event.remembered), 0, _MOST_REMEMBERED),
        *(problem for each in event.remembered[:_MOST_REMEMBERED] for problem in _wrong_memory(each)),
        _unwordly("name", event.name),
        _unwordly("reason to offer less", event.memory_reason or "-", _MOST_REASON_CHARACTERS),
        _unwordly("reason to rest", event.rest_reason or "-"),
        _unwordly("device", event.device),
        _unwordly("backend", event.backend),
        _unwordly("device's label", event.device_label or "-"),
        _unwordly("exactness class", event.exactness or "-"),
        _unwordly("fallback's exactness class", event.fallback or "-"),
        _unwordly("device's remark", event.device_remark or "-"),
        _out_of("device's memory", event.device_bytes, 0, _MOST_BYTES),
        _out_of("number of unused devices", len(event.unused_devices), 0, _MOST_DEVICES),
        *(problem for unused in event.unused_devices[:_MOST_DEVICES] for problem in _unused_problems(unused)),
        _out_of("number of other backends", len(event.alternatives), 0, _MOST_BACKENDS),
        *(
            _unwordly("other backend", word or "-")
            for each in event.alternatives[:_MOST_BACKENDS]
            for word in (each.backend, each.holding, each.exactness)
        ),
        _unwordly("version", event.version),
        _no_address("address", event.address, _LINK_SCHEMES),
        _no_address("API's address", event.api_url, _API_SCHEMES) if event.api_url else None,
        _out_of("namespace of sessions", event.session_namespace, 0, MOST_NAMESPACES - 1),
        _no_driver(event),
        _out_of("number of shards", len(event.cached) + len(event.shards), 0, _MOST_RANGES),
        *(_no_range(held.model, held.start, held.stop) for held in event.cached[:_MOST_RANGES]),
        *(_no_range(held.model, held.start, held.stop) for held in event.shards[:_MOST_RANGES]),
        *(_unwordly("chain", held.chain) for held in event.shards[:_MOST_RANGES]),
        *(_out_of("shard", held.size_bytes, 0, _MOST_BYTES) for held in event.shards[:_MOST_RANGES]),
        *(_no_rank(held.tensor) for held in event.shards[:_MOST_RANGES]),
        _out_of("number of codecs", len(event.codecs), 0, _MOST_CODECS),
        *(_unwordly("codec", codec) for codec in event.codecs[:_MOST_CODECS]),
    ]
    return next((problem for problem in problems if problem is not None), None)


def sane_watts(watts: float) -> float:
    """What a node says that its machine draws; 0 where that cannot be."""
    return watts if _out_of("wattage", watts, *_WATTS) is None else 0.0


def validate_role(role: NodeRole, admitted: Collection[Role]) -> str | None:
    """A reason to refuse a node in a role that its certificate does not give it, or None."""
    needed = {"worker": Role.WORKER, "driver": Role.DRIVER}[role]
    return None if needed in admitted else f"its certificate is not that of a {needed}"


def validate_report(event: Event, node: str, driver: str, known: Collection[str]) -> Event:
    """What `node` reports, as it is taken in. UsageError for what it may not report, or what cannot be.

    A node may report what it did or saw itself, nothing else.
    """
    if not isinstance(event, _REPORTABLE):
        raise UsageError("that is not its business")
    if isinstance(event, RingTimed):
        # Whether it drives that chain at all is known by whoever takes it in.
        reporter = node
    elif isinstance(event, LinkMeasured):
        reporter = node if node in (event.a, event.b) else event.a
    else:
        reporter = event.reporter if isinstance(event, LinkBroken) else event.node
    if reporter != node:
        raise UsageError(f"it speaks for {reporter[:40]!r}")
    reason = report_problem(event)
    if reason is not None:
        raise UsageError(reason)
    if isinstance(event, LinkMeasured) and not {event.a, event.b} <= {driver, *known}:
        raise UsageError("it names a node that nobody knows")
    if isinstance(event, ShardFailed):
        return replace(event, reason=shorten(event.reason, _MOST_REASON_CHARACTERS))
    if isinstance(event, LinkMeasured):
        return replace(event, remark=shorten(event.remark, _MOST_REASON_CHARACTERS))
    if isinstance(event, LinkBroken) and event.node == driver:
        # The driver is no member: its links are known by their other end.
        return LinkBroken(driver, node, event.now_s)
    return event


def validate_count(event: Event, node: Node) -> str | None:
    """A reason to ignore what a node reports besides all that is known of it, or None. It has few shards, and few
    models that it failed to load or was measured with: names that it makes up must not fill the state."""
    if isinstance(event, ShardLoaded):
        return _one_more("shards", {held.place for held in node.shards}, place_in(event))
    if isinstance(event, ShardProgressed):
        return _one_more("loads", {each.place for each in node.loading}, place_in(event))
    if isinstance(event, ShardFailed):
        return _one_more("failures", {each.model for each in node.refusals}, event.model)
    if isinstance(event, NodeMeasured) and event.model is not None:
        return _one_more("measured models", {each.model for each in node.layer_times}, event.model)
    return None


def report_problem(event: Event) -> str | None:
    """A reason to ignore what a node reports, or None."""
    problems: list[str | None] = []
    if isinstance(event, NodeMeasured):
        problems = [
            _out_of("seconds per byte", event.seconds_per_byte, *_SECONDS_PER_BYTE),
            _out_of("overhead", event.overhead_s, *_OVERHEAD_S),
            *_wrong_times(event.layer_s, event.batch_layer_s, event.prefill_layer_s, event.measured_at_s),
            *_wrong_shape(event.shape),
            _unwordly("model", event.model or "-"),
        ]
    elif isinstance(event, ShardLoaded | ShardFailed):
        problems = [
            _unwordly("chain", event.chain),
            _no_range(event.model, event.start, event.stop),
            _no_rank(event.tensor),
        ]
        if isinstance(event, ShardFailed):
            problems.append(_out_of("memory", event.memory_bytes, 0, _MOST_BYTES))
        if isinstance(event, ShardLoaded):
            problems.append(_out_of("shard", event.size_bytes, 0, _MOST_BYTES))
    elif isinstance(event, StageTimed):
        problems = [
            _unwordly("chain", event.chain),
            _no_range(event.model, event.start, event.stop),
            *_wrong_times(event.layer_s, event.batch_layer_s, event.prefill_layer_s, event.measured_at_s),
            _out_of("time of a layer", event.loaded_s, *_LAYER_S),
            *_wrong_shape(event.shape),
        ]
    elif isinstance(event, RingTimed):
        problems = [
            _unwordly("chain", event.chain),
            _out_of("time of a step", event.step_s, *_STEP_S),
            _out_of("time of a step", event.wire_s, *_STEP_S),
        ]
    elif isinstance(event, NodeRested):
        problems = [_unwordly("reason to rest", event.reason or "-")]
    elif isinstance(event, MemoryRegained):
        problems = [_out_of("memory", event.memory_bytes, 0, _MOST_BYTES)]
    elif isinstance(event, ShardProgressed):
        problems = [_no_range(event.chain, event.start, event.stop), _no_rank(event.tensor)]
    elif isinstance(event, LinkMeasured):
        problems = [
            _unwordly("node", event.a),
            _unwordly("node", event.b),
            _out_of("round trip", event.rtt_s, *_RTT_S),
            _out_of("bandwidth", event.bytes_per_s, *_BYTES_PER_S),
            _unwordly("rung", event.rung),
        ]
    elif isinstance(event, LinkBroken):
        problems = [_unwordly("node", event.node)]
    return next((problem for problem in problems if problem is not None), None)


def _wrong_times(
    layer_s: float | None, batch_s: float | None, prefill_s: float | None, at_s: float
) -> Iterator[str | None]:
    for seconds in (layer_s, batch_s, prefill_s):
        yield _out_of("time of a layer", seconds, *_LAYER_S)
    yield _out_of("time of measuring", at_s, *_AT_S)


def _wrong_shape(shape: LayerShape | None) -> Iterator[str | None]:
    if shape is not None:
        yield _out_of("width", shape.hidden, 1, _MOST_WIDTH)
        yield _out_of("work", shape.work_bytes, 1, _MOST_BYTES)
        yield _unwordly("form", shape.form)


def _wrong_memory(time: LayerTime) -> Iterator[str | None]:
    yield _unwordly("model", time.model)
    yield _out_of("number of samples", len(time.samples), 0, 0)
    yield from _wrong_times(time.seconds, time.batch_s, time.prefill_s, time.measured_at_s)
    yield from _wrong_times(time.loaded_s or None, None, None, 0.0)
    yield from _wrong_shape(time.shape)


def _out_of(what: str, value: float | None, least: float, most: float) -> str | None:
    # Not `least > value or …`: NaN is out of every range.
    if value is None or least <= value <= most:
        return None
    shown = str(value) if abs(value) < 1e20 else "far too much"
    return f"its {what} cannot be {shown}"


def _unwordly(what: str, text: str, most: int = _MOST_CHARACTERS) -> str | None:
    """Names are shown to people: no control characters, no novels."""
    is_plain = 0 < len(text) <= most and text.isprintable()
    return None if is_plain else f"its {what} is not a line of at most {most} characters"


def _unused_problems(unused: UnusedDevice) -> list[str | None]:
    words = (unused.device, unused.label, unused.problem, unused.fix)
    return [
        *(_unwordly("unused device", each) for each in words),
        _out_of("unused device's memory", unused.memory_bytes, 0, _MOST_BYTES),
    ]


def _no_range(name: str, start: int, stop: int) -> str | None:
    if 0 <= start < stop <= _MOST_LAYERS:
        return _unwordly("model", name)
    return "it names layers that no model has"


def _no_rank(tensor: RankPlace | None) -> str | None:
    if tensor is None:
        return None
    is_some = 0 <= tensor.rank < len(tensor.weights) <= _MOST_RANKS
    is_bounded = is_some and all(0 < weight <= _MOST_WEIGHT for weight in tensor.weights)
    return None if is_bounded else "it names a share of layers that no stage has"


def _no_driver(event: NodeJoined) -> str | None:
    if event.role != "driver" or not (event.memory_bytes or event.cached or event.shards):
        return None
    return "a driver holds no layers"


def _no_address(what: str, url: str, schemes: Collection[str]) -> str | None:
    """Scheme, host and port, and nothing that a name or a browser would make more of."""
    problem = _unwordly(what, url)
    if problem is not None:
        return problem
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return f"its {what} cannot be read"
    if parts.scheme not in schemes:
        return f"its {what} does not begin with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    is_whole = _HOST.fullmatch(host) is not None and (port or 0) > 0
    return None if is_bare and is_whole else f"its {what} is not a host and a port"


def _one_more(what: str, known: Collection[object], new: object) -> str | None:
    if new in known or len(known) < _MOST_OF_A_KIND:
        return None
    return f"it has more than {_MOST_OF_A_KIND} {what}"
