"""Machines come and go, models too: work moves first, nobody is cut off, and what cannot be served says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcompute.control import PlacementPolicy
from shardcompute.core.errors import CapacityError, UnknownModelError
from support.models.requests import greedy, mixture, prompts
from support.models.tiny_checkpoint import save_tiny_llama
from support.swarm.lab import SPREAD, STILL, Alone, open_alone, swarm
from support.swarm.streams import assert_undisturbed, start_streams

KEEN = PlacementPolicy(latency_weight=0.0, machine_price=0.0, min_gain=0.1, least_lifetime_s=0.0)
"""Every machine that makes many streams faster is taken in, also while the chain serves."""


def test_a_newcomer_that_pays_is_taken_in(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    # Room for the scratch of a second stage: while a chain moves, machines hold their old layers and the new ones.
    with swarm(tmp_path, tiny, layers=(40, 40), stages=2, placing=KEEN) as lab:
        talks = start_streams(lab, alone)
        lab.add_worker(40)
        lab.wait_until(lambda: len(lab.chain().stages) == 3 and lab.is_serving(), lab.describe)
        talks += start_streams(lab, alone, 2, 20)
        assert_undisturbed(lab, alone, talks)
        assert " better: from " in lab.chain().last_move


def test_a_newcomer_that_does_not_pay_stands_by(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3), stages=2) as lab:
        talks = start_streams(lab, alone)
        before = lab.chain().stages
        newcomer = lab.add_worker(3)
        lab.wait_serving(stages=2, standbys=1)
        assert_undisturbed(lab, alone, talks)
        assert lab.chain().stages == before
        assert lab.ready_standbys(lab.chain()) == [newcomer.node]
        assert len(lab.activations) == 1


@pytest.mark.parametrize("stage", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("has_standby", [True, False], ids=["to a standby", "to the others"])
def test_a_drained_machine_hands_over_before_it_goes(
    tmp_path: Path, tiny: Path, alone: Alone, stage: int, has_standby: bool
) -> None:
    layers, placing = ((2, 2, 2, 2), STILL) if has_standby else ((7, 7, 7), SPREAD)
    with swarm(tmp_path, tiny, layers=layers, stages=3, standbys=int(has_standby), placing=placing) as lab:
        talks = start_streams(lab, alone)
        leaver = lab.stage(stage)
        lab.cluster.drain(leaver.node)
        lab.wait_until(lambda: leaver.has_left, lambda: f"it may go: {lab.describe()}")
        assert leaver.sessions() == 0
        lab.kill(leaver)
        talks += start_streams(lab, alone, 2, 20)
        assert_undisturbed(lab, alone, talks)
        # Where its goodbye was not heard, its silence is taken for one.
        lab.wait_until(lambda: lab.state.nodes[leaver.node].status == "gone", lab.describe)
        assert len(lab.chain().stages) == (3 if has_standby else 2)


def test_a_drained_machine_that_nobody_can_replace_stays(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        leaver = lab.stage(1)
        lab.cluster.drain(leaver.node)
        lab.wait_until(lambda: lab.state.nodes[leaver.node].status == "draining", "it is draining")
        assert_undisturbed(lab, alone, start_streams(lab, alone, tokens=30))
        assert not leaver.has_left
        lab.add_worker(2)
        lab.wait_until(lambda: leaver.has_left, lambda: f"it may go: {lab.describe()}")
        assert_undisturbed(lab, alone, start_streams(lab, alone, tokens=30))


def test_a_machine_that_must_rest_hands_over_stays_and_works_again(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone)
        resting = lab.stage(1)
        resting.rest("it runs on its battery", is_at_rest=False)
        lab.wait_until(lambda: resting.is_idle, lambda: f"it holds nothing: {lab.describe()}")
        resting.rest("it runs on its battery", is_at_rest=True)
        lab.wait_until(lambda: lab.state.nodes[resting.node].status == "resting", lab.describe)
        talks += start_streams(lab, alone, 2, 20)
        assert_undisturbed(lab, alone, talks)
        assert not resting.has_left
        resting.rest("", is_at_rest=False)
        lab.wait_serving(stages=3, standbys=1)
        assert lab.ready_standbys(lab.chain()) == [resting.node]


def test_a_machine_that_nobody_can_replace_rests_and_goes_on_with_its_weights(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        resting = lab.stage(1)
        loads = list(resting.loads)
        resting.rest("it runs on its battery", is_at_rest=True)
        lab.wait_until(lambda: lab.chain().status == "broken", lab.describe)
        resting.rest("", is_at_rest=False)
        lab.wait_serving(stages=3)
        assert_undisturbed(lab, alone, start_streams(lab, alone, tokens=20))
        assert resting.loads == loads


def test_a_machine_thrown_out_is_replaced(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2, 2), stages=3, standbys=1) as lab:
        talks = start_streams(lab, alone)
        outcast = lab.stage(1)
        lab.cluster.revoke_node(outcast.node)
        lab.wait_until(lambda: bool(outcast.refusal), "it was told")
        lab.workers.remove(outcast)
        assert_undisturbed(lab, alone, talks)
        assert outcast.node not in lab.chain().nodes
        outcast.close()


def test_what_no_longer_fits_is_said_at_once_and_served_again_later(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start_streams(lab, alone)
        victim = lab.stage(1)
        lab.kill(victim)
        for talk in talks:
            with pytest.raises(CapacityError, match=r"\d\.\d MiB are missing") as raised:
                talk.result()
            assert raised.value.http_status == 503
        with pytest.raises(CapacityError, match="are missing"):
            lab.ask(greedy(prompts(alone.service.tokenizer)[0]))
        lab.revive(victim)
        lab.wait_serving(stages=3)
        assert_undisturbed(lab, alone, start_streams(lab, alone))


def test_a_model_before_any_machine(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    request = greedy(prompts(alone.service.tokenizer)[0])
    with swarm(tmp_path, tiny, layers=()) as lab:
        lab.serve()
        lab.wait_until(lambda: tiny.name in lab.state.models, "it is known")
        for room in (2, 2):
            with pytest.raises(CapacityError):
                lab.ask(request)
            lab.add_worker(room)
        with pytest.raises(CapacityError):
            lab.ask(request)
        lab.add_worker(2)
        lab.wait_serving(stages=3)
        assert lab.ask(request) == alone.answer(request)


def test_a_model_is_dropped_and_loaded_again(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        talks = start_streams(lab, alone)
        lab.cluster.drop(lab.model)
        for talk in talks:
            with pytest.raises(CapacityError, match="no longer served"):
                talk.result()
        with pytest.raises(UnknownModelError):
            lab.ask(talks[0].request)
        lab.wait_until(lambda: not any(w.stages.shards() for w in lab.workers), lab.describe)
        lab.wait_until(lambda: not lab.state.models, "nothing is known of it")
        lab.serve()
        lab.wait_serving(stages=3)
        assert_undisturbed(lab, alone, start_streams(lab, alone, tokens=30))


def test_a_model_is_wanted_again_before_it_is_gone(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3) as lab:
        for _ in range(3):
            lab.cluster.drop(lab.model)
            lab.serve()
        lab.wait_serving(stages=3)
        assert_undisturbed(lab, alone, start_streams(lab, alone, tokens=30))


def test_chains_of_one_model_share_the_load(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3, 3, 3), chains=2, stages=2) as lab:
        talks = start_streams(lab, alone, 8)
        used = [view.chain for view in lab.cluster.pool.requests.views()]
        assert sorted(used.count(chain.id) for chain in lab.state.live_chains()) == [4, 4]
        assert_undisturbed(lab, alone, talks)


def test_a_chain_that_cannot_be_repaired_leaves_the_others_alone(
    tmp_path: Path, tiny: Path, alone: Alone
) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3, 3, 3), chains=2, stages=2) as lab:
        talks = start_streams(lab, alone, 8)
        broken, healthy = lab.state.live_chains()
        chain_of = {view.id: view.chain for view in lab.cluster.pool.requests.views()}
        assert set(chain_of.values()) == {broken.id, healthy.id}
        victim = lab.worker(broken.nodes[0])
        lab.kill(victim)
        failed = 0
        for talk in talks:
            try:
                assert talk.result() == alone.answer(talk.request)
            except CapacityError:
                failed += 1
        assert 0 < failed <= 4, "the other chain goes on"
        for talk in start_streams(lab, alone, 4, 30):
            assert talk.result() == alone.answer(talk.request)
        lab.revive(victim)
        lab.wait_serving(stages=2)
        assert_undisturbed(lab, alone, start_streams(lab, alone, 4, 30))


def test_fewer_chains_are_wanted(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(3, 3, 3, 3), chains=2, stages=2) as lab:
        lab.serve(chains=1)
        lab.wait_until(lambda: len(lab.state.chains) == 1, "one chain is left, and all drivers know")
        # Whoever asks from now on must not be sent to the chain that is gone.
        assert_undisturbed(lab, alone, start_streams(lab, alone, 4, 30))


def test_two_models_at_once(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=2, layers=4)
    with (
        open_alone(other) as service,
        swarm(tmp_path, tiny, other, layers=(4, 4, 4), standbys=0) as lab,
    ):
        second = Alone(service)
        talks = [(alone, talk) for talk in start_streams(lab, alone)]
        talks += [(second, lab.start(request, "other")) for request in mixture(second, 4, 200)]
        for truth, talk in talks:
            assert talk.result() == truth.answer(talk.request)
        assert {chain.model for chain in lab.state.live_chains()} == {"tiny", "other"}
        lab.cluster.drop("other")
        assert_undisturbed(lab, alone, start_streams(lab, alone, tokens=30))


def test_a_stream_waits_a_while_for_machines_to_come_back(tmp_path: Path, tiny: Path, alone: Alone) -> None:
    with swarm(tmp_path, tiny, layers=(2, 2, 2), stages=3, patience_s=60.0) as lab:
        [talk] = start_streams(lab, alone, 1)
        lab.kill(lab.stage(1))
        lab.wait_until(lambda: not lab.cluster.pool.is_ready(), "nobody can serve it")
        with pytest.raises(CapacityError, match="are missing"):
            lab.ask(greedy(talk.request.prompt, 1))
        assert not talk.is_over
        lab.add_worker(2)
        assert_undisturbed(lab, alone, [talk])
