"""A chain's driver on a worker, where the coordinator is far away: same tokens, whatever befalls it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.control.drivers import round_trip_s
from shardcompute.control.events import LinkMeasured
from shardcompute.core.errors import CapacityError, PromptTooLongError
from shardcompute.core.generation import GenerationRequest, Speculation
from shardcompute.models.tokenizer import Tokenizer
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.admin.view_builder import view_chains
from shardcompute.node.rpc.session_ids import namespace_of
from support.models.drafters import Oracle
from support.models.requests import greedy, mixture
from support.swarm.lab import KV_TOKENS, Alone, LabSwarm, Talk, swarm

THREE = (2, 2, 2)
STANDBYS = (2, 2, 2, 2, 2, 2)
FAR_S = 0.1
TOKENS, ARRIVED = 160, 5


def start_streams(lab: LabSwarm, requests: Sequence[GenerationRequest], arrived: int = ARRIVED) -> list[Talk]:
    talks = [lab.start(request) for request in requests]
    lab.wait_until(
        lambda: all(len(talk.tokens) >= arrived for talk in talks),
        lambda: f"tokens of all streams: {[len(talk.tokens) for talk in talks]}; {lab.describe()}",
    )
    return talks


def assert_same(alone: Alone, talks: Sequence[Talk]) -> None:
    for talk in talks:
        assert talk.result() == alone.answer(talk.request)


def hosts_of(lab: LabSwarm) -> set[int]:
    """The namespaces in which the sessions of all generations so far were numbered."""
    return {namespace_of(int(view.session)) for view in lab.cluster.pool.requests.views()}


def wait_quiet(lab: LabSwarm) -> None:
    """No session holds memory anywhere, and nothing is under way."""

    def is_quiet() -> bool:
        for service in (lab.cluster.pool, *(worker.hosted.pool for worker in lab.workers)):
            service.drop_prefixes()
        return all(worker.sessions() == 0 for worker in lab.workers)

    lab.wait_until(is_quiet, lambda: f"KV left: {[w.sessions() for w in lab.workers]}; {lab.describe()}")
    assert lab.cluster.pool.load().running == 0


def wait_at_home(lab: LabSwarm) -> None:
    lab.wait_until(
        lambda: lab.host() is None and [each.driver for each in lab.chain().drivers] == [lab.cluster.node],
        lambda: f"nobody but the coordinator drives: {lab.chain().drivers}; {lab.describe()}",
    )


def test_a_far_coordinator_has_its_driver_hosted(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        host, chain = lab.wait_hosted(), lab.chain()
        assert chain.driver_host == host.node
        assert host.node in (chain.nodes[0], chain.nodes[-1])
        talks = start_streams(lab, mixture(alone, 8, TOKENS))
        assert_same(alone, talks)
        wait_quiet(lab)
        assert hosts_of(lab) == {host.hosted.session_namespace}
        assert lab.chain().epoch == chain.epoch, "nothing of this gave the chain another shape"
        timings = talks[0].timings
        assert timings is not None
        assert (timings.generated_tokens, timings.traversals > 0) == (TOKENS, True)
        assert [timing.node for timing in lab.cluster.pool.timings()[chain.id]] == list(chain.nodes)
        view = lab.cluster.pool.requests.views()[0]
        assert {share.node for share in view.stages} == set(chain.nodes)
        there, here = host.hosted.pool, lab.cluster.pool
        lab.wait_until(
            lambda: here.load().routers[chain.id] == there.load().routers[chain.id],
            "the host has said what its router knows",
        )
        assert [use.capacity_tokens for use in here.load().kv] == [KV_TOKENS]
        shown, name = view_chains(lab.state, 0.0, {})[0], host.folder.name
        assert (shown.driver_host, shown.driver_host_reason) == (
            host.node,
            f"driver on {name}: ring 0.2 ms instead of 100.1 ms",
        )
        assert shown.predicted_tokens_per_s_one_stream is not None
        assert shown.predicted_tokens_per_s_one_stream > 1 / FAR_S
        planned = plan_model(lab.state, lab.state.models[lab.model].model, 1, 0.0)
        assert planned.chains[0].driver_host
        assert "driver on worker-" in planned.text
        shares = {each.driver: each.kv_tokens for each in lab.chain().drivers}
        assert shares == {lab.cluster.node: 512, host.node: KV_TOKENS - 512}, "home keeps one context"


def test_a_near_coordinator_drives_itself(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3) as lab:
        assert_same(alone, start_streams(lab, mixture(alone, 2, TOKENS)))
        assert lab.chain().driver_host == ""
        assert hosts_of(lab) == {lab.cluster.pool.session_namespace}
        assert [each.driver for each in lab.chain().drivers] == [lab.cluster.node]


def test_a_draft_model_keeps_its_driver_at_home(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    def open_drafters(tokenizer: Tokenizer, vocab_size: int) -> Sequence[Oracle]:
        return [Oracle(lambda prompt: [], lambda position: True, vocabulary=vocab_size)]

    far = {"home_rtt_s": FAR_S, "open_drafters": open_drafters}
    with swarm(tmp_path, tiny, layers=THREE, stages=3, **far) as lab:  # type: ignore[arg-type]
        home = round_trip_s(lab.state, lab.chain(), lab.cluster.node)
        assert home == pytest.approx(FAR_S, abs=0.001), "it would be worth it"
        assert_same(alone, start_streams(lab, mixture(alone, 1, TOKENS)))
        assert lab.chain().driver_host == ""


@pytest.mark.parametrize("host", ["killed", "frozen"])
def test_the_host_dies_mid_answer(tmp_path: Path, tiny: Path, alone: Alone, host: str) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3, home_rtt_s=FAR_S) as lab:
        worker = lab.wait_hosted()
        talks = start_streams(lab, mixture(alone, 4, TOKENS))
        if host == "killed":
            lab.kill(worker)
        else:
            lab.freeze(worker)
        assert_same(alone, talks)
        assert lab.cluster.pool.session_namespace in hosts_of(lab), (
            "the coordinator's own driver took them over"
        )
        assert lab.wait_hosted() is not worker, "another one hosts it now"
        assert_same(alone, start_streams(lab, mixture(alone, 2, TOKENS)))
        lab.thaw(worker)


def test_another_stage_dies_mid_answer(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3, home_rtt_s=FAR_S) as lab:
        host = lab.wait_hosted()
        talks = start_streams(lab, mixture(alone, 4, TOKENS))
        lab.kill(lab.stage(1))
        assert_same(alone, talks)
        assert lab.wait_hosted() is host
        wait_quiet(lab)
        assert hosts_of(lab) == {host.hosted.session_namespace}


def test_the_link_to_the_host_breaks(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        host, epoch = lab.wait_hosted(), lab.chain().epoch
        talks = start_streams(lab, mixture(alone, 4, TOKENS))
        assert lab.network.break_links(host.node, "generations") == 1
        assert_same(alone, talks)
        assert lab.wait_hosted() is host, "it is dialled again"
        assert_same(alone, start_streams(lab, mixture(alone, 2, TOKENS)))
        wait_quiet(lab)
        assert lab.chain().epoch == epoch, "for the chain nothing happened"
        assert hosts_of(lab) == {host.hosted.session_namespace, lab.cluster.pool.session_namespace}


@pytest.mark.parametrize("stage", [0, -1], ids=["to the first stage", "from the last"])
def test_a_hosts_link_to_the_chain_breaks(tmp_path: Path, tiny: Path, alone: Alone, stage: int) -> None:
    """One of the two is a link of the host to itself."""
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        host = lab.wait_hosted()
        talks = start_streams(lab, mixture(alone, 4, TOKENS))
        lab.cut(host.node, lab.stage(stage).node)
        assert_same(alone, talks)
        lab.wait_hosted()
        wait_quiet(lab)


def test_a_driver_comes_home_mid_answer(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        host = lab.wait_hosted()
        talks = start_streams(lab, mixture(alone, 4, TOKENS))
        for worker in lab.workers * 3:  # what is measured once is not believed
            lab.cluster.coordinator.post(LinkMeasured(worker.node, lab.cluster.node, 1e-4, 1e9))
        wait_at_home(lab)
        assert_same(alone, talks)
        assert_same(alone, start_streams(lab, mixture(alone, 2, TOKENS)))
        wait_quiet(lab)
        assert host.hosted.pool.chains() == set(), "the host has forgotten the chain"
        assert {each.kv_tokens for each in lab.chain().drivers} == {KV_TOKENS}


def test_a_drained_host_gives_up_its_driver(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=STANDBYS, stages=3, standbys=3, home_rtt_s=FAR_S) as lab:
        host = lab.wait_hosted()
        talks = start_streams(lab, mixture(alone, 4, TOKENS))
        lab.cluster.drain(host.node)
        lab.wait_until(lambda: lab.state.nodes[host.node].status == "gone", lab.describe)
        assert_same(alone, talks)
        assert lab.wait_hosted() is not host


def test_whoever_leaves_frees_the_hosts_memory(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        host = lab.wait_hosted()
        prompt = mixture(alone, 1, TOKENS)[0].prompt

        async def leave_early() -> int:
            stream = lab.cluster.pool.generate(lab.model, greedy(prompt, 400))
            count = 0
            async for _ in stream:
                count += 1
                if count == ARRIVED:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            return count

        assert asyncio.run(leave_early()) == ARRIVED
        lab.wait_until(lambda: host.hosted.pool.load().running == 0, "the host stops too")
        wait_quiet(lab)


def test_what_cannot_work_is_said_by_the_host(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        lab.wait_hosted()
        with pytest.raises(PromptTooLongError, match="context holds 512") as refusal:
            lab.ask(greedy([1] * 600))
        assert refusal.value.hint
        assert_same(alone, start_streams(lab, mixture(alone, 1, TOKENS)))


def test_a_host_remembers_beginnings(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        lab.wait_hosted()
        request = replace(greedy(list(range(1, 100)), 8), cache_salt="mine", speculation=Speculation("ngram"))
        first, second = lab.start(request), None
        assert first.result() == alone.answer(request)
        second = lab.start(request)
        assert second.result() == alone.answer(request)
        assert second.timings is not None
        assert second.timings.cached_tokens > 0
        assert second.timings.drafted_tokens > 0


def test_a_model_that_nobody_can_serve_fails_at_its_host_too(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        host = lab.wait_hosted()
        host.hosted.pool._patience_s = 0.0
        talk = start_streams(lab, [greedy(mixture(alone, 1, 1)[0].prompt, 400)])[0]
        lab.kill(lab.stage(1))
        with pytest.raises(CapacityError, match="does not fit"):
            talk.result()


def test_the_coordinator_is_started_again(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=THREE, stages=3, home_rtt_s=FAR_S) as lab:
        lab.wait_hosted()
        start_streams(lab, mixture(alone, 2, TOKENS))
        lab.kill_cluster()
        lab.open_cluster()
        lab.serve()
        lab.wait_serving()
        lab.wait_hosted()
        assert_same(alone, start_streams(lab, mixture(alone, 4, TOKENS)))
        wait_quiet(lab)
