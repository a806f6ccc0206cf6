"""However machines, links and their measurements are: a cluster that nothing happens to comes to rest."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import Parallelism
from support.swarm.noisy_cluster import MIB, Machine, NoisyCluster

MOST_MOVES = 3
HOUR_S = 3600.0

machines = st.builds(
    Machine,
    memory_bytes=st.sampled_from([60, 150, 400, 2000]).map(lambda size: size * MIB),
    seconds_per_byte=st.sampled_from([2e-11, 4e-11, 5e-11, 1.2e-10]),
    rtt_s=st.sampled_from([0.0002, 0.001, 0.01, 0.05]),
)
troubles = st.lists(st.sampled_from(["lose", "back", "flicker", "restart", "drain"]), max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(machines, min_size=1, max_size=3),
    troubles,
    st.integers(0, 10_000),
    st.sampled_from([0, 0, 1, 2]),
)
def test_noise_moves_next_to_nothing_and_nothing_back(
    found: list[Machine], troubles: list[str], seed: int, asked: int
) -> None:
    cluster = NoisyCluster(dict(zip("abc", found, strict=False)), seed=seed)
    cluster.request(parallel=Parallelism(pp=asked))
    for trouble in troubles:
        befall(cluster, trouble)
        cluster.run(20, 5)
    cluster.run(120, 5)
    since_s = cluster.now_s
    cluster.counts.clear()
    layouts = [chain.stages for chain in cluster.state.live_chains()]
    cluster.run(1.5 * HOUR_S, 15, remeasured_s=100)
    reshaped = cluster.moved(happened.ChainReshaped, since_s=since_s)
    layouts += [event.stages for event in reshaped]  # type: ignore[union-attr]
    assert cluster.counts["MovePlanned"] <= MOST_MOVES
    assert len(reshaped) <= cluster.counts["MovePlanned"]
    used = [sorted(stage.node for stage in layout) for layout in layouts]
    assert all(former != later for i, former in enumerate(used) for later in used[i + 2 :])
    assert cluster.counts["StandbysChosen"] <= 1 + 2 * cluster.counts["MovePlanned"]
    assert cluster.counts["DriverPlaced"] <= 2 * MOST_MOVES
    assert cluster.counts["ChainPlanned"] + cluster.counts["ChainBroken"] <= 1


def befall(cluster: NoisyCluster, trouble: str) -> None:
    name = sorted(cluster.machines)[0]
    is_live = cluster.state.nodes[name].is_live
    if trouble == "lose" and is_live:
        cluster.lose(name)
    elif trouble == "back":
        cluster.join(name)
    elif trouble == "flicker":
        cluster.join(name, with_shards=is_live, memory_noise=0.05)
    elif trouble == "restart":
        cluster.restart()
    elif trouble == "drain" and is_live:
        cluster.tell(happened.NodeDrained(name))
