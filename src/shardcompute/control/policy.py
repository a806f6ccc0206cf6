"""The numbers that decide: when a machine counts as lost, and what a good placement is worth."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

DriverPlacementMode = Literal["auto", "here"]


class HealthPolicy(Struct, frozen=True):
    """When silence becomes suspicion and suspicion becomes loss. On one LAN a death is seen within 2 s."""

    heartbeat_interval_s: float = 0.5
    suspect_after_s: float = 1.0
    lost_after_s: float = 1.75
    lost_after_reset_s: float = 0.5
    """A control link that was reset, and a neighbour that cannot reach the machine either, mean a dead process: how
    long we wait for it to dial again. Without such a neighbour, as long as after a last heartbeat."""
    given_up_after_s: float = 45.0
    """How long a machine that is silent, and no more than that, is waited for where no other can take its place:
    heartbeats may be held up on a full line behind its own work, a laptop may sleep for half a minute or change its
    network, and losing it would only cost what it holds."""
    accusers: int = 2
    """How many neighbours must report a broken link before we suspect the machine behind it."""
    restart_grace_s: float = 10.0
    """How long machines have to come back after the coordinator itself restarted."""
    retry_after_s: float = 30.0
    """How long a machine that failed to load a model is left alone; doubles with each failure."""
    retry_limit_s: float = 3600.0
    memory_failures: int = 3
    """So often in a row a machine whose memory ran out with a model may try at once with fewer layers of it."""
    link_breaks: int = 3
    """So often in a row a link may interrupt chains before it counts as closed."""
    probe_after_s: float = 30.0
    """How long a closed link is left alone before it is tried again."""
    host_failures: int = 5
    """So often in a row a worker may fail to host a chain's driver before others are tried."""


class PlacementPolicy(Struct, frozen=True):
    """What a placement is worth: `one^w · many^(1 - w) · (1 - machine_price)^(machines - 1)`.

    `one` is the predicted tokens/s of a single stream, `many` of enough streams to fill the pipe, and `w` is
    `latency_weight`. With 0.8 a machine that doubles `many` may cost a single stream at most 16 %.
    """

    latency_weight: float = 0.8
    machine_price: float = 0.02
    default_rtt_s: float = 0.001
    default_bytes_per_s: float = 1e8
    """Of a link that nobody has measured yet."""
    activation_bytes: int = 2
    """Per value on the wire."""
    default_seconds_per_byte: float = 1e-10
    """Of a machine that nobody has measured yet: it reads 10 GB of weights a second."""
    usual_service_factor: float = 1.25
    """So much slower than just after loading steps may be in service on a machine that has no trouble, where no other
    serves to compare it with."""
    untried_factor: float = 1.25
    """So much slower than measured a machine is taken for that has not served yet, where a chain would move to it for
    gain: machines that are alike differ by as much when each is measured once, beside whatever goes on then."""
    tensor_min_gain: float = 0.05
    """Machines compute a stage together only for at least this much more worth than without: exchanges are predicted,
    and nobody has tried them yet."""
    source_bytes_per_s: float = 5e7
    """How fast weights are expected to arrive."""
    horizon_s: float = 600.0
    """Moving weights must pay for itself within this time, or within the time that layouts have lasted of late where
    that is less."""
    pause_s: float = 3.0
    """How long streams wait while a chain changes its layout, besides the loading. Whether few or many: as many as wait
    are faster afterwards."""
    min_gain: float = 0.25
    """A serving chain is re-cut only for at least this much more worth; for twice that after one move, and so on, until
    the machines or models change: what noise promises is never worth so much for long."""
    moves_per_hour: int = 4
    """So often a chain may move for gain, whatever is measured and whoever comes and goes."""
    budget_s: float = 3600.0
    """The hour of that."""
    doubt_every_s: float = 60.0
    """So often, at most, the lines of a ring are measured anew because its steps take longer, or less long."""
    least_lifetime_s: float = 60.0
    """So long a layout is kept, twice as long after one move, and so on, unless a machine is lost or to be emptied."""
    moves_kv: bool = True
    """Whether what sessions hold travels to the machines that take layers over; else it is computed again there."""
    search_every_s: float = 900.0
    """So often a better layout than the quickly found one is searched for in the background, while nothing changes."""
    forgotten_after_s: float = 86_400.0
    """After so long without a move the next one is judged like a first."""
    price_per_kwh: float | None = None
    """What electricity costs; for people to see, nothing is decided by it. None: nobody has said."""
    most_chains: int = 0
    """So many copies of a model there may be while many ask, whatever smaller number was asked for; 0: just that."""
    sessions_per_chain: int = 8
    """Answers at once that a copy serves well; where more ask for a while, one more copy does."""
    crowded_s: float = 15.0
    calm_s: float = 300.0
    """So long there must be too many answers for a copy more, and few enough, by half, for one less; also since the
    last change."""
    drivers: DriverPlacementMode = "auto"
    """Where a chain's driver may sit: wherever the ring is clearly shorter, or with the coordinator alone."""
    driver_min_gain: float = 0.1
    driver_min_gain_s: float = 0.003
    """A driver moves only for a token that is sooner by so much of its time, and by so many seconds."""
